"""Requests as a fluid, for more of them than can be followed one by one: a million devices, a day.

Time is cut into steps. In each, what arrives at a node is what the workload says on the mean, and a node sends up what
its links allow, as in a plan; nodes that cannot be told apart are one. What is left out: chance, queues, and so times,
and what rate control takes to follow a change.

A node with a small bucket sends less than its link allows: tokens overflow while it waits for harder requests. How much
less is measured once for each limit, by letting the rate control of the serving nodes (`ForwardControl`) decide about
requests that arrive by chance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from exitflow.evaluation.accuracy import evaluate_plan
from exitflow.evaluation.calibration import NodeCalibration
from exitflow.evaluation.outputs import ExitOutputs
from exitflow.planning.arrivals import Workload
from exitflow.planning.classes import node_classes
from exitflow.planning.simulation import Failure
from exitflow.routing.rate_control import ForwardControl
from exitflow.topology.graph import Link, Node, Topology
from exitflow.topology.rates import node_rates, serving_plan

FloatArray = npt.NDArray[np.float64]

MOST_STEPS = 1440  # a day by minutes
LARGE = 300.0  # requests/s of a link from which chance no longer matters
RATIOS = np.array([0.0625, 0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0])  # received to allowed
TRIALS = 4000  # requests


@dataclass(frozen=True)
class FluidOutcome:
    """What is answered in each of T steps."""

    seconds: FloatArray  # (T,) when each begins
    rate: FloatArray  # (T,) requests/s
    exit_rate: FloatArray  # (T, E) requests/s that each exit answers
    right_rate: FloatArray  # (T,) requests/s that are answered right

    @property
    def requests(self) -> float:
        """The rate of all requests together."""
        step = float(self.seconds[1] - self.seconds[0])  # there are at least two
        return float(self.rate.sum()) * step

    @property
    def exit_share(self) -> FloatArray:
        """(E,) the share of all requests that each exit answers."""
        share: FloatArray = self.exit_rate.sum(axis=0) / self.rate.sum()
        return share

    @property
    def accuracy(self) -> float:
        """Share of all requests that are answered right."""
        return float(self.right_rate.sum() / self.rate.sum())

    def to_json(self) -> dict[str, Any]:
        """The rates as values that JSON can hold."""
        return {
            "model": "fluid",
            "requests": self.requests,
            "exit_share": self.exit_share.tolist(),
            "accuracy": self.accuracy,
        }


def fluid(
    workload: Workload,
    outputs: ExitOutputs,
    *,
    failures: Sequence[Failure] = (),
    copies: int = 1,
    confidence_kind: str = "entropy",
) -> FluidOutcome:
    """The same as `simulate`, on the mean; every device stands for so many `copies`, below nodes that are enlarged."""
    num_steps = int(min(MOST_STEPS, max(workload.duration, 2)))
    begins = np.arange(num_steps) * workload.duration / num_steps
    hard = ExitOutputs(outputs.logits[:, workload.hard], outputs.labels[workload.hard])
    systems: dict[tuple[bool, tuple[str, ...]], Aggregate] = {}
    found: dict[tuple[bool, tuple[str, ...], float], tuple[float, FloatArray, float]] = {}
    budget = _Budget()
    steps = []
    for begin, height in zip(begins, _heights(workload, begins), strict=True):
        late = bool(begin >= workload.duration / 2)
        down = tuple(each.node for each in failures if each.begin <= begin < each.end)
        if (late, down) not in systems:
            systems[late, down] = aggregated(_changed(workload, late=late, down=down), copies)
        state = late, down, float(height)
        if state not in found:
            samples = hard if late and workload.drift == "difficulty" else outputs
            found[state] = _step(systems[late, down], float(height), samples, confidence_kind, budget)
        steps.append(found[state])
    rates, exits, right = zip(*steps, strict=True)
    return FluidOutcome(begins, np.array(rates), np.array(exits), np.array(right))


def _heights(workload: Workload, begins: FloatArray) -> FloatArray:
    """(T,) the mean of the trace in each step, beside that of all the time."""
    if workload.trace is None:
        return np.ones(len(begins))
    shape = np.asarray(workload.trace.shape)
    filled = np.concatenate(([0.0], np.cumsum(shape))) / len(shape)
    edges = np.interp(np.linspace(0, len(shape), len(begins) + 1), np.arange(len(shape) + 1), filled)
    heights: FloatArray = np.diff(edges) * len(begins)
    return heights


def _changed(workload: Workload, *, late: bool, down: Sequence[str]) -> Topology:
    """The topology with the drift's traffic, without the nodes that are down."""
    devices = {device.name: number for number, device in enumerate(workload.devices)}
    busy = (len(devices) + 1) // 2

    def changed(node: Node) -> Node:
        rate = 0.0 if node.name in down else node.arrival_rate
        if late and workload.drift == "traffic" and node.name in devices:
            rate *= len(devices) / busy if devices[node.name] < busy else 0.0
        if not any(link.name in down for link in node.parents):
            return node if rate == node.arrival_rate else replace(node, arrival_rate=rate)
        links = (replace(link, max_transfer_rate=0.0) if link.name in down else link for link in node.parents)
        return replace(node, arrival_rate=rate, parents=tuple(links))

    return Topology(tuple(map(changed, workload.topology.nodes)))


@dataclass(frozen=True)
class Aggregate:
    """One node for each class, with what arrives at all of them, and links with the limits of all theirs."""

    topology: Topology
    size: Mapping[str, int]  # how many nodes each stands for


def aggregated(topology: Topology, copies: int = 1) -> Aggregate:
    """The nodes of each class as one, where every device stands for so many."""
    classes = node_classes(topology)
    nodes, sizes = [], {}
    for node in classes.representatives:
        devices = copies if node.arrival_rate else 1  # what stands above them is enlarged instead
        sizes[node.name] = size = classes.size[node.name] * devices
        enlarge = copies // devices
        limits: dict[str, float | None] = {}
        for kind, number in classes.kinds(node).items():
            before, limit = limits.get(kind.name, 0.0), kind.max_transfer_rate
            limits[kind.name] = None if before is None or limit is None else before + size * enlarge * number * limit
        links = tuple(Link(name, limit) for name, limit in limits.items())
        nodes.append(Node(node.name, node.exit, size * node.arrival_rate, links))
    return Aggregate(Topology(tuple(nodes)), sizes)


def _step(
    system: Aggregate, height: float, samples: ExitOutputs, confidence_kind: str, budget: _Budget
) -> tuple[float, FloatArray, float]:
    """(requests/s, those that each exit answers, those that are answered right) at this height of the trace."""
    nodes = {node.name: replace(node, arrival_rate=node.arrival_rate * height) for node in system.topology.nodes}
    if not any(node.arrival_rate for node in nodes.values()):
        return 0.0, np.zeros(system.topology.num_exits), 0.0
    received = {name: node.arrival_rate for name, node in nodes.items()}
    for node in system.topology.children_first:
        used = budget.used(node, received[node.name], system.size[node.name])
        links = tuple(
            link if link.max_transfer_rate is None else replace(link, max_transfer_rate=used * link.max_transfer_rate)
            for link in node.parents
        )
        nodes[node.name] = replace(nodes[node.name], parents=links)
        for parent, rate in node_rates(nodes[node.name], received[node.name]).parents.items():
            received[parent] += rate
    topology = Topology(tuple(nodes.values()))
    plan = serving_plan(topology)
    rate = float(plan.exit_serve_rate.sum())
    found = evaluate_plan(samples, topology, plan, confidence_kind=confidence_kind)
    return rate, plan.exit_serve_rate, rate * found.accuracy


class _Budget:
    """How much of its limit the rate control of a node uses."""

    def __init__(self) -> None:
        self._tables: dict[float, FloatArray] = {}

    def used(self, node: Node, received: float, size: int) -> float:
        """The share that is used of the limits of `size` nodes that together receive so much, and stand as one."""
        limits = [link.max_transfer_rate for link in node.parents]
        limit = sum(each or 0.0 for each in limits) / size
        if None in limits or not 0 < limit < LARGE or received <= 0:
            return 1.0
        limit = float(f"{limit:.2g}")  # so that a few tables are enough
        if limit not in self._tables:
            self._tables[limit] = np.array([_use(limit, ratio) for ratio in RATIOS])
        return float(np.interp(received / size / limit, RATIOS, self._tables[limit]))


def _use(limit: float, ratio: float) -> float:
    """The part of a link's limit that is used by a node which receives `ratio` times as much."""
    rng = np.random.default_rng(0)
    ranks = rng.random(TRIALS)
    moments = np.cumsum(rng.exponential(1 / (limit * ratio), TRIALS))
    share = max(1 - 1 / ratio, 0.0)
    calibration = NodeCalibration(share, tuple(np.linspace(0, 1, 101)), 1 - share if share else None)
    control = ForwardControl([Link("up", limit)], calibration, planned_rate=limit * ratio, burst_seconds=1.0, now=0.0)
    sent = 0
    for number, now in enumerate(moments.tolist()):
        hard = control.hardest_first(ranks[number : number + 1], ("up",), now)
        sent += sum(control.take_for(ranks[number], ("up",), now) is not None for _ in hard)
    return min(sent / float(moments[-1]) / limit, 1.0)
