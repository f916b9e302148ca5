"""The round loop. It reads like Algorithm 1, whatever the backend."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
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
    coverage: Callable[..., Coverage]  # of any exits
    spec: TrainingSpec

    def tasks(self, round: int, exit_weights: FloatArray) -> list[Task]:
        """Who trains what."""
        spec, drawn_later = self.spec, self.spec.local_exits == "each-step"
        return sample_tasks(
            self.nodes,
            self.profile.probabilities,
            round=round,
            seed=spec.seed,
            joint_weights=self._joint_weights(exit_weights) if spec.trains_all_exits else None,
            as_sum=drawn_later or spec.joint_loss == "sum",
        )

    def _joint_weights(self, exit_weights: FloatArray) -> FloatArray:
        """(E,) of the losses of a node that trains several exits: as the server counts their updates."""
        if self.spec.local_exits == "each-step":
            return np.ones_like(exit_weights)
        weighs = self.spec.server_step in ("paper", "coverage")  # the means count nodes, and leave exits to them
        return exit_weights / self.profile.exit_samples if weighs else exit_weights

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
        exit_weights = plan.weighting(plan.profile, round)
        report = RoundReport(round, exit_weights, plan.tasks(round, exit_weights))
        updates = backend.run(state, report.tasks)
        updates = screen(updates, report, stop=plan.spec.on_nonfinite == "stop", progress=progress)
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
        finite = all(loss is None or math.isfinite(loss) for loss in update.losses)
        if finite and all_finite(update.delta) and all_finite(update.buffers):
            for exit, loss in zip(task.exits, update.losses, strict=True):
                if loss is not None:
                    report.losses.setdefault(exit, []).append(loss)
            yield update
        elif stop:
            raise TrainingError(
                f"node {task.node!r} returned NaN or infinity for exit {task.deepest} in round {task.round}"
            )
        else:
            report.dropped.append(task.node)
