"""Tables that align, and what keeps quiet where nobody watches: a progress bar, and a table that changes in place."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import click

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


def percent(fraction: float | None) -> str:
    """0.8312 as 83.1; a dash where there is nothing."""
    return "-" if fraction is None else f"{100 * fraction:.1f}"


def milliseconds(value: float | None) -> str:
    """With as many decimals as help; a dash where there is nothing."""
    return "-" if value is None else f"{value:.2f}" if value < 10 else f"{value:.1f}"


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
