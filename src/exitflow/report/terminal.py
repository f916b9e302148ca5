"""Tables that align and a progress bar that keeps quiet where nobody watches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table

if TYPE_CHECKING:
    from exitflow.experiments.figures import TableFigures
    from exitflow.experiments.results import Results

MAX_ROWS = 40
ESTIMATE_PERIOD = 600.0  # seconds of the past that say how long the rest will take


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, more: str = "--json") -> None:
    """The first column is text, the others are figures. Long tables are cut; `more` says where the rest is."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows[:MAX_ROWS]:
        table.add_row(*row)
    console = Console(width=None if sys.stdout.isatty() else 200, markup=False, emoji=False)
    console.print(title, style="bold", highlight=False)
    console.print(table)
    if len(rows) > MAX_ROWS:
        console.print(f"... and {len(rows) - MAX_ROWS:,} more: see {more}")


def print_figures(figures: TableFigures, datasets: Sequence[str]) -> None:
    """A table of the paper: what was measured, and in brackets what the paper reports."""
    table = figures.table
    for dataset in (name for name in table.datasets if name in datasets):
        columns = ["", *table.settings]
        rows = [
            [row.label, *(_cell(figures, dataset, row.label, each) for each in table.settings)] for row in table.rows
        ]
        if table.shows_costs:
            columns += ["bytes sent", "multiply-adds"]
            rows = [[*row, *_costs(figures, dataset, row[0])] for row in rows]
        title = f"{table.title}, {dataset}: accuracy as served in %, seeds {_numbers(figures.seeds)}"
        print_table(f"{title} (the paper's)" if table.published else title, columns, rows)


def _costs(figures: TableFigures, dataset: str, label: str) -> list[str]:
    found = figures.costs(dataset, label)
    return [amount(found.bytes_sent), amount(found.multiply_adds)] if found else ["-", "-"]


def _cell(figures: TableFigures, dataset: str, label: str, setting: str) -> str:
    measured, paper = figures.accuracy(dataset, label, setting), figures.table.paper_figure(dataset, label, setting)
    text = spread(measured.mean, measured.std) if measured else "-"
    return f"{text} ({paper['mean']:.1f})" if paper else text


def print_gradient_variance(results: Results, datasets: Sequence[str], seeds: Sequence[int]) -> None:
    """The paper's Table 3."""
    from exitflow.experiments.tables import published_gradient_variance

    rows = []
    for dataset in datasets:
        for seed in seeds:
            found = results.gradient_variance(dataset, seed)
            if found:
                rows.append([f"{dataset}, seed {seed}", *(f"{value:.2e}" for value in found["gradient_variance"])])
        rows.append([f"{dataset}, the paper", *(f"{value:.2e}" for value in published_gradient_variance(dataset))])
    exits = [f"exit {exit}" for exit in range(1, 4)]
    print_table("Table 3: mean variance of the gradient's elements, before training", ["", *exits], rows)


def _numbers(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


def percent(fraction: float | None) -> str:
    """0.8312 as 83.1; a dash where there is nothing."""
    return "-" if fraction is None else f"{100 * fraction:.1f}"


def spread(mean: float, std: float | None) -> str:
    """Percentages as 83.1 ± 0.4."""
    return percent(mean) if std is None else f"{percent(mean)} ± {percent(std)}"


def amount(value: float | None) -> str:
    """12,345,678 as 12.3 M; a dash where nothing is known."""
    if value is None:
        return "-"
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f}"


def rate(requests_per_second: float) -> str:
    """With as many decimals as help."""
    return f"{requests_per_second:.2f}"


@contextmanager
def progress_bar(total: int, *, unit: str = "rounds") -> Iterator[Callable[[str, float], None]]:
    """A function to be told (what is being done, how many are done). Shows nothing where stderr is no terminal.

    What was done before the first call does not count for the estimate of the time left.
    """
    columns = (
        TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
        BarColumn(bar_width=20),
        TextColumn("{task.completed:.1f}/{task.total:.0f} " + unit),
        TimeElapsedColumn(),
        TextColumn("elapsed,"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    console = Console(stderr=True)
    with Progress(
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal,
        expand=True,
        speed_estimate_period=ESTIMATE_PERIOD,
    ) as progress:
        task: TaskID | None = None

        def update(description: str, done: float) -> None:
            nonlocal task
            if task is None:
                task = progress.add_task(description, total=total, completed=done)  # type: ignore[arg-type]
            progress.update(task, description=description, completed=done)

        yield update
