"""Thresholds for the serving nodes, each calibrated on what its children forward to it.

A device keeps the easy samples, so an edge server sees hard ones only. Calibrated on all samples it would answer too
many of them; followed through the hierarchy, every node gets the threshold that fills its planned rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from exitflow.config import require
from exitflow.evaluation.accuracy import follow_samples
from exitflow.evaluation.outputs import ExitOutputs
from exitflow.topology.graph import Topology
from exitflow.topology.rates import ServingPlan, serving_plan

FloatArray = npt.NDArray[np.float64]

GRID_SIZE = 201  # quantiles kept of what a node sees
UNSURE = -1.0  # no kind of confidence falls below 0


@dataclass(frozen=True)
class NodeCalibration:
    """What a node should expect to see, and where to cut it."""

    serve_fraction: float  # of what it receives
    confidences: tuple[float, ...]  # evenly spaced quantiles, rising, of what it receives; () where nothing does
    threshold: float | None = None  # it answers from this confidence up; None where it answers all or nothing

    def __post_init__(self) -> None:
        require(0 <= self.serve_fraction <= 1, "serve_fraction", f"must be between 0 and 1, got {self.serve_fraction}")

    @property
    def cut(self) -> float:
        """The threshold, also where all or nothing is answered."""
        if self.threshold is not None:
            return self.threshold
        return -np.inf if self.serve_fraction > 0 else np.inf


def calibrate(
    outputs: ExitOutputs, topology: Topology, plan: ServingPlan | None = None, *, confidence_kind: str = "entropy"
) -> Mapping[str, NodeCalibration]:
    """The calibration of every node, from validation data."""
    plan = plan or serving_plan(topology)
    ranks = [_sorted_out(values) for values in outputs.ranks(confidence_kind)]
    found = {}
    for node, received, served in follow_samples(ranks, topology, plan):
        values = ranks[node.exit - 1]
        fraction = plan.nodes[node.name].serve_fraction
        threshold = _threshold(values, received, served) if fraction > 0 else None
        found[node.name] = NodeCalibration(fraction, _quantiles(values, received), threshold)
    return {node.name: found[node.name] for node in topology.nodes}


def _sorted_out(values: FloatArray) -> FloatArray:
    """Below all others where an exit's logits, and so its confidence, are no numbers: a node would not answer that."""
    return np.where(np.isnan(values), UNSURE, values)


def _threshold(values: FloatArray, received: FloatArray, served: FloatArray) -> float | None:
    """Halfway between the least sure sample that is mostly served and the surest that is mostly forwarded.

    Just above the surest where none is mostly served; None where none is mostly forwarded.
    """
    kept = values[(received > 0) & (served >= received / 2)]
    sent = values[(received > 0) & (served < received / 2)]
    if not len(sent):
        return None
    return float((kept.min() + sent.max()) / 2 if len(kept) else np.nextafter(sent.max(), np.inf))


def _quantiles(values: FloatArray, weights: FloatArray) -> tuple[float, ...]:
    if not weights.sum() > 0:
        return ()
    order = np.argsort(values)
    cumulative = (np.cumsum(weights[order]) - weights[order] / 2) / weights.sum()
    return tuple(np.interp(np.linspace(0, 1, GRID_SIZE), cumulative, values[order]).tolist())
