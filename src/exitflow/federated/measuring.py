"""What a weighting may want to know of the gradients, measured at the initial model before the first round.

Each node measures its own data, at every exit that it may train; only its figures travel. The batches come from the
seed, so whoever measures again gets the same bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from exitflow.errors import TrainingError
from exitflow.federated.schedules import make_schedule
from exitflow.federated.training_spec import TrainingSpec
from exitflow.federated.types import Backend, GradientFigures, ServerState
from exitflow.federated.weighting import ExitProfile
from exitflow.theory.bound import BoundInputs
from exitflow.theory.estimates import Measured, Setup, estimated_inputs

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class GradientTable:
    """(N, E) of each field of GradientFigures; NaN where a node does not train an exit, or has too little data."""

    mean_variance: FloatArray
    variance: FloatArray
    second_moment: FloatArray
    loss: FloatArray

    def to_json(self) -> dict[str, tuple[tuple[float | None, ...], ...]]:
        """Plain values, null for NaN."""
        return {
            name: tuple(tuple(float(value) if np.isfinite(value) else None for value in row) for row in values)
            for name, values in vars(self).items()
        }

    @staticmethod
    def from_json(table: Mapping[str, Any]) -> GradientTable:
        """What `to_json` gave, to the bit."""
        return GradientTable(**{name: np.array(values, dtype=np.float64) for name, values in table.items()})


def measure_gradients(
    nodes: Sequence[str], probabilities: FloatArray, state: ServerState, backend: Backend
) -> GradientTable:
    """The figures of every node at every exit that it may train."""
    pairs = np.argwhere(probabilities > 0)  # (row of the node, exit from 0)
    found = backend.measure_gradients(state, [(nodes[row], int(exit) + 1) for row, exit in pairs])
    tables = {field.name: np.full(probabilities.shape, np.nan) for field in dataclasses.fields(GradientFigures)}
    for (row, exit), figures in zip(pairs, found, strict=True):
        for name, table in tables.items():
            table[row, exit] = getattr(figures, name)
    return GradientTable(**tables)


def exit_means(figures: FloatArray, samples: FloatArray) -> FloatArray:
    """(E,) of (N, E) figures: each node's own, averaged by their samples over the nodes that could measure."""
    weights = np.where(np.isfinite(figures), samples[:, None], 0.0)
    for exit in range(1, weights.shape[1] + 1):
        if not weights[:, exit - 1].any():
            raise TrainingError(f"exit {exit}: the nodes that train it have too few samples to measure its gradients")
    return np.average(np.nan_to_num(figures, posinf=0.0, neginf=0.0), axis=0, weights=weights)


def measured_profile(
    profile: ExitProfile,
    table: GradientTable,
    *,
    num_parameters: Sequence[int],
    spec: TrainingSpec,
    num_steps: int,
    curvature: tuple[float, float] | None = None,
) -> ExitProfile:
    """`profile` with the gradient variances of its exits and the inputs of Theorem 1.

    `curvature` is the theorem's (L, mu), where they are known.
    """
    bound = _bound_inputs(profile, table, np.array(num_parameters, dtype=np.float64), spec, num_steps, curvature)
    return replace(profile, gradient_variance=exit_means(table.mean_variance, profile.samples), bound=bound)


def _bound_inputs(
    profile: ExitProfile,
    table: GradientTable,
    num_parameters: FloatArray,
    spec: TrainingSpec,
    num_steps: int,
    curvature: tuple[float, float] | None,
) -> BoundInputs:
    def complete(figures: FloatArray) -> FloatArray:
        """A node that could not measure is taken to be like the others."""
        return np.where(np.isfinite(figures), figures, exit_means(figures, profile.samples))

    schedule = make_schedule(spec, num_steps)
    measured = Measured(
        gradient_variance=complete(table.variance),
        second_moment=complete(table.second_moment),
        loss=exit_means(table.loss, profile.samples),
        num_parameters=num_parameters,
    )
    setup = Setup(
        serve_share=profile.serve_share / profile.serve_share.sum(),
        samples=profile.samples,
        probabilities=profile.probabilities,
        num_rounds=spec.rounds,
        num_steps=num_steps,
        last_rate=schedule(spec.rounds, num_steps - 1) * _momentum_gain(spec, num_steps),
        joint_exits=spec.trains_all_exits,
    )
    return estimated_inputs(measured, setup, curvature)


def _momentum_gain(spec: TrainingSpec, num_steps: int) -> float:
    """How many times its own step a gradient moves the weights: 1 / (1 - momentum), less what ends with a round."""
    momentum = spec.optimiser.momentum
    whole = 1 / (1 - momentum)
    if spec.keeps_momentum:
        return whole
    return whole * (1 - momentum * (1 - momentum**num_steps) * whole / num_steps)  # a mean over the steps of a round
