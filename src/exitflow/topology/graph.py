"""The hierarchy: nodes, each with its exit, its arrivals, and links to the parents it may forward to.

Exits count from 1, the shallowest. A parent's exit is deeper than its child's, so walking the nodes by exit meets
every child before its parents; that order is all that the rest of exitflow relies on.
"""

from __future__ import annotations

import graphlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from exitflow.config import require, require_rate
from exitflow.errors import ConfigError, suggestion

MAX_COUNT = 1_000_000  # nodes of a tier: a slip of the finger must not fill the memory ...
MAX_EXIT = 1_000  # ... and no network has so many exits


def require_name(name: str) -> None:
    """Names become file names, so they are plain words."""
    valid = re.fullmatch(r"\w[\w.-]*", name) is not None and len(name.encode()) <= 100
    rule = "letters, digits, '-', '_' and '.', not beginning with '-' or '.', 100 bytes at most"
    require(valid, "name", f"must be {rule}, got {name!r}")


@dataclass(frozen=True, slots=True)
class Link:
    """From a node up to one of its parents."""

    name: str  # the parent's name
    max_transfer_rate: float | None = None  # mu^max, requests/s; None: no limit

    def __post_init__(self) -> None:
        require_rate(self.max_transfer_rate, "max_transfer_rate")


@dataclass(frozen=True, slots=True)
class Node:
    """A device, an edge server or a cloud; it answers requests with its own exit."""

    name: str
    exit: int  # E_i, counted from 1
    arrival_rate: float = 0.0  # lambda^a_i, requests/s
    parents: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        require_name(self.name)
        require(1 <= self.exit <= MAX_EXIT, "exit", f"exits count from 1, up to {MAX_EXIT:,}, got {self.exit}")
        require_rate(self.arrival_rate, "arrival_rate")
        names = [link.name for link in self.parents]
        require(len(set(names)) == len(names), "parents", f"node {self.name!r} names a parent twice: {names}")


@dataclass(frozen=True, slots=True)
class Tier:
    """A layer of like nodes, named `NAME-0`, `NAME-1`, ...; its children are spread evenly over the next tier."""

    name: str
    count: int
    exit: int
    arrival_rate: float = 0.0  # requests/s arriving at each of them
    max_transfer_rate: float | None = None  # requests/s each may send up; None: no limit

    def __post_init__(self) -> None:
        require_name(self.name)
        require(1 <= self.exit <= MAX_EXIT, "exit", f"exits count from 1, up to {MAX_EXIT:,}, got {self.exit}")
        require(1 <= self.count <= MAX_COUNT, "count", f"must be from 1 to {MAX_COUNT:,}, got {self.count}")
        require_rate(self.arrival_rate, "arrival_rate")
        require_rate(self.max_transfer_rate, "max_transfer_rate")


@dataclass(frozen=True)
class Topology:
    """A valid tree or DAG of nodes, in the order in which the user gave them."""

    nodes: tuple[Node, ...]

    def __post_init__(self) -> None:
        require(bool(self.nodes), "", "the system is empty: it needs [[tiers]] or [[nodes]]")
        by_name = {node.name: node for node in self.nodes}
        if len(by_name) < len(self.nodes):
            raise ConfigError(f"two nodes have the name {_first_twice(node.name for node in self.nodes)!r}")
        _check_parents_exist(by_name)
        _check_acyclic(by_name)
        _check_parents_are_deeper(by_name)

    @cached_property
    def by_name(self) -> Mapping[str, Node]:
        """The nodes by their names."""
        return {node.name: node for node in self.nodes}

    @cached_property
    def children_first(self) -> tuple[Node, ...]:
        """The nodes by exit: every child stands before its parents."""
        return tuple(sorted(self.nodes, key=lambda node: node.exit))

    @property
    def num_exits(self) -> int:
        """The deepest exit that a node holds."""
        return max(node.exit for node in self.nodes)

    def with_exit(self, exit: int) -> tuple[Node, ...]:
        """N_e: the nodes that answer with this exit."""
        return tuple(node for node in self.nodes if node.exit == exit)


def expand_tiers(tiers: Iterable[Tier]) -> tuple[Node, ...]:
    """The nodes of a regular tree, leaves first; the last tier has no parents."""
    tiers = list(tiers)
    nodes: list[Node] = []
    for tier, above in pairwise([*tiers, None]):
        assert tier is not None
        for index in range(tier.count):
            link = above and Link(f"{above.name}-{index * above.count // tier.count}", tier.max_transfer_rate)
            parents = (link,) if link else ()
            nodes.append(Node(f"{tier.name}-{index}", tier.exit, tier.arrival_rate, parents))
    return tuple(nodes)


def _first_twice(names: Iterable[str]) -> str:
    seen: set[str] = set()
    return next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]


def _check_parents_exist(by_name: Mapping[str, Node]) -> None:
    for node in by_name.values():
        for link in node.parents:
            if link.name not in by_name:
                hint = suggestion(link.name, by_name) if len(by_name) <= 100 else ""
                raise ConfigError(f"node {node.name!r}: there is no node {link.name!r} to be its parent{hint}")


def _check_acyclic(by_name: Mapping[str, Node]) -> None:
    graph = {node.name: [link.name for link in node.parents] for node in by_name.values()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        path = " -> ".join(reversed(error.args[1]))
        raise ConfigError(f"the links form a cycle: {path}") from None


def _check_parents_are_deeper(by_name: Mapping[str, Node]) -> None:
    for node in by_name.values():
        for parent in (by_name[link.name] for link in node.parents):
            if parent.exit <= node.exit:
                raise ConfigError(
                    f"node {parent.name!r}: exit {parent.exit} must exceed the exit of its child "
                    f"{node.name!r} ({node.exit})"
                )
