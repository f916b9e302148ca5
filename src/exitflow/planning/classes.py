"""Nodes that cannot be told apart, so that a tier of ten thousand devices is planned as one.

Two nodes are of one class if they differ in nothing but their names, if their links do so and lead to the same classes,
and if equally many links of each class come in. To treat a class alike loses nothing: the mean of the
best plan over the nodes of each class keeps every limit, and is worth as much.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from exitflow.topology.graph import Link, Node, Topology


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

    def kinds(self, node: Node) -> Mapping[Link, int]:
        """The links of a node, each led to its parent's class; those that are then equal are interchangeable."""
        return Counter(map(self.kind, node.parents))

    def kind(self, link: Link) -> Link:
        """The link to the class instead of the node."""
        return replace(link, name=self.class_of[link.name])

    @cached_property
    def incoming(self) -> Mapping[tuple[str, Link], int]:
        """How many links of each (child class, kind) come into each node of the class that the kind leads to."""
        found: Counter[tuple[str, Link]] = Counter()
        for node in self.topology.nodes:
            for link in node.parents:
                if self.class_of[link.name] == link.name:
                    found[self.class_of[node.name], link] += 1
        return found


def node_classes(topology: Topology) -> NodeClasses:
    """The fewest classes that no link contradicts, by refining colours until they no longer split."""
    nodes = _numbered({node.name: replace(node, name="node", parents=()) for node in topology.nodes})
    links = [(node.name, link.name, replace(link, name="link")) for node in topology.nodes for link in node.parents]
    colours = nodes
    while True:
        incoming: dict[str, Counter[Hashable]] = {name: Counter() for name in nodes}
        outgoing: dict[str, Counter[Hashable]] = {name: Counter() for name in nodes}
        for child, parent, link in links:
            incoming[parent][colours[child], link] += 1
            outgoing[child][colours[parent], link] += 1
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
    class_of = {name: first.setdefault(colour, name) for name, colour in colours.items()}
    return NodeClasses(topology, class_of)


def _numbered(descriptions: Mapping[str, Hashable]) -> dict[str, int]:
    numbers: dict[Hashable, int] = {}
    return {name: numbers.setdefault(description, len(numbers)) for name, description in descriptions.items()}
