"""Who is ahead of whom: the comparisons that the paper's claims, and ours, come down to, from results on disk.

A lead compares trainings of the same seeds, all of which must be there, with the best of the rivals: the one with the
highest mean over these seeds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

from exitflow.experiments.results import Results
from exitflow.experiments.tables import TABLES, Cell


@dataclass(frozen=True)
class Contest:
    """A row of a table against rows of it, or of another table, in each of its settings."""

    title: str
    table: str
    leader: str
    rivals: tuple[str, ...]
    rivals_table: str = ""  # the same if not given

    def cells(self, dataset: str, setting: str) -> Iterator[Cell]:
        """The leader's first; none where a table has no such setting, or is about other data."""
        places = [(self.table, self.leader), *((self.rivals_table or self.table, rival) for rival in self.rivals)]
        for name, label in places:
            table = TABLES[name]
            if dataset in table.datasets and setting in table.settings:
                yield table.cell(dataset, label, setting)


@dataclass(frozen=True)
class Lead:
    """In one setting; accuracies are fractions."""

    accuracy: float  # of the leader, mean over the seeds that all have
    best_rival: float  # likewise
    num_ahead: int  # seeds in which the leader is ahead of every rival
    num_seeds: int

    @property
    def difference(self) -> float:
        """Below 0 where the leader is behind."""
        return self.accuracy - self.best_rival


_BASELINES = ("equal-weight", "flops-prop")
_FOUR = (*_BASELINES, "serving-rate", "balanced-adj")
AUTO_AND_THE_FOUR = Contest("auto over the paper's four", "ours", "auto", _FOUR, "table1")


def _strategies(prefix: str, table: str) -> Iterator[Contest]:
    """The strategies that the paper proposes, before those it finds; and what it says of FLOPS Prop."""
    for name in ("serving-rate", "balanced-adj"):
        yield Contest(f"{prefix}: {name} over equal-weight and flops-prop", table, name, _BASELINES)
    others = tuple(name for name in _FOUR if name != "flops-prop")
    yield Contest(f"{prefix}: flops-prop over the other three", table, "flops-prop", others)


CONTESTS = (
    *_strategies("equal partition", "table1"),
    *_strategies("17 nodes", "table4"),
    *_strategies("biased partition", "table5"),
    Contest("highly biased partition: serving-rate over equal-weight", "table6", "serving-rate", ("equal-weight",)),
    Contest("highly biased partition: p = 0.2 over p = 0", "table6", "serving-rate p=0.2", ("serving-rate",)),
    AUTO_AND_THE_FOUR,
    Contest(
        "auto over the four with our heads and step",
        "ours",
        "auto",
        tuple(f"{name} + grid + coverage" for name in _FOUR),
    ),
)


def find_lead(contest: Contest, dataset: str, setting: str, results: Results) -> Lead | None:
    """None where no seed has all that are compared."""
    cells = list(contest.cells(dataset, setting))
    if len(cells) < 1 + len(contest.rivals):
        return None
    found = [[results.get(cell.training_name(seed)) for cell in cells] for seed in results.seeds()]
    by_seed = [[result.accuracy(setting) for result in row if result] for row in found if all(row)]
    if not by_seed:
        return None
    own, *others = (fmean(column) for column in zip(*by_seed, strict=True))
    ahead = sum(leader > max(rivals) for leader, *rivals in by_seed)
    return Lead(own, max(others), ahead, len(by_seed))
