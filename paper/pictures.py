"""The figures of documents, from results on disk: each an SVG that says in words too what it shows."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from exitflow.report.palette import PAPER, all_colours
from exitflow.report.plots import Line, Plot, exits_plot, settings_plot
from exitflow.report.series import Series
from exitflow.report.terminal import percent
from exitflow.runs.spread import Spread
from paper.figures import TableFigures
from paper.grids import DATASET_TITLES
from paper.results import Results
from paper.tables import DATASETS, TABLES

Panels = dict[str, list[Line]]
_FOUR = ("equal-weight", "flops-prop", "serving-rate", "balanced-adj")
_NEAREST = ("auto", "scalefl", "depthfl + blended", "fedavg", "heterofl", "fjord-kd", "serving-rate")
_DEEP = "5-15-80"  # what the trainings of the figure of exits were told


@dataclass(frozen=True)
class Picture:
    """A drawing, and all that it says in words."""

    plot: Plot
    words: str

    def svg(self) -> str:
        """On a ground of its own, as a document may be darker or lighter than the reader's screen is set to."""
        ground = f"svg{{background:var(--c{all_colours().index(PAPER)})}}"
        drawn = self.plot.svg().replace("</style>", f"{ground}</style><desc>{html.escape(self.words)}</desc>", 1)
        return drawn + "\n"


def describes(svg: str, words: str) -> bool:
    """Whether that is what the drawing was made for."""
    return f"<desc>{html.escape(words)}</desc>" in svg


def served(results: Results) -> Picture:
    """Accuracy as served of auto and of the paper's four, over the serving settings."""
    rows = (("ours", "auto"), *(("table1", name) for name in _FOUR))
    panels = {DATASET_TITLES[name]: list(_as_served(rows, name, results)) for name in DATASETS}
    title = "Accuracy as served, 7 nodes, equal partition"
    settings = TABLES["table1"].settings
    return _picture(settings_plot("served", title, settings, panels), settings, panels)


def peers(results: Results) -> Picture:
    """Accuracy as served of auto and of its nearest neighbours, over the serving settings."""
    rows = tuple(("peers", label) for label in _NEAREST)
    panels = {DATASET_TITLES[name]: list(_as_served(rows, name, results)) for name in DATASETS}
    settings = TABLES["peers"].settings
    return _picture(
        settings_plot("peers", "Accuracy as served: neighbouring methods", settings, panels), settings, panels
    )


def exits(results: Results) -> Picture:
    """What each exit says by itself of all test images."""
    rows = (("ours", "auto + own answers"), *(("table1", name) for name in _FOUR), ("peers", "all-cloud"))
    panels = {DATASET_TITLES[name]: list(_by_exit(rows, name, results)) for name in DATASETS}
    title = f"Each exit by itself, on all test images; trained for {_DEEP}"
    return _picture(exits_plot("exits", title, panels), ("exit 1", "exit 2", "exit 3"), panels)


PICTURES: dict[str, Callable[[Results], Picture]] = {"served": served, "exits": exits, "peers": peers}


def _as_served(rows: Sequence[tuple[str, str]], dataset: str, results: Results) -> Iterator[Line]:
    for name, label in rows:
        figures = TableFigures(TABLES[name], results, results.seeds())
        values = [figures.accuracy(dataset, label, setting) for setting in figures.table.settings]
        if any(values):
            yield Line(Series(label, figures.table.row(label).weighting, ()), values)


def _by_exit(rows: Sequence[tuple[str, str]], dataset: str, results: Results) -> Iterator[Line]:
    for name, label in rows:
        table = TABLES[name]
        found = TableFigures(table, results, results.seeds()).found(table.cell(dataset, label, _DEEP))
        own = [each.line.own_answers or each.line.answers for each in found]
        if own:
            by_exit = zip(*(answers.exit_accuracy for answers in own), strict=True)
            shown = label.partition(" + ")[0]  # all of them are shown by their own answers
            yield Line(Series(shown, table.row(label).weighting, ()), [Spread.of(values) for values in by_exit])


def _picture(plot: Plot, places: Sequence[str], panels: Panels) -> Picture:
    words = [f"{line.series.label} {_values(line)}" for lines in panels.values() for line in lines]
    per_panel = iter(words)
    said = "; ".join(f"{panel}: {', '.join(next(per_panel) for _ in lines)}" for panel, lines in panels.items())
    return Picture(plot, f"{plot.alt.partition(':')[0]} ({', '.join(places)}), in %. {said}.")


def _values(line: Line) -> str:
    return " ".join(percent(value.mean) if value else "-" for value in line.values)
