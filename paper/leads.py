"""Who is ahead of whom: the comparisons that the paper's claims, and ours, come down to, from results on disk.

A lead compares trainings of the same seeds, all of which must be there, with the best of the rivals: the one with the
highest mean over these seeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from paper.results import Results
from paper.tables import TABLES, Cell


@dataclass(frozen=True)
class Contest:
    """A row of a table against rows of it, or of another table, in each of its settings."""

    title: str
    table: str
    leader: str
    rivals: tuple[str, ...]
    rivals_table: str = ""  # the same if not given

    def cells(self, dataset: str, setting: str) -> list[Cell]:
        """The leader's first.

        None where a table has no such setting or is about other data, or where a rival is trained just like the
        leader: serving-rate is equal-weight where all exits serve the same.
        """
        places = [(self.table, self.leader), *((self.rivals_table or self.table, rival) for rival in self.rivals)]
        tables = [TABLES[name] for name, _ in places]
        if not all(dataset in table.datasets and setting in table.settings for table in tables):
            return []
        cells = [table.cell(dataset, label, setting) for table, (_, label) in zip(tables, places, strict=True)]
        return cells if _can_differ(*cells) else []


def _can_differ(leader: Cell, *rivals: Cell) -> bool:
    own = (leader.training(0), leader.row.shows_own_answers)
    return own not in [(rival.training(0), rival.row.shows_own_answers) for rival in rivals]


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
_TABLE6 = ("equal-weight", "serving-rate", "serving-rate p=0.2")
AGAINST_THE_PAPER = {  # table -> auto, which it is about, and the trainings of the paper's table for the same system
    contest.table: contest
    for contest in (
        Contest("auto over the paper's four", "ours", "auto", _FOUR, "table1"),
        Contest("17 nodes: auto over the paper's four", "ours-17-nodes", "auto", _FOUR, "table4"),
        Contest("biased partition: auto over the paper's four", "ours-biased", "auto", _FOUR, "table5"),
        Contest("highly biased partition: auto over Table 6", "ours-highly-biased", "auto", _TABLE6, "table6"),
    )
}


def _strategies(prefix: str, table: str) -> Iterator[Contest]:
    """The two that the paper proposes against the two it compares with, and FLOPS Prop against the rest."""
    for name in ("serving-rate", "balanced-adj"):
        yield Contest(f"{prefix}: {name} over equal-weight and flops-prop", table, name, _BASELINES)
    others = tuple(name for name in _FOUR if name != "flops-prop")
    yield Contest(f"{prefix}: flops-prop over the other three", table, "flops-prop", others)


def _others(table: str) -> tuple[str, ...]:
    """All but auto that serve the setting of a column."""
    return tuple(row.label for row in TABLES[table].rows if row.serves_the_setting and row.label != "auto")


CONTESTS = (
    *_strategies("equal partition", "table1"),
    *_strategies("17 nodes", "table4"),
    *_strategies("biased partition", "table5"),
    Contest("highly biased partition: serving-rate over equal-weight", "table6", "serving-rate", ("equal-weight",)),
    Contest("highly biased partition: p = 0.2 over p = 0", "table6", "serving-rate p=0.2", ("serving-rate",)),
    *AGAINST_THE_PAPER.values(),
    Contest(
        "auto over the four with our heads and step",
        "ours",
        "auto",
        tuple(f"{name} + grid + coverage" for name in _FOUR),
    ),
    Contest(
        "auto over the four with our heads, step and answers together",
        "blended",
        "auto",
        tuple(f"{name} + grid + coverage + blended" for name in _FOUR),
    ),
    Contest("auto over the neighbouring methods", "peers", "auto", _others("peers")),
    *(Contest(f"{regime}: auto over the paper's four", regime, "auto", _FOUR) for regime in ("long", "pretrained")),
    *(Contest(f"{regime}: auto over all", regime, "auto", _others(regime)) for regime in ("long", "pretrained")),
)


def find_lead(cells: Sequence[Cell], results: Results, seeds: Sequence[int]) -> Lead | None:
    """Of the first of `cells` over the others, all of one setting; None where no seed has them all."""
    by_seed = []
    for seed in seeds:
        found = [results.get(cell.training(seed), own_answers=cell.row.shows_own_answers) for cell in cells]
        if all(found):
            by_seed.append([result.accuracy(cells[0].setting) for result in found if result])
    if not by_seed:
        return None
    own, *others = (fmean(column) for column in zip(*by_seed, strict=True))
    ahead = sum(leader > max(rivals) for leader, *rivals in by_seed)
    return Lead(own, max(others), ahead, len(by_seed))
