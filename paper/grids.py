"""A table of results as values, which pages and documents print: what was measured, the paper's, what is best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from exitflow.report.page import MISSING
from exitflow.report.palette import REFERENCE
from exitflow.report.terminal import amount
from exitflow.runs.spread import Spread
from exitflow.topology.settings import PAPER_SETTINGS
from paper.figures import TableFigures
from paper.leads import AGAINST_THE_PAPER, CONTESTS, Lead, find_lead
from paper.results import Results
from paper.tables import TABLES, Table, tables_of

DATASET_TITLES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
COST_COLUMNS = ("bytes sent", "multiply-adds")
MINUS = "\N{MINUS SIGN}"
RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Entry:
    """One cell; accuracies are fractions."""

    measured: Spread | None
    num_seeds: int
    paper: Spread | None
    best: bool = False  # of its column, as printed

    @property
    def difference(self) -> float | None:
        """From the paper."""
        return self.measured.mean - self.paper.mean if self.measured and self.paper else None


@dataclass(frozen=True)
class Grid:
    """A table on one data set, as far as it has results."""

    table: Table
    dataset: str
    seeds: tuple[int, ...]  # of all its results
    rows: Mapping[str, tuple[Entry, ...]]  # label -> an entry for each setting
    summary: Mapping[str, tuple[float | None, ...]]  # rows that follow from others, and from other tables
    costs: Mapping[str, tuple[str, ...]]  # label -> what a training took, where the table shows it

    @property
    def columns(self) -> list[str]:
        """The first one names the rows."""
        return ["", *self.table.settings, *(COST_COLUMNS if self.costs else ())]

    @property
    def entries(self) -> list[Entry]:
        """All of them."""
        return [entry for row in self.rows.values() for entry in row]

    @property
    def num_found(self) -> int:
        """How many have a result."""
        return sum(entry.measured is not None for entry in self.entries)

    @property
    def has_paper(self) -> bool:
        """Whether the paper reports any of it."""
        return any(entry.paper for entry in self.entries)

    @property
    def notes(self) -> list[str]:
        """What a reader has to know."""
        if not self.num_found:
            return ["No results yet."]
        notes = ["Accuracy as served, in %"]
        if self.seeds:
            notes[0] += f"; {_over(self.seeds)}"
        notes[0] += "."
        if others := [row.label for row in self.table.rows if not row.serves_the_setting]:
            notes.append(f"{' and '.join(others)} answer everything at one exit, so no column is theirs.")
        if any(self.raised(entry) for entry in self.entries):
            notes.append(f"A raised figure: over so many seeds, not {len(self.seeds)}.")
            if self.summary:
                notes.append(f"The last two rows: over the seeds that auto and all of {_paper_title(self.table)} have.")
        return notes

    def raised(self, entry: Entry) -> str:
        """The number of seeds where it is not that of the table."""
        fewer = entry.measured is not None and entry.num_seeds != len(self.seeds)
        return str(entry.num_seeds).translate(RAISED) if fewer else ""


def _over(seeds: tuple[int, ...]) -> str:
    if len(seeds) == 1:
        return f"one seed, {seeds[0]}"
    return f"mean ± standard deviation over the seeds {', '.join(map(str, seeds[:-1]))} and {seeds[-1]}"


def table_grid(table: Table, dataset: str, results: Results) -> Grid:
    """From results on disk."""
    seeds = results.seeds()
    figures = TableFigures(table, results, seeds)
    rows = {row.label: [_entry(figures, dataset, row.label, each) for each in table.settings] for row in table.rows}
    compared = [rows[row.label] for row in table.rows if row.serves_the_setting]
    for column in range(len(table.settings)):
        _mark_best(compared, column)
    found = [figures.found(cell) for cell in table.cells([dataset])]
    own_seeds = tuple(sorted({result.training.seed for results in found for result in results}))
    entries = {label: tuple(row) for label, row in rows.items()}
    costs = {label: _costs(figures, dataset, label) for label in rows} if table.shows_costs else {}
    return Grid(table, dataset, own_seeds, entries, _summary(figures, dataset), costs)


def _costs(figures: TableFigures, dataset: str, label: str) -> tuple[str, ...]:
    found = figures.costs(dataset, label)
    return (amount(found.bytes_sent), amount(found.multiply_adds)) if found else (MISSING, MISSING)


def _entry(figures: TableFigures, dataset: str, label: str, setting: str) -> Entry:
    found = figures.found(figures.table.cell(dataset, label, setting))
    paper = figures.table.paper_figure(dataset, label, setting)
    return Entry(
        figures.accuracy(dataset, label, setting),
        len(found),
        Spread(paper["mean"] / 100, paper["std"] / 100) if paper else None,
    )


def _mark_best(rows: list[list[Entry]], column: int) -> None:
    """Best is the highest as printed, among at least two."""
    means = [round(100 * row[column].measured.mean, 1) for row in rows if row[column].measured]  # type: ignore[union-attr]
    if len(means) < 2:
        return
    for row in rows:
        entry = row[column]
        if entry.measured and round(100 * entry.measured.mean, 1) == max(means):
            row[column] = Entry(entry.measured, entry.num_seeds, entry.paper, best=True)


def _summary(figures: TableFigures, dataset: str) -> dict[str, tuple[float | None, ...]]:
    """Of tables of ours: the best of the paper's trainings, and how far auto is ahead, over the seeds that all have."""
    contest = AGAINST_THE_PAPER.get(figures.table.name)
    if contest is None:
        return {}
    cells = [contest.cells(dataset, setting) for setting in figures.table.settings]
    leads = [find_lead(each, figures.results, figures.seeds) for each in cells]
    return {
        f"{REFERENCE} {_paper_title(figures.table)}": tuple(lead.best_rival if lead else None for lead in leads),
        "auto is ahead by": tuple(lead.difference if lead else None for lead in leads),
    }


def _paper_title(table: Table) -> str:
    """Of the paper's table that one of ours is set against: Table 1, and so on."""
    return TABLES[AGAINST_THE_PAPER[table.name].rivals_table].title.partition(":")[0]


LeadRow = tuple[Lead | str, ...]  # for each setting, a lead, or MISSING, or nothing where nothing can be compared
LEAD_COLUMNS = ("", *PAPER_SETTINGS)
LEAD_NOTE = (
    "How many points of accuracy as served the first is ahead of the best of the others, in the mean of the seeds "
    "that all of them have."
)


def lead_rows(dataset: str, results: Results) -> dict[str, LeadRow]:
    """Every contest that has a result on this data set, by its title."""
    seeds = results.seeds()
    rows: dict[str, LeadRow] = {}
    asked = {table.name for table in tables_of(results.scale)}
    for contest in (each for each in CONTESTS if each.table in asked):
        cells = [contest.cells(dataset, setting) for setting in PAPER_SETTINGS]
        leads = tuple((find_lead(each, results, seeds) or MISSING) if each else "" for each in cells)
        if any(isinstance(lead, Lead) for lead in leads):
            rows[contest.title] = leads
    return rows


def signed(difference: float) -> str:
    """0.0134 as +1.3."""
    text = f"{100 * difference:+.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text.replace("-", MINUS)
