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
from typing import Any

from exitflow.config import decode_list, require, require_rate
from exitflow.errors import ConfigError, suggestion

MAX_COUNT = 1_000_000  # nodes: a slip of the finger must not fill the memory ...
MAX_EXIT = 1_000  # ... and no network has so many exits
MAX_CORES = 100_000
MAX_MILLISECONDS = 1e8  # a day, about
MAX_PRICE = 1e12
MAX_BYTES = 2**40
MIN_BANDWIDTH, MAX_BANDWIDTH = 1e-6, 1e9  # a bit a second to a petabit


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
    round_trip_ms: float | None = None  # for a request up and its answer down; None: no time
    bandwidth_mbps: float | None = None  # megabits/s, up; None: no limit
    request_bytes: int | None = None  # that a request takes on this link; needed where the bandwidth is limited
    price: float | None = None  # for a million requests, in a currency of the user's; None: free

    def __post_init__(self) -> None:
        _require_link(self)


@dataclass(frozen=True, slots=True)
class Node:
    """A device, an edge server or a cloud; it answers requests with its own exit."""

    name: str
    exit: int  # E_i, counted from 1
    arrival_rate: float = 0.0  # lambda^a_i, requests/s
    parents: tuple[Link, ...] = ()
    service_ms: float | None = None  # that one of its cores works on a request; None: no time
    cores: int | None = None  # that work at once; None: one

    def __post_init__(self) -> None:
        _require_node(self)
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
    round_trip_ms: float | None = None  # of the link that each has upwards, as those below; see Link
    bandwidth_mbps: float | None = None
    request_bytes: int | None = None
    price: float | None = None
    service_ms: float | None = None  # of each of them, as cores; see Node
    cores: int | None = None

    def __post_init__(self) -> None:
        require(1 <= self.count <= MAX_COUNT, "count", f"must be from 1 to {MAX_COUNT:,}, got {self.count}")
        _require_node(self)
        _require_link(self)


def _require_node(spec: Node | Tier) -> None:
    require_name(spec.name)
    require(1 <= spec.exit <= MAX_EXIT, "exit", f"exits count from 1, up to {MAX_EXIT:,}, got {spec.exit}")
    require_rate(spec.arrival_rate, "arrival_rate")
    _require_amount(spec.service_ms, "service_ms", "milliseconds", MAX_MILLISECONDS)
    cores = spec.cores
    require(cores is None or 1 <= cores <= MAX_CORES, "cores", f"must be from 1 to {MAX_CORES:,}, got {cores}")


def _require_link(spec: Link | Tier) -> None:
    require_rate(spec.max_transfer_rate, "max_transfer_rate")
    _require_amount(spec.round_trip_ms, "round_trip_ms", "milliseconds", MAX_MILLISECONDS)
    _require_amount(spec.price, "price", "what a million requests cost", MAX_PRICE)
    band = spec.bandwidth_mbps
    valid = band is None or MIN_BANDWIDTH <= band <= MAX_BANDWIDTH
    problem = f"must be from {MIN_BANDWIDTH:g} to {MAX_BANDWIDTH:g} megabits/s, got {band}"
    require(valid, "bandwidth_mbps", problem)
    size = spec.request_bytes
    require(size is None or 1 <= size <= MAX_BYTES, "request_bytes", f"must be from 1 to {MAX_BYTES:,}, got {size}")
    problem = "is missing: how long a request takes on a link of limited bandwidth follows from its bytes"
    require(band is None or size is not None, "request_bytes", problem)


def _require_amount(value: float | None, key: str, what: str, most: float) -> None:
    require(value is None or 0 <= value <= most, key, f"must be {what}, from 0 to {most:g}, got {value}")


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

    def exits_from(self, name: str) -> Mapping[str, int]:
        """The exits with which that node and all above it answer."""
        node = self.by_name[name]
        found = {name: node.exit}
        for link in node.parents:
            found |= self.exits_from(link.name)
        return found

    @property
    def num_exits(self) -> int:
        """The deepest exit that a node holds."""
        return max(node.exit for node in self.nodes)

    def with_exit(self, exit: int) -> tuple[Node, ...]:
        """N_e: the nodes that answer with this exit."""
        return tuple(node for node in self.nodes if node.exit == exit)


def decode_topology(table: Mapping[str, Any]) -> Topology:
    """The tiers and nodes of a parsed system file."""
    tiers = decode_list(Tier, table.get("tiers", []), "tiers")
    nodes = decode_list(Node, table.get("nodes", []), "nodes")
    return Topology((*expand_tiers(tiers), *nodes))


def expand_tiers(tiers: Iterable[Tier]) -> tuple[Node, ...]:
    """The nodes of a regular tree, leaves first; the last tier has no parents."""
    tiers = list(tiers)
    total = sum(tier.count for tier in tiers)
    require(total <= MAX_COUNT, "tiers", f"at most {MAX_COUNT:,} nodes in all, got {total:,}")
    nodes: list[Node] = []
    for tier, above in pairwise([*tiers, None]):
        assert tier is not None
        for index in range(tier.count):
            parents = (_link(tier, f"{above.name}-{index * above.count // tier.count}"),) if above else ()
            name = f"{tier.name}-{index}"
            nodes.append(Node(name, tier.exit, tier.arrival_rate, parents, tier.service_ms, tier.cores))
    return tuple(nodes)


def _link(tier: Tier, parent: str) -> Link:
    time_and_bytes = (tier.round_trip_ms, tier.bandwidth_mbps, tier.request_bytes)
    return Link(parent, tier.max_transfer_rate, *time_and_bytes, tier.price)


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
