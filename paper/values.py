"""Single figures in the sentences of documents, by what they are.

accuracy TABLE DATASET SETTING ROW     accuracy as served, in %, mean over seeds
paper TABLE DATASET SETTING ROW        what the paper reports there
exit EXIT TABLE DATASET SETTING ROW    accuracy of that exit by itself on all test images
lead DATASET SETTING CONTEST           by how many points the leader of a contest is ahead of the best of its rivals
bytes DATASET ROW                      what a training of a neighbouring method sends, by what one of auto sends
multiply-adds DATASET ROW              likewise
trainings                              how many have a result
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from exitflow.errors import ConfigError, suggestion
from exitflow.report.page import MISSING
from exitflow.report.terminal import percent
from exitflow.runs.spread import Spread
from exitflow.runs.training_costs import TrainingCosts
from paper.figures import TableFigures
from paper.grids import signed
from paper.leads import CONTESTS, find_lead
from paper.results import Results
from paper.tables import DATASETS, Table, find_table


def value(query: str, results: Results) -> str:
    """As it stands in a sentence; a dash where there is no result."""
    kind, *arguments = query.split(" ")
    number = _NUM_ARGUMENTS.get(kind)
    if number is None:
        raise ConfigError(f"there is no value {kind!r}{suggestion(kind, list(_NUM_ARGUMENTS))}")
    if len(arguments) < number:
        raise ConfigError(f"{kind!r} needs {number} words, got {len(arguments)}: {query!r}")
    words = [*arguments[: number - 1], " ".join(arguments[number - 1 :])] if number else []
    return _VALUES[kind](results, words)


def _accuracy(results: Results, words: Sequence[str]) -> str:
    table, dataset, setting, label = words
    figures = _figures(table, dataset, setting, label, results)
    found = figures.accuracy(dataset, label, setting)
    return percent(found.mean) if found else MISSING


def _paper(results: Results, words: Sequence[str]) -> str:
    table, dataset, setting, label = words
    figure = _figures(table, dataset, setting, label, results).table.paper_figure(dataset, label, setting)
    return f"{figure['mean']:.1f}" if figure else MISSING


def _exit(results: Results, words: Sequence[str]) -> str:
    exit, table, dataset, setting, label = words
    figures = _figures(table, dataset, setting, label, results)
    lines = [result.line for result in figures.found(figures.table.cell(dataset, label, setting))]
    found = [(line.own_answers or line.answers).exit_accuracy for line in lines]
    if exit not in ("1", "2", "3"):
        raise ConfigError(f"expected exit 1, 2 or 3, got {exit!r}")
    return percent(Spread.of([accuracies[int(exit) - 1] for accuracies in found]).mean) if found else MISSING


def _lead(results: Results, words: Sequence[str]) -> str:
    dataset, setting, title = words
    contest = next((each for each in CONTESTS if each.title == title), None)
    if contest is None:
        raise ConfigError(f"there is no contest {title!r}{suggestion(title, [each.title for each in CONTESTS])}")
    cells = contest.cells(dataset, setting)
    found = find_lead(cells, results, results.seeds()) if cells else None
    return signed(found.difference) if found else MISSING


def _ratio(of: Callable[[TrainingCosts], int | None]) -> Callable[[Results, Sequence[str]], str]:
    def ratio(results: Results, words: Sequence[str]) -> str:
        dataset, label = words
        figures = _figures("peers", dataset, find_table("peers").settings[0], label, results)
        own, ours = figures.costs(dataset, label), figures.costs(dataset, "auto")
        known = (own and of(own)), (ours and of(ours))
        return f"{known[0] / known[1]:.1f}" if known[0] and known[1] else MISSING

    return ratio


def _figures(name: str, dataset: str, setting: str, label: str, results: Results) -> TableFigures:
    table: Table = find_table(name)
    choices = ((dataset, DATASETS), (setting, table.settings), (label, [row.label for row in table.rows]))
    for given, known in choices:
        if given not in known:
            raise ConfigError(f"{name} has no {given!r}{suggestion(given, list(known))}")
    return TableFigures(table, results, results.seeds())


_VALUES: dict[str, Callable[[Results, Sequence[str]], str]] = {
    "accuracy": _accuracy,
    "paper": _paper,
    "exit": _exit,
    "lead": _lead,
    "bytes": _ratio(lambda costs: costs.bytes_sent),
    "multiply-adds": _ratio(lambda costs: costs.multiply_adds),
    "trainings": lambda results, _: f"{len(results.all()):,}",
}
_NUM_ARGUMENTS = {"accuracy": 4, "paper": 4, "exit": 5, "lead": 3, "bytes": 2, "multiply-adds": 2, "trainings": 0}
