"""A tree or DAG with its plan as a picture: what each node answers, what each link carries, and what is full.

Nodes that cannot be told apart are drawn as one. The picture takes its colours from the page's variables.
"""

from __future__ import annotations

from collections import defaultdict
from html import escape

from exitflow.planning.classes import NodeClasses, node_classes
from exitflow.planning.timing import Timing
from exitflow.report.terminal import percent, rate
from exitflow.topology.graph import Link, Node, Topology
from exitflow.topology.rates import ServingPlan

BOX_WIDTH, BOX_HEIGHT = 190, 66
ACROSS, UP = 230, 150  # from box to box
FULL = 0.999  # of a limit from which a link is drawn as full
MANY = 24  # nodes of a row that are drawn


def draw_tree(topology: Topology, plan: ServingPlan, timing: Timing | None = None) -> str:
    """An SVG element, the deepest exit at the top."""
    classes = node_classes(topology)
    rows: dict[int, list[Node]] = defaultdict(list)
    for node in classes.representatives:
        rows[node.exit].append(node)
    widest = min(max(map(len, rows.values())), MANY)
    width, height = widest * ACROSS, len(rows) * UP
    places: dict[str, tuple[float, float]] = {}
    for number, (_, nodes) in enumerate(sorted(rows.items(), reverse=True)):
        shown = nodes[:MANY]
        for index, node in enumerate(shown):
            places[node.name] = (width * (index + 0.5) / len(shown), number * UP + UP / 2)
    links = [_link(classes, plan, timing, node, link, places) for node, link in _drawn(classes, places)]
    boxes = [_box(classes, plan, timing, classes.topology.by_name[name], place) for name, place in places.items()]
    left_out = sum(len(nodes) - MANY for nodes in rows.values() if len(nodes) > MANY)
    note = f"<p class='note'>{left_out} more kinds of nodes are not drawn.</p>" if left_out else ""
    title = f"The tree of {len(topology.nodes)} nodes with its plan"
    return (
        f"<div class='scroll'><svg class='tree' role='img' viewBox='0 0 {width} {height}' "
        f"style='min-width: {min(width, 160 * widest)}px; max-width: {width}px'><title>{title}</title>"
        f"{''.join(links)}{''.join(boxes)}</svg></div>{note}"
    )


def _drawn(classes: NodeClasses, places: dict[str, tuple[float, float]]) -> list[tuple[Node, Link]]:
    """One link of each kind between nodes that are drawn."""
    return [
        (node, link)
        for node in classes.representatives
        if node.name in places
        for kind, link in {classes.kind(link): link for link in node.parents}.items()
        if kind.name in places
    ]


def _box(classes: NodeClasses, plan: ServingPlan, timing: Timing | None, node: Node, place: tuple[float, float]) -> str:
    rates, number = plan.nodes[node.name], classes.size[node.name]
    x, y = place[0] - BOX_WIDTH / 2, place[1] - BOX_HEIGHT / 2
    name = node.name if len(node.name) <= 18 else node.name[:17] + "…"
    head = f"{escape(name)}{f' and {number - 1:,} alike' if number > 1 else ''}"
    busy = f", busy {percent(timing.utilisation[node.name])} %" if timing and node.service_ms else ""
    lines = (
        f"exit {node.exit}{busy}",
        f"answers {percent(rates.serve_fraction)} % of {rate(rates.received_rate)}/s",
    )
    text = "".join(f"<tspan x='{place[0]:g}' dy='17'>{line}</tspan>" for line in lines)
    return (
        f"<rect x='{x:g}' y='{y:g}' width='{BOX_WIDTH}' height='{BOX_HEIGHT}' rx='8'/>"
        f"<rect class='share' x='{x:g}' y='{y + BOX_HEIGHT - 5:g}' height='5' rx='2' "
        f"width='{BOX_WIDTH * rates.serve_fraction:g}'/>"
        f"<text x='{place[0]:g}' y='{y + 19:g}'><tspan class='name'>{head}</tspan>{text}</text>"
    )


def _link(
    classes: NodeClasses,
    plan: ServingPlan,
    timing: Timing | None,
    node: Node,
    link: Link,
    places: dict[str, tuple[float, float]],
) -> str:
    (x1, y1), (x2, y2) = places[node.name], places[classes.class_of[link.name]]
    y1, y2 = y1 - BOX_HEIGHT / 2, y2 + BOX_HEIGHT / 2
    sent, limit = plan.nodes[node.name].parents[link.name], link.max_transfer_rate
    full = limit is not None and sent >= FULL * limit
    label = f"{rate(sent)}/s" + ("" if limit is None else f" of {rate(limit)}")
    if timing and (use := timing.links[node.name, link.name]).utilisation:
        label += f", busy {percent(use.utilisation)} %"
    return (
        f"<line class='{'full' if full else ''}' x1='{x1:g}' y1='{y1:g}' x2='{x2:g}' y2='{y2:g}'/>"
        f"<text class='rate {'full' if full else ''}' x='{(x1 + x2) / 2:g}' y='{(y1 + y2) / 2 + 4:g}'>{label}</text>"
    )
