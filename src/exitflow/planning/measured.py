"""P1: the fractions that answer most requests right, from what every exit said to validation data.

Problem P1 of the paper maximises what the system answers right; P2 replaces it by "send up as much as the links allow",
because deeper is taken to be better. Here P1 itself is solved. Requests are a fluid, as in `evaluation.accuracy`, and
each exit sorts its samples into cells by how sure it is of them. With

    x[i, b, l]   requests/s in cell b that node i sends over link l
    s[i, b]      requests/s in cell b that node i answers
    a[i, b]      how often i's exit is right in cell b, rising with b (isotonic)
    P[i, b, c]   how a sample of cell b at node i spreads over the cells c of its parent

the plan is a linear programme: maximise what is answered right less what sending costs, where what each node receives
in each cell is answered or sent on, and no link carries more than its limit. a and P depend on which samples reach a
node, so they are taken again from the flows of the plan that was found, a few times. Every plan found is judged by the
exact flow of all samples: the one that surely gains most over P2 wins, and P2 stays where none surely gains. So on
validation data P1 is never worse.

A plan is a topology whose limits are what is worth sending: all that reads limits, from weightings to rate control,
follows it with nothing added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import sparse
from scipy.optimize import isotonic_regression, linprog

from exitflow.errors import ExitflowError
from exitflow.evaluation.accuracy import follow_samples
from exitflow.evaluation.outputs import ExitOutputs
from exitflow.planning.classes import NodeClasses, node_classes
from exitflow.routing import surest_first
from exitflow.topology.graph import Link, Topology
from exitflow.topology.rates import serving_plan

FloatArray = npt.NDArray[np.float64]

LinkKey = tuple[str, str]  # the names of child and parent

NUM_CELLS = 25
NUM_PASSES = 4  # over the linear programme; plans change little after the second
TIE = 1e-9  # right answers that sending a request is worth by itself: where nothing else decides, it goes up, as in P2
SEED = 1e-3  # of a node's mean sample, which each sample weighs at least when cells are counted
SAME = 1e-6  # of a rate: what the linear programme leaves to rounding


@dataclass(frozen=True)
class MeasuredPlan:
    """The best plan found, beside the one that sends up all it may."""

    topology: Topology  # its limits are what is worth sending
    value: float  # right answers per request, less the price of sending, on the data it was made from
    accuracy: float  # share of requests answered right, on those data
    p2_value: float  # the same of P2
    p2_accuracy: float

    def to_json(self) -> dict[str, Any]:
        """Plain values, as `exitflow plan --run --json` prints them."""
        return {
            "accuracy": self.accuracy,
            "value": self.value,
            "p2": {"accuracy": self.p2_accuracy, "value": self.p2_value},
        }


def measured_plan(
    outputs: ExitOutputs, topology: Topology, *, price: float = 0.0, confidence_kind: str = "entropy"
) -> MeasuredPlan:
    """The plan that answers most requests right; a request sent over a link must gain `price` right answers."""
    flow = _Flow.of(outputs, price, confidence_kind)
    classes = node_classes(topology)
    everything = best = current = flow.follow(topology)
    for _ in range(NUM_PASSES):
        rates = _solve(classes, flow, current)
        found = flow.follow(_sending(topology, rates))
        halfway = {key: (rate + current.sent[key]) / 2 for key, rate in rates.items()}
        between = flow.follow(_sending(topology, halfway))
        best = max((best, between, found), key=lambda each: each.surely_gained(everything))
        current = found
    return MeasuredPlan(best.topology, best.value, best.accuracy, everything.value, everything.accuracy)


@dataclass(frozen=True)
class _Followed:
    """What comes of a plan when every sample is followed exactly."""

    topology: Topology
    received: Mapping[str, FloatArray]  # (N,) requests/s of each sample at each node
    sent: Mapping[LinkKey, float]  # requests/s over each link
    accuracy: float
    worth: FloatArray  # (N,) right answers per request that each sample adds, less the price of sending it

    @property
    def value(self) -> float:
        """Right answers per request, less the price of sending."""
        return float(self.worth.sum())

    def surely_gained(self, other: _Followed) -> float:
        """How much more it is worth than `other`, less one standard error: so few samples may flatter a plan."""
        differences = len(self.worth) * (self.worth - other.worth)
        return float(differences.mean() - differences.std() / np.sqrt(len(differences)))


@dataclass(frozen=True)
class _Flow:
    """The answers to validation data, sorted into cells. E exits, N samples, B cells."""

    confidences: list[FloatArray]  # E of (N,)
    correct: npt.NDArray[np.bool_]  # (E, N)
    cells: npt.NDArray[np.intp]  # (E, N), from the least sure up
    price: float

    @staticmethod
    def of(outputs: ExitOutputs, price: float, confidence_kind: str) -> _Flow:
        """The cells of each exit hold equally many samples."""
        if not len(outputs.labels):
            raise ExitflowError("a plan from measured answers needs validation data, and there are none")
        confidences = outputs.ranks(confidence_kind)
        ranks = np.stack([np.argsort(surest_first(values)) for values in confidences])
        num_samples = len(outputs.labels)
        cells = (num_samples - 1 - ranks) * NUM_CELLS // num_samples
        return _Flow(confidences, outputs.correct, cells, price)

    def follow(self, topology: Topology) -> _Followed:
        """Every sample through the system whose links carry what `topology` allows."""
        plan = serving_plan(topology)
        received = {}
        right, sent = np.zeros((2, self.correct.shape[1]))
        for node, arriving, served in follow_samples(self.confidences, topology, plan):
            received[node.name] = arriving
            right += served * self.correct[node.exit - 1]
            sent += arriving - served
        total = float(plan.exit_serve_rate.sum())
        links = {(name, parent): rate for name, node in plan.nodes.items() for parent, rate in node.parents.items()}
        return _Followed(topology, received, links, float(right.sum() / total), (right - self.price * sent) / total)

    def accuracy(self, exit: int, received: FloatArray) -> FloatArray:
        """(B,) how often the exit is right in each cell, of what reaches a node; never falls from cell to cell."""
        weights = np.bincount(self.cells[exit - 1], received, NUM_CELLS)
        right = np.bincount(self.cells[exit - 1], received * self.correct[exit - 1], NUM_CELLS)
        typical = float(received.mean())  # one sample's worth of the overall accuracy, where a cell has none
        overall = typical * right.sum() / weights.sum()
        smooth: FloatArray = isotonic_regression((right + overall) / (weights + typical), weights=weights + typical).x
        return smooth

    def spread(self, child: int, parent: int, received: FloatArray) -> FloatArray:
        """(B, B) how the samples of each cell of a child's exit spread over its parent's cells; rows sum to 1."""
        weights = received + SEED * received.mean()  # also cells that nothing reaches so far have a row
        pairs = self.cells[child - 1] * NUM_CELLS + self.cells[parent - 1]
        joint = np.bincount(pairs, weights, NUM_CELLS**2).reshape(NUM_CELLS, NUM_CELLS)
        shares: FloatArray = joint / joint.sum(axis=1, keepdims=True)
        return shares


def _solve(classes: NodeClasses, flow: _Flow, current: _Followed) -> dict[LinkKey, float]:
    """The linear programme of the module's head, with a node for each class; gives the rate over every link."""
    columns = _Columns(classes)
    worth = np.zeros(columns.size)
    balance = sparse.lil_array((len(classes.representatives) * NUM_CELLS, columns.size))
    arriving = np.zeros(balance.shape[0])
    capacity, limits = [], []
    for row, node in enumerate(classes.representatives):
        received = current.received[node.name] if current.received[node.name].any() else np.ones(flow.cells.shape[1])
        rows = slice(row * NUM_CELLS, (row + 1) * NUM_CELLS)
        cells = np.arange(rows.start, rows.stop)
        arriving[rows] = node.arrival_rate * np.bincount(flow.cells[node.exit - 1], minlength=NUM_CELLS) / len(received)
        serve = columns.serve(node.name)
        worth[serve] = classes.size[node.name] * flow.accuracy(node.exit, received)
        balance[cells, np.arange(serve.start, serve.stop)] = 1.0
        for kind, number in columns.kinds[node.name].items():
            send = columns.send(node.name, kind)
            worth[send] = classes.size[node.name] * number * (TIE - flow.price)
            balance[cells, np.arange(send.start, send.stop)] = float(number)
            parent = classes.topology.by_name[kind.name]
            spread = flow.spread(node.exit, parent.exit, received)
            into = classes.incoming[node.name, kind]
            first = classes.representatives.index(parent) * NUM_CELLS
            balance[first : first + NUM_CELLS, send] = -into * spread.T
            if kind.max_transfer_rate is not None:
                row_of = np.zeros(columns.size)
                row_of[send] = 1.0
                capacity.append(row_of)
                limits.append(kind.max_transfer_rate)
    found = linprog(
        -worth,
        A_ub=sparse.csr_array(np.array(capacity)) if capacity else None,
        b_ub=limits or None,
        A_eq=balance.tocsr(),
        b_eq=arriving,
    )
    if found.x is None:
        raise ExitflowError(f"no plan was found: the linear programme ended with {found.message!r}")
    return columns.rates(found.x)


class _Columns:
    """Where the variables of each class stand: what it serves, then what it sends over each kind of link."""

    def __init__(self, classes: NodeClasses) -> None:
        self.classes = classes
        self.kinds = {node.name: classes.kinds(node) for node in classes.representatives}
        self.start: dict[tuple[str, Link | None], int] = {}
        self.size = 0
        for name, kinds in self.kinds.items():
            for kind in (None, *kinds):
                self.start[name, kind] = self.size
                self.size += NUM_CELLS

    def serve(self, name: str) -> slice:
        """The columns of what a class serves."""
        return self.send(name, None)

    def send(self, name: str, kind: Link | None) -> slice:
        """The columns of what each node of a class sends over each link of a kind."""
        start = self.start[name, kind]
        return slice(start, start + NUM_CELLS)

    def rates(self, solution: FloatArray) -> dict[LinkKey, float]:
        """The rate over every link of the topology."""
        classes = self.classes
        return {
            (node.name, link.name): float(
                solution[self.send(classes.class_of[node.name], classes.kind(link))].clip(min=0.0).sum()
            )
            for node in classes.topology.nodes
            for link in node.parents
        }


def _sending(topology: Topology, rates: Mapping[LinkKey, float]) -> Topology:
    """`topology` with links limited to `rates`; a node that sends over each link what P2 sends keeps its limits."""
    plan = serving_plan(topology)
    nodes = []
    for node in topology.nodes:
        links = node.parents
        if any(rates[node.name, parent] < rate * (1 - SAME) for parent, rate in plan.nodes[node.name].parents.items()):
            links = tuple(replace(link, max_transfer_rate=rates[node.name, link.name]) for link in links)
        nodes.append(replace(node, parents=links))
    return Topology(tuple(nodes))
