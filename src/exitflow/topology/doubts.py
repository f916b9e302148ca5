"""What is allowed in a system and was hardly meant: nodes that nobody asks, exits that answer nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from exitflow.topology.graph import Topology
from exitflow.topology.rates import serving_plan

SHOWN = 5  # nodes that a sentence names


def doubts(topology: Topology) -> Iterator[str]:
    """A sentence for each thing that its plan would make a reader wonder about."""
    plan = serving_plan(topology)
    parents = {link.name for node in topology.nodes for link in node.parents}
    idle = [name for name, rates in plan.nodes.items() if rates.received_rate == 0]
    if childless := [name for name in idle if name not in parents]:
        yield f"no requests reach {_names(childless)}: none arrive there, and no node stands below"
    if starved := [name for name in idle if name in parents]:
        yield f"no requests reach {_names(starved)}: none arrive there, and the nodes below send none up"
    for exit, rate in enumerate(plan.exit_serve_rate.tolist(), start=1):
        nodes = [node.name for node in topology.with_exit(exit)]
        if not nodes:
            yield f"exit {exit} answers 0 % of the requests: no node stands there"
        elif rate == 0 and not set(nodes) <= set(idle):
            yield f"exit {exit} answers 0 % of the requests: {_names(nodes)} may send up all that arrives"


def _names(nodes: Sequence[str]) -> str:
    more = f" and {len(nodes) - SHOWN:,} more" if len(nodes) > SHOWN else ""
    return ", ".join(nodes[:SHOWN]) + more
