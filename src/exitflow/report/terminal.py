"""Tables that align, and what keeps quiet where nobody watches: a progress bar, and a table that changes in place."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from exitflow.experiments.figures import TableFigures
    from exitflow.experiments.results import Results

MAX_ROWS = 40
GAP = "   "  # between columns


def table_lines(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Header, rule and rows. The first column is text, the others are figures."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    aligned = [
        GAP.join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in (columns, *rows)
    ]
    rule = "─" * (sum(widths) + len(GAP) * (len(widths) - 1))
    return [f" {line}" for line in (aligned[0], rule, *aligned[1:])]


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, more: str = "--json") -> None:
    """Long tables are cut; `more` says where the rest is."""
    click.secho(title, bold=True)
    click.echo("\n".join(table_lines(columns, rows[:MAX_ROWS])))
    if len(rows) > MAX_ROWS:
        click.echo(f"... and {len(rows) - MAX_ROWS:,} more: see {more}")
    click.echo()


@contextmanager
def live_table() -> Iterator[Callable[[str, Sequence[str], Sequence[Sequence[str]]], None] | None]:
    """A function that shows a table where the last one was; at the end it is gone. None where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    erase = ""

    def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        nonlocal erase
        width, height = shutil.get_terminal_size()
        lines = [line[:width] for line in (title, *table_lines(columns, rows))][: height - 1]
        click.echo(erase + "\n".join(lines), err=True)
        erase = f"\x1b[{len(lines)}F\x1b[J"  # so many lines up, and all below away

    try:
        yield show
    finally:
        click.echo(erase, err=True, nl=False)


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
        if value >= 0.9995 * size:  # which is printed as 1
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f}"


def rate(requests_per_second: float) -> str:
    """With as many decimals as help."""
    small = 0 < requests_per_second < 0.1
    return f"{requests_per_second:.3g}" if small else f"{requests_per_second:.2f}"


@contextmanager
def progress_bar(total: int, *, unit: str = "rounds") -> Iterator[Callable[[str, float], None]]:
    """A function to be told (what is being done, how many are done). Shows nothing where stderr is no terminal.

    What was done before the first call does not count for the estimate of the time left.
    """
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # no thread beside processes that fork
    form = "|{bar:20}| {n:.1f}/{total} {unit}, {elapsed} elapsed, {remaining} left: {desc}"  # what may be cut is last
    bar: tqdm[None] | None = None

    def update(description: str, done: float) -> None:
        nonlocal bar
        if bar is None:
            look = {"desc": description, "unit": unit, "bar_format": form, "dynamic_ncols": True, "leave": False}
            bar = tqdm(total=total, initial=done, disable=None, smoothing=0, **look)  # 0: the mean pace
        bar.set_description_str(description, refresh=False)
        bar.update(done - bar.n)

    try:
        yield update
    finally:
        if bar is not None:
            bar.close()
