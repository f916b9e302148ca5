"""The round loop. It reads like Algorithm 1, whatever the backend."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from exitflow.errors import TrainingError
from exitflow.federated.aggregation import Aggregation, aggregate
from exitflow.federated.options.faults import Attendance, reweighted
from exitflow.federated.options.federation_spec import FederationSpec
from exitflow.federated.options.privacy import Privacy, changes
from exitflow.federated.sampling import sample_tasks
from exitflow.federated.training_spec import TrainingSpec
from exitflow.federated.types import Backend, Missing, ServerState, Task, Update
from exitflow.federated.weighting import ExitProfile, ExitWeighting
from exitflow.models.nested import Coverage
from exitflow.tensors import all_finite, take

FloatArray = npt.NDArray[np.float64]
NOT_FINITE = "its update held NaN or infinity"
DIVERGED = "choose a smaller learning rate or weight decay, or look at the data"


@dataclass(frozen=True)
class TrainingPlan:
    """The input of Algorithm 1."""

    nodes: Sequence[str]
    profile: ExitProfile
    weighting: ExitWeighting
    coverage: Callable[..., Coverage]  # of any exits
    spec: TrainingSpec
    federation: FederationSpec = field(default_factory=FederationSpec)
    privacy: Privacy | None = None

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

    def largest_weight(self, exit_weights: FloatArray, attendance: Attendance) -> float:
        """The most that any element of any node's update may count in a round."""
        profile = self.profile
        drawn = profile.probabilities > 0  # (N, E)
        weights = exit_weights * profile.samples[:, None] / profile.exit_samples
        weights = np.divide(weights, profile.probabilities, out=np.zeros_like(weights), where=drawn)
        if self.federation.on_missing == "reweight":
            weights /= np.array([attendance.probability(node) for node in self.nodes])[:, None]
        return float((weights.sum(axis=1) if self.spec.trains_all_exits else weights).max())


@dataclass
class RoundReport:
    """What happened in a round."""

    round: int
    exit_weights: FloatArray
    tasks: Sequence[Task]
    losses: dict[int, list[float]] = field(default_factory=dict)  # exit -> the mean loss of each node that trained it
    dropped: list[str] = field(default_factory=list)  # nodes whose update was not finite
    missing: dict[str, str] = field(default_factory=dict)  # node -> why no update of it came
    refused: dict[str, str] = field(default_factory=dict)  # node -> why its update was not believed
    lost_weight: FloatArray | None = None  # (E,) share of the exit's weight that did not arrive: the bias of `skip`
    state_lost: list[str] = field(default_factory=list)  # nodes that kept momentum, and have lost or old one
    wire_bytes: dict[str, tuple[int, int]] = field(default_factory=dict)  # node -> bytes down and up, where known
    seconds: float = 0.0

    @property
    def lost(self) -> dict[str, str]:
        """Each node whose update does not count, and why."""
        return {**dict.fromkeys(self.dropped, NOT_FINITE), **self.missing, **self.refused}

    @property
    def num_updates(self) -> int:
        """How many updates count."""
        return len(self.tasks) - len(self.lost)

    @property
    def attendance(self) -> dict[str, bool]:
        """Whether each node that was asked has answered; an answer that was refused is one."""
        return {task.node: task.node not in self.missing for task in self.tasks}


Progress = Callable[[int, int, int], None]  # round, updates so far, updates in this round


def run_rounds(
    plan: TrainingPlan,
    state: ServerState,
    backend: Backend,
    progress: Progress | None = None,
    attendance: Attendance | None = None,
) -> Iterator[tuple[ServerState, RoundReport]]:
    """Train from `state` to the last round; yields the state after each."""
    attendance = attendance or Attendance()
    silent: dict[str, str] = {}  # nodes that were asked since an update last counted, and what came of it
    if _keeps_state(plan):
        for round in range(1, state.round + 1):
            attendance.add_trained(plan.tasks(round, plan.weighting(plan.profile, round)))
    for round in range(state.round + 1, plan.spec.rounds + 1):
        started = time.perf_counter()
        exit_weights = plan.weighting(plan.profile, round)
        report = RoundReport(round, exit_weights, plan.tasks(round, exit_weights))
        updates = arrived(backend.run(state, report.tasks), report, plan, attendance)
        updates = screen(updates, report, stop=plan.spec.on_nonfinite == "stop", progress=progress)
        rule = plan.aggregation(report.exit_weights)
        if plan.privacy:
            updates = private(updates, state, plan)
            largest_weight = plan.largest_weight(report.exit_weights, attendance)
            rule = replace(rule, noise=partial(plan.privacy.add_noise, largest_weight=largest_weight, round=round))
        state = aggregate(state, updates, rule)
        silent = {} if report.num_updates else {**silent, **report.lost}
        check_somebody_trains(round, silent, num_nodes=len(plan.nodes))
        if not all_finite(state.tensors):
            raise TrainingError(f"round {round}: the global model is not finite any more; choose a smaller step")
        attendance.add_round(report.round, report.attendance, report.tasks)
        report.lost_weight = lost_weight(plan, report)
        report.seconds = time.perf_counter() - started
        yield state, report


def check_somebody_trains(round: int, silent: Mapping[str, str], *, num_nodes: int) -> None:
    """Stop where no update counts any more. One node that is drawn alone may fail; where two do, nobody is left."""
    if len(silent) < min(2, num_nodes):
        return
    shown = "; ".join(f"node {node!r}: {reason}" for node, reason in list(silent.items())[:3])
    more = f"; and {len(silent) - 3} more" if len(silent) > 3 else ""
    advice = DIVERGED if set(silent.values()) == {NOT_FINITE} else "--resume goes on from here"
    raise TrainingError(f"round {round}: no update can be used ({shown}{more}); {advice}")


def arrived(
    updates: Iterator[Update | Missing], report: RoundReport, plan: TrainingPlan, attendance: Attendance
) -> Iterator[Update]:
    """The updates that came, by the plan's rule for those that did not."""
    rule = plan.federation.on_missing
    for update in updates:
        task = update.task
        if update.wire_bytes:
            report.wire_bytes[task.node] = update.wire_bytes
        if isinstance(update, Update):
            if _keeps_state(plan) and (update.state_round or 0) < attendance.last_trained(task):
                report.state_lost.append(task.node)
            yield reweighted(update, attendance) if rule == "reweight" else update
        elif rule == "strict":
            verb = "was refused" if update.refused else "is missing"
            advice = "federation.on_missing = 'skip' or 'reweight' would go on"
            raise TrainingError(
                f"round {task.round}: the update of node {task.node!r} {verb}: {update.reason}; {advice}"
            )
        else:
            (report.refused if update.refused else report.missing)[task.node] = update.reason


def _keeps_state(plan: TrainingPlan) -> bool:
    return plan.spec.momentum_between_rounds == "keep"


def private(updates: Iterator[Update], state: ServerState, plan: TrainingPlan) -> Iterator[Update]:
    """The updates clipped, their buffers as changes."""
    assert plan.privacy is not None
    for update in updates:
        before = take(state.buffers, plan.coverage(*update.task.exits))
        yield plan.privacy.clipped(changes(update, before))


def lost_weight(plan: TrainingPlan, report: RoundReport) -> FloatArray | None:
    """(E,) for each exit, how much of the weight of the round's updates did not arrive; None where all did."""
    lost = report.lost
    if not lost:
        return None
    samples = dict(zip(plan.nodes, plan.profile.samples, strict=True))
    absent, whole = np.zeros_like(report.exit_weights), np.zeros_like(report.exit_weights)
    for task in report.tasks:
        exits = [exit - 1 for exit in task.exits]
        weight = samples[task.node] / task.probability
        whole[exits] += weight
        absent[exits] += weight * (task.node in lost)
    return absent / np.where(whole > 0, whole, 1)


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
