"""The report on a folder of results: the paper's tables and ours, beside the paper's figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from exitflow.report.page import MISSING, Field, Page, PageTable, Section
from exitflow.report.palette import REFERENCE
from exitflow.report.plots import (
    ERROR_TERMS_MEANING,
    WEIGHT_LIMITS,
    Line,
    Plot,
    curves_plot,
    error_terms_plot,
    exits_plot,
    settings_plot,
)
from exitflow.report.series import Series, Training
from exitflow.report.terminal import percent, spread
from exitflow.runs.spread import Spread
from exitflow.topology.settings import parse_setting
from paper.figures import TableFigures
from paper.grids import (
    DATASET_TITLES,
    LEAD_COLUMNS,
    LEAD_NOTE,
    Entry,
    Grid,
    lead_rows,
    signed,
    table_grid,
)
from paper.leads import Lead
from paper.origin import origin_facts
from paper.recorded_terms import recorded_terms
from paper.results import Result, Results
from paper.tables import DATASETS, NEUTRAL_SETTING, TABLES, Table, published_gradient_variance, tables_of

VARIANCE_TITLE = "Table 3: gradient variance"
SHORT_TITLES = {
    "ours": "Ours",
    "blended": "All blended",
    "ours-17-nodes": "Ours, 17 nodes",
    "ours-biased": "Ours, biased",
    "ours-highly-biased": "Ours, highly biased",
    "parts": "Parts of ours",
    "peers": "Peers",
    "departures": "Departures",
    "departures-highly-biased": "Departures, highly biased",
    "long": "Long",
    "pretrained": "Pretrained",
    "long-highly-biased": "Long, highly biased",
    "long-17-nodes": "Long, 17 nodes",
}


def short_title(table: Table) -> str:
    """Table 1, and so on."""
    return SHORT_TITLES.get(table.name, table.title.partition(":")[0])


def results_page(results: Results) -> Page:
    """All that is there; what is not is shown as missing."""
    asked = tables_of(results.scale)
    grids = [table_grid(table, name, results) for table in asked for name in table.datasets]
    overview = Section("overview", "What is here", tables=[_overview(grids, results)])
    tables = [_table_section(table, [grid for grid in grids if grid.table is table], results) for table in asked]
    return Page(
        "Results beside the paper's",
        "Accuracy of the whole system as served, for the serving settings and trainings of Kaplan et al. (AAAI 2025), "
        "and for trainings of ours.",
        origin_facts(results),
        [
            overview,
            *_leads_section(results),
            *tables,
            _variance_section(results),
            *_error_section(results),
            *_trainings_section(results),
        ],
    )


def _leads_section(results: Results) -> list[Section]:
    note = f"{LEAD_NOTE} Below each: in how many of these it is ahead of all of them."
    tables = []
    for dataset in DATASETS:
        rows = [(title, [*map(_lead_field, leads)]) for title, leads in lead_rows(dataset, results).items()]
        if rows:
            tables.append(PageTable(DATASET_TITLES[dataset], LEAD_COLUMNS, rows, [note]))
    return [Section("leads", "Who is ahead", tables=tables)] if tables else []


def _lead_field(lead: Lead | str) -> Field:
    if isinstance(lead, str):
        return Field(lead, missing=lead == MISSING)
    return Field(signed(lead.difference), f"{lead.num_ahead} of {lead.num_seeds}")


def _overview(grids: Sequence[Grid], results: Results) -> PageTable:
    rows = []
    for table in tables_of(results.scale):
        fields = []
        for dataset in DATASETS:
            grid = next((each for each in grids if each.table is table and each.dataset == dataset), None)
            if grid is None:
                fields.append(Field(f"{DATASET_TITLES[table.datasets[0]]} only", missing=True))
            else:
                found = f"{grid.num_found} of {len(grid.entries)}"
                fields.append(Field(found, _seeds_found(grid), missing=not grid.num_found))
        rows.append((table.title, fields))
    rows.append((VARIANCE_TITLE, [_variance_found(dataset, results) for dataset in DATASETS]))
    return PageTable("Cells with a result", ["", *(DATASET_TITLES[name] for name in DATASETS)], rows)


def _variance_found(dataset: str, results: Results) -> Field:
    seeds = [seed for seed in results.seeds() if results.gradient_variance(dataset, seed)]
    return Field("measured", _seeds(seeds)) if seeds else Field("not measured", missing=True)


def _seeds_found(grid: Grid) -> str:
    """How many seeds the cells rest on, and which where all rest on the same."""
    numbers = sorted({entry.num_seeds for entry in grid.entries if entry.measured})
    if not numbers:
        return ""
    if len(numbers) > 1:
        return f"{numbers[0]} to {numbers[-1]} seeds"
    return _seeds(grid.seeds)


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def _table_section(table: Table, grids: Sequence[Grid], results: Results) -> Section:
    parts = [
        Section(
            f"{table.name}-{grid.dataset}",
            DATASET_TITLES[grid.dataset],
            tables=[_grid_table(grid, _not_by_exit(grid, results))],
            plots=list(_plots(grid, results)),
        )
        for grid in grids
    ]
    return Section(table.name, table.title, parts=parts, short=short_title(table))


def _not_by_exit(grid: Grid, results: Results) -> list[str]:
    """The rows whose networks have other exits than the settings speak of."""
    setting = grid.table.settings[0]
    figures = TableFigures(grid.table, results, grid.seeds)
    found = {label: figures.found(grid.table.cell(grid.dataset, label, setting)) for label in grid.rows}
    return [label for label, trainings in found.items() if trainings and not _has_exits_of(setting, trainings[0])]


def _has_exits_of(setting: str, training: Training) -> bool:
    return training.system.topology.num_exits == len(parse_setting(setting))


def _grid_table(grid: Grid, not_by_exit: Sequence[str]) -> PageTable:
    notes = [*grid.notes]
    if not_by_exit:
        notes.append(f"The figures by exit leave out {', '.join(not_by_exit)}, which has other exits.")
    if grid.has_paper:
        notes.append("Below each figure: the paper's, and the difference from it in points.")
    if any(entry.best for entry in grid.entries):
        notes.append("Marked: the best of a column.")
    rows = [
        (label, [*(_field(grid, entry) for entry in entries), *map(_cost_field, grid.costs.get(label, ()))])
        for label, entries in grid.rows.items()
    ]
    summary = [
        (label, [_summary_field(value, as_difference="ahead" in label) for value in values])
        for label, values in grid.summary.items()
    ]
    caption = "Columns: the % of requests that exits 1-2-3 answer"
    return PageTable(caption, grid.columns, rows, notes, summary)


def _field(grid: Grid, entry: Entry) -> Field:
    text = spread(entry.measured.mean, entry.measured.std) if entry.measured else MISSING
    detail = ""
    if entry.paper:
        detail = f"paper {percent(entry.paper.mean)}"
    if entry.difference is not None:
        detail += f", {signed(entry.difference)}"
    raised = str(entry.num_seeds) if grid.raised(entry) else ""
    return Field(text, detail, best=entry.best, missing=entry.measured is None, raised=raised)


def _cost_field(text: str) -> Field:
    return Field(text, missing=text == MISSING)


def _summary_field(value: float | None, *, as_difference: bool) -> Field:
    if value is None:
        return Field(MISSING, missing=True)
    return Field(signed(value) if as_difference else percent(value))


def _plots(grid: Grid, results: Results) -> Iterator[Plot]:
    """Those of a table with results; a table of one column says it all itself."""
    settings = grid.table.settings
    if not grid.num_found or len(settings) < 2:
        return
    where = f"{short_title(grid.table)}, {DATASET_TITLES[grid.dataset]}"
    stem = f"{grid.table.name}-{grid.dataset}"
    yield settings_plot(f"{stem}-settings", f"{where}: accuracy as served", settings, _settings_panels(grid))
    found = {each: _series(grid, each, results) for each in (settings[0], settings[-1])}
    ends = {setting: series for setting, series in found.items() if series}
    if not ends:
        return
    panels = {f"trained for {setting}": _exit_lines(series) for setting, series in ends.items()}
    yield exits_plot(f"{stem}-exits", f"{where}: each exit on all test images", panels)
    setting, series = next(iter(ends.items()))
    series = [each for each in series if not grid.table.row(each.label).shows_own_answers]  # which learned nothing else
    exits = range(1, series[0].trainings[0].system.topology.num_exits + 1)
    learned = {f"exit {exit}": (lambda each, exit=exit: each.exit_accuracy(exit)) for exit in exits}
    weights = {f"exit {exit}": (lambda each, exit=exit: each.exit_weight(exit)) for exit in exits}
    title = f"{where}: learning, trained for {setting}"
    yield curves_plot(f"{stem}-learning", title, "validation accuracy, %", learned, series)
    title = f"{where}: weights of the exits, trained for {setting}"
    yield curves_plot(f"{stem}-weights", title, "weight, %", weights, series, limits=WEIGHT_LIMITS)


def _settings_panels(grid: Grid) -> dict[str, list[Line]]:
    """What was measured, and what the paper reports."""
    rows = [(_row_series(grid, label), entries) for label, entries in grid.rows.items()]
    measured = [Line(series, [entry.measured for entry in entries]) for series, entries in rows]
    panels = {"as measured here": [*measured, *_reference_lines(grid)]}
    if grid.has_paper:
        panels["as the paper reports"] = [Line(series, [entry.paper for entry in entries]) for series, entries in rows]
    return {panel: [line for line in lines if any(line.values)] for panel, lines in panels.items()}


def _reference_lines(grid: Grid) -> list[Line]:
    """The best of the paper's trainings, where the table is set against them."""
    return [
        Line(Series(label, REFERENCE, ()), [None if value is None else Spread(value, None) for value in values])
        for label, values in grid.summary.items()
        if label.startswith(REFERENCE)
    ]


def _row_series(grid: Grid, label: str, trainings: Sequence[Result] = ()) -> Series:
    return Series(label, grid.table.row(label).weighting, tuple(trainings))


def _series(grid: Grid, setting: str, results: Results) -> list[Series]:
    """The rows of a table that have a training for that setting, with the exits that the setting speaks of."""
    figures = TableFigures(grid.table, results, grid.seeds)
    trained = {label: figures.found(grid.table.cell(grid.dataset, label, setting)) for label in grid.rows}
    found = [_row_series(grid, label, trainings) for label, trainings in trained.items()]
    return [each for each in found if each.trainings and _has_exits_of(setting, each.trainings[0])]


def _exit_lines(series: Sequence[Series]) -> list[Line]:
    lines = []
    for each in series:
        by_seed = [result.exit_accuracy for result in each.trainings]  # type: ignore[attr-defined]
        lines.append(Line(each, [Spread.of(values) for values in zip(*by_seed, strict=True)]))
    return lines


def _variance_section(results: Results) -> Section:
    tables = []
    for dataset in DATASETS:
        rows = []
        for seed in results.seeds():
            found = results.gradient_variance(dataset, seed)
            if found:
                rows.append((f"seed {seed}", [Field(f"{value:.2e}") for value in found]))
        rows = rows or [("measured", [Field(MISSING, missing=True)] * 3)]
        rows.append(("the paper", [Field(f"{value:.2e}") for value in published_gradient_variance(dataset)]))
        tables.append(PageTable(DATASET_TITLES[dataset], ["", "exit 1", "exit 2", "exit 3"], rows))
    text = "The mean variance of the gradient's elements at each exit, before training."
    return Section("gradient-variance", VARIANCE_TITLE, text, tables, short="Table 3")


def _error_section(results: Results) -> list[Section]:
    """Of the weightings of Table 1 and of bound-min."""
    plots = []
    for dataset in DATASETS:
        terms = dict(_error_terms(dataset, results))
        if terms:
            title = f"{DATASET_TITLES[dataset]}: what the weights cost by the error bound"
            plots.append(error_terms_plot(f"error-terms-{dataset}", title, terms))
    text = (
        f"{ERROR_TERMS_MEANING} From the gradients that the trainings of balanced-adj measured before the first round, "
        "where each node trains its own exit; the trainings of auto measure none."
    )
    return [Section("error-terms", "The error bound", text, plots=plots)] if plots else []


def _error_terms(dataset: str, results: Results) -> Iterator[tuple[str, Mapping[str, Spread]]]:
    table = TABLES["table1"]
    figures = TableFigures(table, results, results.seeds())
    names = [*(row.weighting for row in table.rows), "bound-min"]
    for setting in (table.settings[0], NEUTRAL_SETTING, table.settings[-1]):
        measured = figures.found(table.cell(dataset, "balanced-adj", setting))
        by_seed = [found for found in (recorded_terms(each, names) for each in measured) if found]
        for name in names if by_seed else ():
            terms = [found[name].to_json() for found in by_seed]
            yield f"{name}, {setting}", {term: Spread.of([each[term] for each in terms]) for term in terms[0]}


def _trainings_section(results: Results) -> list[Section]:
    rows = []
    for result in results.all():
        job, seconds, origin = results.jobs.get(result.training), result.line.seconds, result.line.provenance
        rounds = str(job.system.training.rounds) if job else MISSING
        minutes = MISSING if seconds is None else f"{seconds / 60:.1f}"
        rows.append((result.name, [Field(text) for text in (rounds, minutes, origin.date, origin.commit)]))
    if not rows:
        return []
    caption = f"All {len(rows):,} trainings"
    table = PageTable(caption, ["training", "rounds", "minutes", "date", "commit"], rows, closed=True)
    return [Section("trainings", "Trainings", tables=[table])]
