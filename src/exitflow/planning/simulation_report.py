"""What a simulation showed, beside what was planned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from exitflow.planning.simulation import Outcome
from exitflow.planning.timing import Percentiles
from exitflow.topology.graph import Topology
from exitflow.topology.rates import ServingPlan

WINDOWS = 12  # of the time, so that a drift or a failure is seen


@dataclass(frozen=True)
class Window:
    """A part of the time, by when requests came."""

    begin: float  # seconds
    end: float
    rate: float  # answered requests/s
    exit_share: tuple[float, ...] | None  # None where nothing was answered
    accuracy: float | None
    p99: float | None  # milliseconds


@dataclass(frozen=True)
class NodeSeen:
    """How many requests/s a node has received, answered and passed on."""

    received: float
    served: float
    planned_served: float
    busy: float


@dataclass(frozen=True)
class SimulationReport:
    """Figures that can be printed and compared."""

    answered: int
    failed: Mapping[str, int]
    exit_share: tuple[float, ...]
    planned_exit_share: tuple[float, ...]
    accuracy: float
    exit_accuracy: tuple[float | None, ...]  # of what each exit answered
    latency_ms: Percentiles
    exit_latency_ms: tuple[Percentiles | None, ...]
    fallbacks: Mapping[str, int]
    nodes: Mapping[str, NodeSeen]
    links: Mapping[str, tuple[float, float | None]]  # child -> parent: requests/s, and the limit
    windows: tuple[Window, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values, as `exitflow simulate --json` prints them."""
        return {"model": "exact", **asdict(self)}


def report(outcome: Outcome, topology: Topology, plan: ServingPlan) -> SimulationReport:
    """From a finished simulation in which something was answered."""
    exits = range(1, topology.num_exits + 1)
    of_exit = [outcome.exits == exit for exit in exits]
    limits = {(node.name, link.name): link.max_transfer_rate for node in topology.nodes for link in node.parents}
    seconds = outcome.duration
    nodes = {
        name: NodeSeen(count / seconds, outcome.served[name] / seconds, plan.nodes[name].serve_rate, outcome.busy[name])
        for name, count in outcome.received.items()
    }
    overall = _percentiles(outcome.latency)
    assert overall is not None
    return SimulationReport(
        answered=len(outcome.exits),
        failed=outcome.failed,
        exit_share=tuple(float(chosen.mean()) for chosen in of_exit),
        planned_exit_share=tuple(plan.exit_share.tolist()),
        accuracy=float(outcome.right.mean()),
        exit_accuracy=tuple(float(outcome.right[chosen].mean()) if chosen.any() else None for chosen in of_exit),
        latency_ms=overall,
        exit_latency_ms=tuple(_percentiles(outcome.latency[chosen]) for chosen in of_exit),
        fallbacks=outcome.fallbacks,
        nodes=nodes,
        links={
            f"{child} -> {parent}": (outcome.sent.get((child, parent), 0) / seconds, limit)
            for (child, parent), limit in limits.items()
        },
        windows=tuple(_windows(outcome, topology.num_exits)),
    )


def _percentiles(seconds: Any) -> Percentiles | None:
    return Percentiles(*np.percentile(1e3 * seconds, (50, 90, 99)).tolist()) if len(seconds) else None


def _windows(outcome: Outcome, num_exits: int) -> list[Window]:
    edges = np.linspace(0, outcome.duration, WINDOWS + 1).tolist()
    windows = []
    for begin, end in pairwise(edges):
        chosen = (outcome.begun >= begin) & (outcome.begun < end)
        count = int(chosen.sum())
        rate = count / (end - begin)
        if not count:
            windows.append(Window(begin, end, rate, None, None, None))
            continue
        shares = np.bincount(outcome.exits[chosen], minlength=num_exits + 1)[1:] / count
        p99 = float(np.percentile(1e3 * outcome.latency[chosen], 99))
        windows.append(Window(begin, end, rate, tuple(shares.tolist()), float(outcome.right[chosen].mean()), p99))
    return windows
