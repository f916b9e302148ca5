"""Accuracy as served: every node ranks what reaches it, answers the surest, and forwards the rest.

Requests are a fluid: sample s reaches node i at a rate, in requests/s. Where requests arrive, all samples arrive
equally often. A node serves its surest samples until its serving rate is filled and forwards the others, split over
its parents as the plan says. Walking the nodes children first gives every rate exactly, for trees and DAGs and
uneven arrivals alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from exitflow.evaluation.outputs import ExitOutputs
from exitflow.routing import served_rates, surest_first
from exitflow.topology.graph import Node, Topology
from exitflow.topology.rates import ServingPlan, serving_plan

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Served:
    """Answers given by a node, an exit or the whole system."""

    rate: float  # requests/s
    accuracy: float | None  # of what was served; None where nothing was

    @staticmethod
    def of(rate: float, right: float) -> Served:
        """`right` of `rate` requests/s were answered correctly."""
        return Served(float(rate), float(right / rate) if rate > 0 else None)


@dataclass(frozen=True)
class Evaluation:
    """The accuracy of a system under one plan."""

    exit_accuracy: tuple[float, ...]  # of each exit on all samples
    exits: tuple[Served, ...]  # of each exit on what it serves
    nodes: Mapping[str, Served]  # of each node on what it serves
    accuracy: float  # of the whole system
    confidence: str

    def to_json(self) -> dict[str, Any]:
        """The evaluation as values that JSON can hold."""
        exits = [
            {"exit": exit, "accuracy": on_all, "serve_rate": served.rate, "served_accuracy": served.accuracy}
            for exit, (on_all, served) in enumerate(zip(self.exit_accuracy, self.exits, strict=True), start=1)
        ]
        nodes = {
            name: {"serve_rate": served.rate, "served_accuracy": served.accuracy} for name, served in self.nodes.items()
        }
        return {"accuracy": self.accuracy, "exits": exits, "nodes": nodes, "confidence": self.confidence}


def evaluate_plan(
    outputs: ExitOutputs, topology: Topology, plan: ServingPlan | None = None, *, confidence_kind: str = "entropy"
) -> Evaluation:
    """How accurately `topology` answers when it serves as planned."""
    plan = plan or serving_plan(topology)
    correct = outputs.correct
    ranks = outputs.ranks(confidence_kind)
    served_right = {
        node.name: float(served @ correct[node.exit - 1]) for node, _, served in follow_samples(ranks, topology, plan)
    }
    return _summarise(outputs, topology, plan, served_right, confidence_kind)


def follow_samples(
    confidences: list[FloatArray], topology: Topology, plan: ServingPlan
) -> Iterator[tuple[Node, FloatArray, FloatArray]]:
    """Each node, children first, with the rates (N,) at which every sample reaches it and is served by it.

    `confidences` holds (N,) values for each exit.
    """
    orders = [surest_first(values) for values in confidences]
    num_samples = len(orders[0])
    received: dict[str, FloatArray] = {}
    for node in topology.children_first:
        rates = plan.nodes[node.name]
        arriving = received.pop(node.name, np.zeros(num_samples)) + node.arrival_rate / num_samples
        served = served_rates(arriving, orders[node.exit - 1], rates.serve_rate)
        for parent, rate in rates.parents.items():
            if rate > 0:
                forwarded = (arriving - served) * (rate / rates.transfer_rate)
                received[parent] = received[parent] + forwarded if parent in received else forwarded
        yield node, arriving, served


def _summarise(
    outputs: ExitOutputs,
    topology: Topology,
    plan: ServingPlan,
    served_right: Mapping[str, float],
    confidence_kind: str,
) -> Evaluation:
    right = np.zeros(topology.num_exits)
    for node in topology.nodes:
        right[node.exit - 1] += served_right[node.name]
    nodes = {node.name: Served.of(plan.nodes[node.name].serve_rate, served_right[node.name]) for node in topology.nodes}
    exits = tuple(Served.of(rate, exit_right) for rate, exit_right in zip(plan.exit_serve_rate, right, strict=True))
    accuracy = float(right.sum() / plan.exit_serve_rate.sum())
    return Evaluation(tuple(outputs.exit_accuracy.tolist()), exits, nodes, accuracy, confidence_kind)
