"""The rates that will flow: Eqs. 2 and 3 of the paper with the recurrence of problem P2.

Deeper exits answer better, so every node sends up as much as its links allow and serves the rest:

    transfer_i = min(mu^max_i, received_i)      received_i = arrival_i + what the children send it
    serve_i    = received_i - transfer_i
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from exitflow.config import require
from exitflow.topology.graph import Node, Topology

FloatArray = npt.NDArray[np.float64]

ROUNDING = 1e-12  # of what a node receives: 0.1 + 0.2 requests/s just fit into a link for 0.3


@dataclass(frozen=True, slots=True)
class NodeRates:
    """What one node receives, serves and sends, in requests/s."""

    exit: int
    arrival_rate: float  # lambda^a_i
    received_rate: float  # lambda^a_i + sum of the children's lambda^t_j
    serve_rate: float  # lambda^s_i (Eq. 2)
    transfer_rate: float  # lambda^t_i (Eq. 3)
    serve_fraction: float  # f_i
    parents: Mapping[str, float]  # the transfer rate to each parent


@dataclass(frozen=True)
class ServingPlan:
    """The rates at every node and exit."""

    nodes: Mapping[str, NodeRates]
    exit_serve_rate: FloatArray  # (E,) Lambda_e, requests/s

    @property
    def exit_share(self) -> FloatArray:
        """(E,) Lambda, normalised: the share of all requests that each exit answers."""
        share: FloatArray = self.exit_serve_rate / self.exit_serve_rate.sum()
        return share

    def to_json(self) -> dict[str, Any]:
        """Plain values, as `exitflow plan --json` prints them."""
        fields = NodeRates.__slots__
        nodes = {name: {field: getattr(rates, field) for field in fields} for name, rates in self.nodes.items()}
        rates_and_shares = zip(self.exit_serve_rate.tolist(), self.exit_share.tolist(), strict=True)
        exits = [
            {"exit": exit, "serve_rate": rate, "share": share}
            for exit, (rate, share) in enumerate(rates_and_shares, start=1)
        ]
        return {"nodes": nodes, "exits": exits}


def check_requests_arrive(topology: Topology) -> None:
    """Refuse a system that nobody uses."""
    arrive = any(node.arrival_rate > 0 for node in topology.nodes)
    require(arrive, "", "no requests arrive: at least one node needs an arrival_rate above 0")


def serving_plan(topology: Topology) -> ServingPlan:
    """The rates that `topology` will carry. O(nodes + links)."""
    check_requests_arrive(topology)
    received = {node.name: node.arrival_rate for node in topology.nodes}
    plans: dict[str, NodeRates] = {}
    exit_serve_rate = np.zeros(topology.num_exits)
    for node in topology.children_first:
        plans[node.name] = rates = node_rates(node, received[node.name])
        exit_serve_rate[node.exit - 1] += rates.serve_rate
        for parent, rate in rates.parents.items():
            received[parent] += rate
    return ServingPlan({node.name: plans[node.name] for node in topology.nodes}, exit_serve_rate)


def node_rates(node: Node, received: float) -> NodeRates:
    """What `node` does with `received` requests/s."""
    limits = [link.max_transfer_rate for link in node.parents]
    bounded = [limit for limit in limits if limit is not None]
    capacity = sum(bounded) if len(bounded) == len(limits) else float("inf")
    transfer = min(capacity, received)
    serve = received - transfer
    if serve < ROUNDING * received:
        serve = 0.0
    if received > 0:
        fraction = serve / received
    else:  # the limit of ever less traffic
        fraction = 0.0 if capacity > 0 else 1.0
    sent = {link.name: transfer * share for link, share in zip(node.parents, link_shares(limits), strict=True)}
    return NodeRates(node.exit, node.arrival_rate, received, serve, transfer, fraction, sent)


def link_shares(limits: list[float | None]) -> list[float]:
    """How a node splits what it sends: in proportion to the limits; links without one take all, in equal parts."""
    unlimited = limits.count(None)
    if unlimited:
        return [1 / unlimited if limit is None else 0.0 for limit in limits]
    total = sum(limit for limit in limits if limit is not None)
    return [limit / total if limit and total else 0.0 for limit in limits]
