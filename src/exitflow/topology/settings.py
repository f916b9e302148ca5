"""Serving settings x-y-z: the percentage of all requests that exits 1, 2, 3, ... answer."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

from exitflow.errors import ConfigError
from exitflow.topology.graph import Node, Topology
from exitflow.topology.rates import link_shares, node_rates

log = logging.getLogger("exitflow.topology")

PAPER_SETTINGS = ("80-15-5", "60-30-10", "45-35-20", "33-33-33", "20-35-45", "10-30-60", "5-15-80")


def parse_setting(text: str) -> tuple[float, ...]:
    """`80-15-5` as shares that sum to 1."""
    try:
        parts = [float(part) for part in str(text).split("-")]
        total = math.fsum(parts)
    except (ValueError, OverflowError):
        parts, total = [], 0.0
    if not parts or not math.isfinite(total) or total <= 0:
        raise ConfigError(f"a serving setting gives each exit's percentage, such as 80-15-5, got {text!r}")
    shares = tuple(part / total for part in parts)
    if not (abs(total - 100) <= 1 or abs(total - 1) <= 0.01):  # 33-33-33 and 0.8-0.15-0.05 are as meant
        served = "-".join(f"{100 * share:.3g}" for share in shares)
        log.warning("serving setting %r adds up to %g %%, so the exits serve %s %%", text, total, served)
    return shares


def with_setting(topology: Topology, setting: str) -> Topology:
    """`topology` with link limits under which its exits serve what `setting` says.

    All nodes of one exit serve the same fraction of what they receive; nodes without parents serve everything.
    """
    shares = parse_setting(setting)
    if len(shares) != topology.num_exits:
        raise ConfigError(f"setting {setting!r} has {len(shares)} parts, the system has {topology.num_exits} exits")
    received = {node.name: node.arrival_rate for node in topology.nodes}
    total = math.fsum(received.values())
    changed: dict[str, Node] = {}
    for exit, share in enumerate(shares, start=1):
        nodes = topology.with_exit(exit)
        where = f"setting {setting!r}, exit {exit}"
        fraction = _serve_fraction(nodes, received, share * total, tolerance=1e-9 * total, where=where)
        for node in nodes:
            changed[node.name] = limited = _limit_transfer(node, received[node.name] * (1 - fraction))
            for parent, rate in node_rates(limited, received[node.name]).parents.items():
                received[parent] += rate
    return Topology(tuple(changed[node.name] for node in topology.nodes))


def _serve_fraction(
    nodes: tuple[Node, ...], received: dict[str, float], target: float, *, tolerance: float, where: str
) -> float:
    """f for the nodes that can forward, so that all `nodes` together serve `target` requests/s."""
    rooted = math.fsum(received[node.name] for node in nodes if not node.parents)
    free = math.fsum(received[node.name] for node in nodes if node.parents)
    if target > rooted + free + tolerance:
        raise ConfigError(f"{where}: cannot serve {target:g} requests/s, only {rooted + free:g} reach it")
    if target < rooted - tolerance:
        raise ConfigError(f"{where}: cannot serve only {target:g} requests/s, {rooted:g} reach nodes without a parent")
    return min(max((target - rooted) / free, 0.0), 1.0) if free > 0 else 1.0


def _limit_transfer(node: Node, rate: float) -> Node:
    """`node` with limits that sum to `rate`, split over its links as they were."""
    shares = link_shares([link.max_transfer_rate for link in node.parents])
    if node.parents and not any(shares):  # all limits were 0
        shares = [1 / len(node.parents)] * len(node.parents)
    links = zip(node.parents, shares, strict=True)
    return replace(node, parents=tuple(replace(link, max_transfer_rate=rate * share) for link, share in links))
