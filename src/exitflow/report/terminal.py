"""What a person sees at a terminal: tables, and what moves while something is waited for; all of it by rich.

Tables fit the terminal, or 80 columns where there is none. What moves is written to stderr, is gone at the end, and is
not there at all where stderr is no terminal. It needs no thread, because processes are forked beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

MAX_ROWS = 40
MAX_LIVE_ROWS = 200  # more than any terminal has lines
A_DAY = 86_400.0  # seconds over which the pace of a progress bar is a mean


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, more: str = "--json") -> None:
    """Long tables are cut; `more` says where the rest is."""
    console = Console(highlight=False)
    console.print(Text(title, style="bold"), _table(columns, rows[:MAX_ROWS]), sep="\n")
    if len(rows) > MAX_ROWS:
        console.print(Text(f"... and {len(rows) - MAX_ROWS:,} more: see {more}"))
    console.print()


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """The first column is text, the others are figures. What does not fit is folded, and nothing is left out."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="")
    for index, column in enumerate(columns):
        table.add_column(Text(column), justify="right" if index else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


@contextmanager
def live_table() -> Iterator[Callable[[str, Sequence[str], Sequence[Sequence[str]]], None] | None]:
    """A function that shows a table where the last one was. None where nobody watches."""
    if not sys.stderr.isatty():
        yield None
        return
    with _live(Text("")) as live:

        def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
            live.update(Group(Text(title), _table(columns, rows[:MAX_LIVE_ROWS])), refresh=True)

        try:
            yield show
        finally:
            live.update(Text(""))  # at its end it would be drawn in full, and what has left the screen cannot be erased


@contextmanager
def waiting(sentence: str) -> Iterator[None]:
    """Says what takes so long, for as long as it does."""
    if not sys.stderr.isatty():
        yield
        return
    with _live(Text(f"{sentence} ...")):
        yield


def _live(first: RenderableType) -> Live:
    console = Console(stderr=True, highlight=False)
    return Live(first, console=console, transient=True, auto_refresh=False, vertical_overflow="crop")


@contextmanager
def progress_bar(total: int, *, unit: str = "rounds") -> Iterator[Callable[[str, float], None]]:
    """A function to be told (what is being done, how many are done).

    What was done before the first call does not count for the estimate of the time left.
    """
    columns: tuple[str | ProgressColumn, ...] = (
        BarColumn(bar_width=20),
        TextColumn(f"{{task.completed:.1f}}/{{task.total}} {unit},"),
        TimeElapsedColumn(),
        TextColumn("elapsed,"),
        TimeRemainingColumn(),
        TextColumn("left: {task.description}", markup=False),  # what may be cut is last
    )
    progress = Progress(
        *columns,
        console=Console(stderr=True, highlight=False),
        auto_refresh=False,
        transient=True,
        speed_estimate_period=A_DAY,
        disable=not sys.stderr.isatty(),
    )
    with progress:

        def update(description: str, done: float) -> None:
            if not progress.task_ids:
                progress.add_task(description, total=total, completed=done)  # type: ignore[arg-type]
            progress.update(progress.task_ids[0], description=description, completed=done, refresh=True)

        yield update


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
