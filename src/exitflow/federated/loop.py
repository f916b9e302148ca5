"""The round loop. It reads like Algorithm 1, whatever the backend."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from exitflow.errors import TrainingError
from exitflow.federated.aggregation import Aggregation, aggregate
from exitflow.federated.sampling import sample_tasks
from exitflow.federated.spec import TrainingSpec
from exitflow.federated.types import Backend, ServerState, Task, Update
from exitflow.federated.weighting import ExitProfile, ExitWeighting
from exitflow.models.nested import Coverage
from exitflow.tensors import all_finite

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class TrainingPlan:
    """The input of Algorithm 1."""

    nodes: Sequence[str]
    profile: ExitProfile
    weighting: ExitWeighting
    coverage: Mapping[int, Coverage]
    spec: TrainingSpec

    def aggregation(self, exit_weights: FloatArray) -> Aggregation:
        """The server's step under these weights."""
        spec = self.spec
        return Aggregation(
            exit_weights,
            self.profile.exit_samples,
            self.coverage,
            step=spec.server_step,
            server_learning_rate=spec.server_learning_rate,
            projection_radius=spec.projection_radius,
        )


@dataclass
class RoundReport:
    """What happened in a round."""

    round: int
    exit_weights: FloatArray
    tasks: Sequence[Task]
    losses: dict[int, list[float]] = field(default_factory=dict)  # exit -> the mean loss of each node that trained it
    dropped: list[str] = field(default_factory=list)  # nodes whose update was not finite
    seconds: float = 0.0


Progress = Callable[[int, int, int], None]  # round, updates so far, updates in this round


def run_rounds(
    plan: TrainingPlan, state: ServerState, backend: Backend, progress: Progress | None = None
) -> Iterator[tuple[ServerState, RoundReport]]:
    """Train from `state` to the last round; yields the state after each."""
    for round in range(state.round + 1, plan.spec.rounds + 1):
        started = time.perf_counter()
        tasks = sample_tasks(plan.nodes, plan.profile.probabilities, round=round, seed=plan.spec.seed)
        report = RoundReport(round, plan.weighting(plan.profile, round), tasks)
        updates = screen(backend.run(state, tasks), report, stop=plan.spec.on_nonfinite == "stop", progress=progress)
        state = aggregate(state, updates, plan.aggregation(report.exit_weights))
        if not all_finite(state.tensors):
            raise TrainingError(f"round {round}: the global model is not finite any more; choose a smaller step")
        report.seconds = time.perf_counter() - started
        yield state, report


def screen(
    updates: Iterator[Update], report: RoundReport, *, stop: bool = False, progress: Progress | None = None
) -> Iterator[Update]:
    """The updates that are finite; what was seen of all of them goes into `report`."""
    for count, update in enumerate(updates, start=1):
        if progress:
            progress(report.round, count, len(report.tasks))
        task = update.task
        if math.isfinite(update.loss) and all_finite(update.delta) and all_finite(update.buffers):
            report.losses.setdefault(task.exit, []).append(update.loss)
            yield update
        elif stop:
            raise TrainingError(
                f"node {task.node!r} returned NaN or infinity for exit {task.exit} in round {task.round}"
            )
        else:
            report.dropped.append(task.node)


def measure_gradient_variance(
    nodes: Sequence[str], profile: ExitProfile, state: ServerState, backend: Backend
) -> FloatArray:
    """(E,) v_e: each node's own figure, averaged over the nodes that may train the exit by their samples."""
    pairs = np.argwhere(profile.probabilities > 0)  # (row of the node, exit from 0)
    figures = np.array(backend.gradient_variances(state, [(nodes[row], int(exit) + 1) for row, exit in pairs]))
    weights = np.zeros_like(profile.probabilities)
    variances = np.zeros_like(profile.probabilities)
    for (row, exit), figure in zip(pairs, figures, strict=True):
        if np.isfinite(figure):
            weights[row, exit], variances[row, exit] = profile.samples[row], figure
    for exit in range(1, weights.shape[1] + 1):
        if not weights[:, exit - 1].any():
            raise TrainingError(f"exit {exit}: the nodes that train it have too few samples to measure its gradients")
    return np.average(variances, axis=0, weights=weights)
