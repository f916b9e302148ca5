"""The figures of a report, drawn without a screen. Each explains itself: title, units, legend."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, MultipleLocator

from exitflow.report.palette import INK, LINES, MUTED, PAPER, TERMS, all_colours, colour_of, dashes_of, marker_of
from exitflow.report.series import Curve, Series
from exitflow.runs.spread import Spread

WIDTH = 5.2  # inches: two fit beside each other on a page, one on a phone
TITLE_LETTERS = 54  # that surely fit on a line
WEIGHT_LIMITS = (-4.0, 104.0)  # of weights in %, with room for the markers
FEW = 12  # points of a curve that are moved aside, where several trainings have them in the same round
TERM_NAMES = ("generalisation", "bias", "noise", "sampling")

ERROR_TERMS_MEANING = (
    "What the weights of the last round cost by the error bound of Theorem 1, part by part; calibrated so that no part "
    "exceeds the loss that can be lost."
)

_STYLE = {
    "font.size": 9.5,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.titlecolor": MUTED.light,
    "axes.edgecolor": LINES.light,
    "axes.labelcolor": MUTED.light,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "grid.color": LINES.light,
    "grid.linewidth": 0.8,
    "xtick.color": LINES.light,
    "ytick.color": LINES.light,
    "xtick.labelcolor": MUTED.light,
    "ytick.labelcolor": MUTED.light,
    "ytick.major.size": 0,
    "text.color": INK.light,
    "text.parse_math": False,  # a $ in the name of a system is a $
    "legend.frameon": False,
    "lines.linewidth": 1.7,
    "lines.markersize": 5.5,
    "figure.facecolor": PAPER.light,
    "svg.fonttype": "none",
    "svg.hashsalt": "exitflow",
}


@dataclass(frozen=True)
class Plot:
    """A figure: a name for its file, words for those who cannot see it, and the drawing."""

    name: str
    alt: str
    figure: Figure

    def png(self) -> bytes:
        """The figure as PNG, on white."""
        with mpl.rc_context(_STYLE):  # type: ignore[arg-type]
            return self._saved(format="png", dpi=160)

    def svg(self) -> str:
        """On whatever lies behind it, in colours that follow the reader's light or dark mode."""
        with mpl.rc_context(_STYLE):  # type: ignore[arg-type]
            drawn = self._saved(format="svg", transparent=True, metadata={"Date": None}).decode()
        drawn = drawn[drawn.index("<svg") :]
        drawn = re.sub(r"(font: [^;\"]*?px) [^;\"]*", r"\1 system-ui, sans-serif", drawn)
        style = []
        for index, colour in enumerate(all_colours()):
            drawn = drawn.replace(colour.light, f"var(--c{index})")
            style.append((f"--c{index}:{colour.light}", f"--c{index}:{colour.dark}"))
        light, dark = (";".join(each) for each in zip(*style, strict=True))
        modes = f"svg{{{light}}}@media screen and (prefers-color-scheme:dark){{svg{{{dark}}}}}"
        return drawn.replace(">", f"><style>{modes}</style>", 1)

    def _saved(self, **options: object) -> bytes:
        engine = self.figure.get_layout_engine()
        if isinstance(engine, ConstrainedLayoutEngine):  # once is enough, and it takes most of the time
            engine.execute(self.figure)
            self.figure.set_layout_engine("none")
        file = io.BytesIO()
        self.figure.savefig(file, **options)  # type: ignore[arg-type]
        return file.getvalue()


@contextmanager
def _figure(title: str, height: float, panels: int = 1, *, sharey: bool = False) -> Iterator[tuple[Figure, list[Axes]]]:
    with mpl.rc_context(_STYLE):  # type: ignore[arg-type]
        lines = textwrap.wrap(title, TITLE_LETTERS)
        figure = Figure(figsize=(WIDTH, height + 0.18 * (len(lines) - 1)), layout="constrained")
        figure.get_layout_engine().set(h_pad=0.06, w_pad=0.06)  # type: ignore[union-attr, call-arg]
        axes = figure.subplots(panels, 1, sharex=True, sharey=sharey, squeeze=False)[:, 0]
        figure.suptitle("\n".join(lines), x=0.012, ha="left", fontsize=10.5, fontweight="bold")
        yield figure, list(axes)


@dataclass(frozen=True)
class Line:
    """A label, and a value for each place on the x axis."""

    series: Series
    values: Sequence[Spread | None]


def settings_plot(name: str, title: str, settings: Sequence[str], panels: Mapping[str, Sequence[Line]]) -> Plot:
    """Accuracy as served over serving settings; every panel on a scale on which its lines can be told apart."""
    return _lines_plot(
        name, title, settings, panels, unit="accuracy as served, %", xlabel="requests answered by exits 1-2-3, %"
    )


def exits_plot(name: str, title: str, panels: Mapping[str, Sequence[Line]]) -> Plot:
    """Accuracy of each exit on all samples; all panels on one scale."""
    num_exits = max(len(line.values) for lines in panels.values() for line in lines)
    places = [f"exit {exit}" for exit in range(1, num_exits + 1)]
    return _lines_plot(name, title, places, panels, unit="accuracy, %", one_scale=True)


def _lines_plot(
    name: str,
    title: str,
    places: Sequence[str],
    panels: Mapping[str, Sequence[Line]],
    *,
    unit: str,
    xlabel: str = "",
    one_scale: bool = False,
) -> Plot:
    series = list({line.series.label: line.series for lines in panels.values() for line in lines}.values())
    with _figure(title, _height(2.2, panels, series), len(panels), sharey=one_scale) as (figure, all_axes):
        for axes, (panel, lines) in zip(all_axes, panels.items(), strict=True):
            _draw_lines(axes, lines, series)
            axes.set_title(panel)
            axes.set_ylabel(unit)
        all_axes[-1].set_xticks(range(len(places)), places)
        all_axes[-1].set_xlim(-0.4, len(places) - 0.6)
        spreads = [value for lines in panels.values() for line in lines for value in line.values if value]
        all_axes[-1].set_xlabel(_with_meaning(xlabel, "whiskers", spreads))
        _legend(figure, series)
    labels = ", ".join(each.label for each in series)
    return Plot(name, f"{title}: {', '.join(panels)}; lines: {labels}.", figure)


def curves_plot(
    name: str,
    title: str,
    unit: str,
    panels: Mapping[str, Callable[[Series], Curve]],
    series: Sequence[Series],
    *,
    limits: tuple[float, float] | None = None,
) -> Plot:
    """Something in % over the rounds; every panel on a scale of its own, or all within `limits`."""
    spreads: list[Spread] = []
    with _figure(title, _height(1.5, panels, series), len(panels)) as (figure, all_axes):
        for axes, (panel, curve_of) in zip(all_axes, panels.items(), strict=True):
            curves = [(each, curve_of(each)) for each in series]
            room = _room([curve for _, curve in curves])
            for number, (each, curve) in reversed(list(enumerate(curves))):  # so that the first lies on top
                spreads += curve.values
                _draw_curve(axes, each, curve, aside=room * ((number + 0.5) / len(curves) - 0.5))
            axes.set_title(f"{panel}: {unit}")
            axes.margins(x=0.02)
            axes.yaxis.set_major_locator(MaxNLocator(nbins=4))
            if limits:
                axes.set_ylim(*limits)
                axes.yaxis.set_major_locator(MultipleLocator(25))
        all_axes[-1].set_xlabel(_with_meaning("round", "bands", spreads))
        all_axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))
        _legend(figure, series)
    labels = ", ".join(each.label for each in series)
    return Plot(name, f"{title}: over rounds, for {', '.join(panels)}; lines: {labels}.", figure)


def error_terms_plot(name: str, title: str, terms: Mapping[str, Mapping[str, Spread]]) -> Plot:
    """The parts of the error bound as bars, one for each training."""
    with _figure(title, 1.35 + 0.3 * len(terms)) as (figure, (axes,)):
        left = np.zeros(len(terms))
        for term, colour in zip(TERM_NAMES, TERMS, strict=True):
            widths = np.array([each[term].mean for each in terms.values()])
            axes.barh(range(len(terms)), widths, left=left, color=colour.light, label=term, height=0.66)
            left += widths
        totals = [each.get("total") for each in terms.values()]
        spread = [total.std if total and total.std else np.nan for total in totals]
        if not np.isnan(spread).all():
            axes.errorbar(
                left, range(len(terms)), xerr=spread, fmt="none", ecolor=INK.light, capsize=2.5, elinewidth=1.1
            )
        axes.set_yticks(range(len(terms)), list(terms))
        axes.invert_yaxis()
        axes.grid(visible=True, axis="x")
        axes.grid(visible=False, axis="y")
        known = [total for total in totals if total]
        axes.set_xlabel(_with_meaning("cost by the error bound, in units of the loss", "whiskers", known))
        figure.legend(loc="outside lower center", ncols=4, columnspacing=1.2, handlelength=1.2)
    return Plot(name, f"{title}: {', '.join(TERM_NAMES)} for {', '.join(terms)}.", figure)


def _with_meaning(label: str, marks: str, spreads: Sequence[Spread]) -> str:
    """What the whiskers or bands mean, where there are any."""
    meaning = f"{marks}: ± one standard deviation over seeds" if any(each.std is not None for each in spreads) else ""
    return "\n".join(part for part in (label, meaning) if part)


def _draw_lines(axes: Axes, lines: Sequence[Line], all_series: Sequence[Series]) -> None:
    """With bars for the standard deviation; moved aside a little, so that none hides another."""
    labels = [each.label for each in all_series]
    for line in lines:
        aside = 0.16 * ((labels.index(line.series.label) + 0.5) / len(labels) - 0.5)
        places = [place + aside for place in range(len(line.values))]
        means = [100 * value.mean if value else np.nan for value in line.values]
        errors = [100 * value.std if value and value.std else np.nan for value in line.values]
        bars = None if np.isnan(errors).all() else errors
        axes.errorbar(places, means, yerr=bars, capsize=2.5, elinewidth=1.1, **_look(line.series))


def _room(curves: Sequence[Curve]) -> float:
    """How far apart the points of one round may stand, in rounds; not at all where they are many."""
    longest = max((curve.rounds for curve in curves), key=len, default=())
    if not 1 <= len(longest) <= FEW:
        return 0.0
    return 0.3 * min((later - earlier for earlier, later in pairwise(longest)), default=1)


def _draw_curve(axes: Axes, series: Series, curve: Curve, *, aside: float = 0.0) -> None:
    """With a band for the standard deviation; few points are moved aside a little, so that none hides another."""
    means = np.array([100 * value.mean for value in curve.values])
    sparse = max(1, len(curve.rounds) // 8)
    rounds = [round + aside for round in curve.rounds]
    axes.plot(rounds, means, markevery=sparse, **_look(series))
    if curve.values and curve.values[0].std is not None:
        deviations = np.array([100 * (value.std or 0.0) for value in curve.values])
        axes.fill_between(
            rounds,
            means - deviations,
            means + deviations,
            color=colour_of(series.kind).light,
            alpha=0.15,
            lw=0,
        )


def _look(series: Series) -> dict[str, Any]:
    colour, marker = colour_of(series.kind).light, marker_of(series.kind)
    return {"color": colour, "marker": marker, "linestyle": dashes_of(series.variant)}


def _legend(figure: Figure, series: Sequence[Series]) -> None:
    handles = [Line2D([], [], label=each.label, **_look(each)) for each in series]
    columns = _legend_columns(series)
    figure.legend(
        handles=handles, loc="outside lower left", ncols=columns, columnspacing=1.4, handlelength=4, fontsize=9
    )


def _legend_columns(series: Sequence[Series]) -> int:
    """As many as fit beside each other; a label takes about 0.08 inches a letter, and its line 0.8."""
    longest = max((len(each.label) for each in series), default=1)
    most = max(1, min(len(series), int(WIDTH / (0.8 + 0.08 * longest))))
    rows = -(-len(series) // most)
    return -(-len(series) // rows)


def _height(panel: float, panels: Collection[str], series: Sequence[Series]) -> float:
    """The height of a figure in inches, with title, panels, axis and legend."""
    rows = -(-len(series) // _legend_columns(series))
    return 0.75 + panel * len(panels) + 0.19 * rows
