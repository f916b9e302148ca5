"""A page as values, and how it becomes one file of HTML that needs nothing else."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from importlib import resources
from pathlib import Path

import jinja2

from exitflow import __version__
from exitflow.errors import RunError
from exitflow.files import write_atomically
from exitflow.report.palette import INK, LINES, MUTED, PAPER
from exitflow.report.plots import Plot

MISSING = "\N{EN DASH}"


@dataclass(frozen=True)
class Field:
    """A cell of a table."""

    text: str
    detail: str = ""  # smaller, below
    best: bool = False
    missing: bool = False
    raised: str = ""


@dataclass(frozen=True)
class PageTable:
    """The first column names the rows."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Field]]]
    notes: Sequence[str] = ()
    summary: Sequence[tuple[str, Sequence[Field]]] = ()
    closed: bool = False  # shown when asked for


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading."""

    anchor: str
    title: str
    text: str = ""
    tables: Sequence[PageTable] = ()
    plots: Sequence[Plot] = ()
    parts: Sequence[Section] = ()
    short: str = ""  # for the contents
    drawing: str = ""  # an SVG element of our own making, which stands first


@dataclass(frozen=True)
class Page:
    """A report as its title, its texts, tables and plots."""

    title: str
    lead: str
    facts: dict[str, str]
    sections: Sequence[Section] = field(default_factory=tuple)

    @property
    def plots(self) -> list[Plot]:
        """All plots of the page, in order."""
        return [plot for section in self.sections for part in (section, *section.parts) for plot in part.plots]


def write_page(page: Page, out: Path, observer: Callable[[str, float], None] | None = None) -> Path:
    """`index.html`, and the figures as PNG files beside it; `observer` is told how many are done."""
    figures = out / "figures"
    try:
        figures.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{out}: cannot be written: {error.strerror}") from None
    for count, plot in enumerate(page.plots):
        if observer:
            observer(plot.name, count)
        write_atomically(figures / f"{plot.name}.png", plot.png())
    write_atomically(out / "index.html", render(page).encode())
    return out / "index.html"


def render(page: Page) -> str:
    """The page as one HTML document."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters["data_uri"] = _data_uri
    source = resources.files("exitflow.report").joinpath("page.html.jinja").read_text(encoding="utf-8")
    colours = {"ink": INK, "muted": MUTED, "lines": LINES, "paper": PAPER}
    written = {"date": date.today().isoformat(), "version": __version__}
    return environment.from_string(source).render(page=page, colours=colours, written=written)


def _data_uri(plot: Plot) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(plot.svg().encode()).decode()
