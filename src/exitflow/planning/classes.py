"""Nodes that cannot be told apart, so that a tier of ten thousand devices is planned as one.

Two nodes are of one class if they have the same exit and arrivals, if their links have the same limits and lead to the
same classes, and if equally many links of each class come in. To treat a class alike loses nothing: the mean of the
best plan over the nodes of each class keeps every limit, and is worth as much.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property

from exitflow.topology.graph import Link, Node, Topology

LinkKind = tuple[str, float | None]  # class of the parent, limit


@dataclass(frozen=True)
class NodeClasses:
    """The classes of a topology's nodes, each named after its first node."""

    topology: Topology
    class_of: Mapping[str, str]  # node -> the first node of its class

    @cached_property
    def size(self) -> Mapping[str, int]:
        """How many nodes each class has."""
        return Counter(self.class_of.values())

    @cached_property
    def representatives(self) -> tuple[Node, ...]:
        """One node of each class, children first."""
        return tuple(node for node in self.topology.children_first if self.class_of[node.name] == node.name)

    def kind(self, link: Link) -> LinkKind:
        """What makes two links of one node, or of one class, interchangeable."""
        return self.class_of[link.name], link.max_transfer_rate

    @cached_property
    def incoming(self) -> Mapping[str, Mapping[tuple[str, LinkKind], int]]:
        """How many links of each (child class, kind) come into each representative."""
        found: dict[str, Counter[tuple[str, LinkKind]]] = {node.name: Counter() for node in self.representatives}
        for node in self.topology.nodes:
            for link in node.parents:
                if link.name in found:
                    found[link.name][self.class_of[node.name], self.kind(link)] += 1
        return found


def node_classes(topology: Topology) -> NodeClasses:
    """The fewest classes that no link contradicts, by refining colours until they no longer split."""
    colours = _numbered({node.name: (node.exit, node.arrival_rate) for node in topology.nodes})
    while True:
        incoming: dict[str, Counter[Hashable]] = {node.name: Counter() for node in topology.nodes}
        outgoing: dict[str, Counter[Hashable]] = {node.name: Counter() for node in topology.nodes}
        for node in topology.nodes:
            for link in node.parents:
                incoming[link.name][colours[node.name], link.max_transfer_rate] += 1
                outgoing[node.name][colours[link.name], link.max_transfer_rate] += 1
        refined = _numbered(
            {
                name: (colour, frozenset(incoming[name].items()), frozenset(outgoing[name].items()))
                for name, colour in colours.items()
            }
        )
        if len(set(refined.values())) == len(set(colours.values())):
            break
        colours = refined
    first: dict[int, str] = {}
    return NodeClasses(
        topology, {node.name: first.setdefault(colours[node.name], node.name) for node in topology.nodes}
    )


def _numbered(descriptions: Mapping[str, Hashable]) -> dict[str, int]:
    numbers: dict[Hashable, int] = {}
    return {name: numbers.setdefault(description, len(numbers)) for name, description in descriptions.items()}
