"""The pages of `plan --html` and `whatif --html`: one file each that needs nothing else, scripts neither."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from importlib import resources
from pathlib import Path

import jinja2
from markupsafe import Markup

from exitflow import __version__
from exitflow.files import write_atomically
from exitflow.planning.prospects import Prospect
from exitflow.planning.whatif import Point, WhatIf
from exitflow.report.palette import INK, LINES, MUTED, PAPER
from exitflow.report.terminal import milliseconds, percent
from exitflow.report.tree import draw_tree

WIDTH, HEIGHT, MARGIN = 720, 420, 56  # of the trade-off
MOST_TREES = 2000  # points that are drawn with their plans; beyond that only those on the front
TICKS = 5


@dataclass(frozen=True)
class _Axis:
    """What stands along an edge of the trade-off."""

    title: str
    values: Sequence[float]

    @property
    def _bounds(self) -> tuple[float, float]:
        low, high = min(self.values), max(self.values)
        return (low, high) if high > low else (low - 0.5, high + 0.5)

    def place(self, value: float) -> float:
        """0 for the smallest, 1 for the largest."""
        low, high = self._bounds
        return (value - low) / (high - low)

    @property
    def ticks(self) -> list[float]:
        """Evenly from the smallest to the largest."""
        low, high = self._bounds
        return [low + (high - low) * step / (TICKS - 1) for step in range(TICKS)]


def write_plan_page(name: str, found: Prospect, out: Path) -> None:
    """The tree with its rates, limits, shares and what is full."""
    facts = _facts(found)
    tree = Markup(draw_tree(found.topology, found.plan, found.timing))
    _write(out, f"Plan of {name}", facts=facts, tree=tree, points=[], chart="", columns=[])


def write_whatif_page(explored: WhatIf, out: Path) -> None:
    """The trade-off, each point with its plan."""
    possible = [(number, point) for number, point in enumerate(explored.points, start=1) if point.prospect]
    drawn = {number for number, point in possible if len(possible) <= MOST_TREES or point.on_front}
    points = [_row(number, point, draw=number in drawn) for number, point in enumerate(explored.points, start=1)]
    columns = [key.removeprefix("tiers.").removeprefix("nodes.") for key in explored.keys]
    facts = {
        "combinations": f"{len(explored.points):,}",
        "possible": f"{len(possible):,}",
        "on the front": f"{sum(point.on_front for point in explored.points):,}",
    }
    _write(
        out,
        f"What if: {explored.name}",
        facts=facts,
        tree="",
        points=points,
        chart=Markup(_trade_off(possible)),
        columns=columns,
    )


def _write(out: Path, title: str, **parts: object) -> None:
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    source = resources.files("exitflow.report").joinpath("planning.html.jinja").read_text(encoding="utf-8")
    colours = {"ink": INK, "muted": MUTED, "lines": LINES, "paper": PAPER}
    written = {"date": date.today().isoformat(), "version": __version__}
    page = environment.from_string(source).render(title=title, colours=colours, written=written, **parts)
    write_atomically(out, page.encode())


def _facts(found: Prospect) -> dict[str, str]:
    shares = ", ".join(f"exit {exit} {percent(share)} %" for exit, share in enumerate(found.plan.exit_share, start=1))
    facts = {"answered by": shares}
    if found.accuracy is not None:
        facts["answered right"] = f"{percent(found.accuracy)} % of the validation data"
    if found.timing:
        if latency := found.timing.latency:
            times = ", ".join(f"{key} {milliseconds(getattr(latency, key))}" for key in ("p50", "p90", "p99"))
            facts["milliseconds"] = times
        where, busy = found.timing.bottleneck
        facts["bottleneck"] = f"{where}, busy {percent(busy)} %"
        if found.timing.cost_per_million:
            facts["a million requests cost"] = f"{found.timing.cost_per_million:,.2f}"
    return facts


def _row(number: int, point: Point, *, draw: bool) -> dict[str, object]:
    found = point.prospect
    tree = Markup(draw_tree(found.topology, found.plan, found.timing)) if found and draw else ""
    values = [f"{value:g}" if isinstance(value, float) else str(value) for value in point.values]
    facts = _facts(found) if found else {}
    return {
        "number": number,
        "values": values,
        "problem": point.problem,
        "front": point.on_front,
        "tree": tree,
        "facts": facts,
    }


def _trade_off(possible: Sequence[tuple[int, Point]]) -> str:
    """Time (or cost, or nothing) against accuracy (or depth); every point leads to its plan."""
    found = [point.prospect for _, point in possible if point.prospect]
    right = _Axis("answered right, %", [100 * each.accuracy for each in found if each.accuracy is not None])
    if not right.values:
        right = _Axis("mean exit that answers", [each.depth for each in found])
    below = _Axis("p99, milliseconds", [value for each in found if (value := each.value("p99")) is not None])
    if len(set(below.values)) <= 1 and any(each.value("cost") for each in found):
        below = _Axis("cost of a million requests", [each.value("cost") or 0.0 for each in found])
    if not below.values:
        below = _Axis("share answered by the last exit, %", [100 * float(each.plan.exit_share[-1]) for each in found])
    wide, high = WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN
    parts = []
    for tick in below.ticks:
        x = MARGIN + wide * below.place(tick)
        parts.append(f"<text class='tick' x='{x:.1f}' y='{HEIGHT - MARGIN + 22}'>{tick:.4g}</text>")
    for tick in right.ticks:
        y = HEIGHT - MARGIN - high * right.place(tick)
        parts.append(f"<line class='grid' x1='{MARGIN}' x2='{WIDTH - MARGIN}' y1='{y:.1f}' y2='{y:.1f}'/>")
        parts.append(f"<text class='tick left' x='{MARGIN - 8}' y='{y + 4:.1f}'>{tick:.4g}</text>")
    for (number, point), x_value, y_value in zip(possible, below.values, right.values, strict=True):
        x, y = MARGIN + wide * below.place(x_value), HEIGHT - MARGIN - high * right.place(y_value)
        label = f"point {number}: {right.title} {y_value:.4g}, {below.title} {x_value:.4g}"
        mark = f"<circle class='{'front' if point.on_front else ''}' cx='{x:.1f}' cy='{y:.1f}' r='6'/>"
        parts.append(f"<a href='#point-{number}'><title>{label}</title>{mark}</a>")
    axes = (
        f"<text x='{WIDTH / 2}' y='{HEIGHT - 8}'>{below.title}</text>"
        f"<text class='left' x='{MARGIN}' y='{MARGIN - 22}' style='text-anchor: start'>{right.title}</text>"
    )
    head = f"<svg class='chart' role='img' viewBox='0 0 {WIDTH} {HEIGHT}'><title>The trade-off</title>"
    return f"{head}{''.join(parts)}{axes}</svg>"
