"""Draws docs/figures/tree.svg: the tree of examples/campus.toml, with the requests that its nodes answer and forward.

The rates are those of `exitflow plan`. Run it after a change of either: python docs/draw_tree.py
"""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from exitflow import load_system, serving_plan
from exitflow.topology.graph import Topology
from exitflow.topology.rates import NodeRates, ServingPlan

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "figures" / "tree.svg"

WIDTH, BOX_WIDTH, BOX_HEIGHT, LAYER, TOP = 880, 132, 54, 128, 30
RIGHT = 660  # where the tree ends and the sentences begin
STYLE = """
svg{--ink:#1f2328;--muted:#59636f;--paper:#fff;--box:#eef3f8;--edge:#8aa0b6;--answer:#d55e00;--up:#0072b2}
@media screen and (prefers-color-scheme:dark){
svg{--ink:#e6edf3;--muted:#9aa5b1;--paper:#12161b;--box:#1d2731;--edge:#5b7186;--answer:#ff8a3d;--up:#3f9fe0}}
svg{background:var(--paper)}text{font:13px system-ui,sans-serif;fill:var(--ink)}.small{font-size:12px;fill:var(--muted)}
.name{font-weight:600}.big{font-size:15px;font-weight:600}.rate{fill:var(--up);font-size:12px}.bar{fill:var(--answer)}
.box{fill:var(--box);stroke:var(--edge)}.up{stroke:var(--up);fill:none;stroke-linecap:round}
"""


@dataclass(frozen=True)
class Place:
    """The middle of a node's box."""

    x: float
    y: float


def places(topology: Topology) -> dict[str, Place]:
    """Every layer on a line of its own, the deepest on top, spread evenly."""
    found = {}
    for exit in range(1, topology.num_exits + 1):
        layer = [node.name for node in topology.nodes if node.exit == exit]
        y = TOP + BOX_HEIGHT / 2 + LAYER * (topology.num_exits - exit)
        found |= {name: Place(RIGHT * (index + 0.5) / len(layer), y) for index, name in enumerate(layer)}
    return found


def draw(topology: Topology, plan: ServingPlan) -> Iterator[str]:
    """The lines of the drawing."""
    where = places(topology)
    height = TOP + BOX_HEIGHT + LAYER * (topology.num_exits - 1) + 50
    shares = ", ".join(f"exit {exit} answers {share:.0%}" for exit, share in enumerate(plan.exit_share, start=1))
    words = (
        f"A tree of {len(topology.nodes)} nodes: requests arrive at devices and go up where a node is unsure; {shares}."
    )
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img">'
    yield f"<title>{html.escape(words)}</title><style>{STYLE}</style>"
    for node in topology.nodes:
        for parent, rate in plan.nodes[node.name].parents.items():
            yield from link(where[node.name], where[parent], rate)
    for node in topology.nodes:
        yield from box(node.name, node.exit, where[node.name], plan.nodes[node.name], node.arrival_rate)
    for exit, share in enumerate(plan.exit_share, start=1):
        y = TOP + BOX_HEIGHT / 2 + LAYER * (topology.num_exits - exit)
        yield f'<text class="big" x="{RIGHT + 24}" y="{y - 2:g}">{share:.0%} of all requests</text>'
        yield f'<text class="small" x="{RIGHT + 24}" y="{y + 16:g}">are answered with exit {exit}</text>'
    yield "</svg>"


def link(child: Place, parent: Place, rate: float) -> Iterator[str]:
    """As wide as its rate, which stands beside it."""
    start, end = child.y - BOX_HEIGHT / 2, parent.y + BOX_HEIGHT / 2
    middle = (start + end) / 2
    curve = f"M{child.x:g} {start:g}C{child.x:g} {middle:g} {parent.x:g} {middle:g} {parent.x:g} {end:g}"
    yield f'<path class="up" stroke-width="{0.8 * rate:.3g}" d="{curve}"/>'
    anchor, aside = ("end", -9) if child.x < parent.x else ("start", 9)
    place = f'x="{child.x + aside:g}" y="{start - 9:g}" text-anchor="{anchor}"'
    yield f'<text class="rate" {place}>{rate:g}/s</text>'


def box(name: str, exit: int, place: Place, rates: NodeRates, arrivals: float) -> Iterator[str]:
    """The name, what the node answers, and a bar for the share of what reaches it that it answers itself."""
    left, top = place.x - BOX_WIDTH / 2, place.y - BOX_HEIGHT / 2
    received = rates.serve_rate + sum(rates.parents.values())
    yield f'<rect class="box" x="{left:g}" y="{top:g}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="7"/>'
    bar = (BOX_WIDTH - 20) * rates.serve_rate / received
    yield f'<rect class="bar" x="{left + 10:g}" y="{top + BOX_HEIGHT - 10:g}" width="{bar:.4g}" height="4" rx="2"/>'
    yield f'<text class="name" x="{left + 10:g}" y="{top + 18:g}">{html.escape(name)}</text>'
    answers = f"answers {rates.serve_rate:g} of {received:g}/s"
    yield f'<text class="small" x="{left + 10:g}" y="{top + 36:g}">{answers}</text>'
    if arrivals:
        y = place.y + BOX_HEIGHT / 2
        yield f'<path class="up" stroke-width="2" stroke-dasharray="2 4" d="M{place.x:g} {y + 20:g}V{y + 2:g}"/>'
        yield f'<text class="small" x="{place.x:g}" y="{y + 36:g}" text-anchor="middle">{arrivals:g} requests/s</text>'


def picture() -> str:
    """The whole file."""
    topology = load_system(ROOT / "examples" / "campus.toml").topology
    return "\n".join(draw(topology, serving_plan(topology))) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture())
