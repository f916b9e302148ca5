"""From what nodes have seen back to a system file that `plan` and `train` take."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tomli_w

from exitflow.config import encode, parse_toml
from exitflow.errors import ServingError
from exitflow.serving.node.status import NodeStatus
from exitflow.serving.traffic.client import NodeClient, ask_each
from exitflow.serving.wire.security import Security
from exitflow.topology.graph import Node, decode_topology

LEAST_SECONDS = 1.0


@dataclass(frozen=True)
class Observed:
    """The system with the arrival rates that were seen, and what each node did."""

    system: dict[str, Any]
    nodes: Mapping[str, Mapping[str, float]]  # arrived, served, forwarded: requests/s
    unseen: tuple[str, ...]  # nodes that were not asked: their arrival rates are as planned

    def to_toml(self) -> str:
        """What was observed as a system file."""
        return tomli_w.dumps(self.system)


async def observe(addresses: Sequence[str], security: Security, *, window: float | None = None) -> Observed:
    """Since the nodes started, or over the next `window` seconds."""
    first = await ask_each(addresses, security, NodeClient.status)
    if window is not None:
        await asyncio.sleep(window)
        last = await ask_each(addresses, security, NodeClient.status)
    else:
        first, last = [_fresh(status) for status in first], first
    if len({status.bundle for status in last}) > 1:
        raise ServingError("the nodes serve different bundles: roll out one of them first")
    rates = {after.node: _rates(before, after) for before, after in zip(first, last, strict=True)}
    (text,) = await ask_each(addresses[:1], security, NodeClient.system)
    system = parse_toml(text.decode())
    planned = decode_topology(system).nodes
    nodes = [replace(node, arrival_rate=_observed(node, rates)) for node in planned]
    if not any(node.arrival_rate > 0 for node in nodes):
        raise ServingError("no requests have arrived yet, so there is nothing to plan for")
    unseen = tuple(node.name for node in nodes if node.name not in rates)
    return Observed({**system, "nodes": list(map(encode, nodes))}, rates, unseen)


def _observed(node: Node, rates: Mapping[str, Mapping[str, Any]]) -> float:
    """What arrives at a node: as it was seen, or as it was planned where the node was not asked."""
    return round(float(rates[node.name]["arrived"]), 6) if node.name in rates else node.arrival_rate


def _fresh(status: NodeStatus) -> NodeStatus:
    """What the same node said when it started."""
    links = {name: replace(link, forwarded=0) for name, link in status.links.items()}
    return replace(status, time=status.started, arrived=0, served=0, links=links)


def _rates(before: NodeStatus, after: NodeStatus) -> dict[str, float]:
    seconds = after.time - before.time
    if seconds < LEAST_SECONDS:
        raise ServingError(f"node {after.node!r} has been watched for {seconds:.1f} s only; wait, or give --window")
    if after.started != before.started:
        raise ServingError(f"node {after.node!r} was started anew while it was watched; watch it again")
    forwarded = sum(link.forwarded - before.links[name].forwarded for name, link in after.links.items())
    return {
        "arrived": (after.arrived - before.arrived) / seconds,
        "served": (after.served - before.served) / seconds,
        "forwarded": forwarded / seconds,
    }
