"""Tables that align and a progress bar that keeps quiet where nobody watches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

MAX_ROWS = 40


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


def percent(fraction: float | None) -> str:
    """0.8312 as 83.1; a dash where there is nothing."""
    return "-" if fraction is None else f"{100 * fraction:.1f}"


def spread(mean: float, std: float | None) -> str:
    """Percentages as 83.1 ± 0.4."""
    return percent(mean) if std is None else f"{percent(mean)} ± {percent(std)}"


def rate(requests_per_second: float) -> str:
    """With as many decimals as help."""
    return f"{requests_per_second:.2f}"


@contextmanager
def progress_bar(total_rounds: int) -> Iterator[Callable[[str, float], None]]:
    """A function to be told (what is being done, rounds done so far). Shows nothing where stderr is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("rounds"))
    times = (TimeElapsedColumn(), TextColumn("elapsed,"), TimeRemainingColumn(), TextColumn("left"))
    console = Console(stderr=True)
    with Progress(*columns, *times, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting", total=total_rounds)

        def update(description: str, rounds: float) -> None:
            progress.update(task, description=description, completed=rounds)

        yield update
