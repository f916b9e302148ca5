"""What the server does about updates that do not come, or are no numbers.

`strict` stops. `skip` goes on with what arrived, and reports how much of each exit's weight was lost: the round's
step is short of the full one by just those terms. `reweight` counts arrival as a part of participation: an update of
a node that answers with probability q is divided by p q, so that the sum is that of full participation in expectation,
as long as nodes fail independently of what they would have sent. q is estimated from earlier rounds only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from exitflow.errors import TrainingError
from exitflow.federated.options.federation_spec import FederationSpec
from exitflow.federated.plan import TrainingPlan
from exitflow.federated.round_report import NOT_FINITE, RoundReport
from exitflow.federated.types import Missing, Task, Update
from exitflow.tensors import all_finite

DIVERGED = "choose a smaller learning rate or weight decay, or look at the data"


class RecordedRound(Protocol):
    """What has to be known of an earlier round."""

    @property
    def round(self) -> int:
        """From 1."""

    @property
    def attendance(self) -> Mapping[str, bool]:
        """Who of those asked has answered, where that counts."""

    @property
    def missing(self) -> Mapping[str, str]:
        """Nodes of which no update came."""

    @property
    def dropped(self) -> Sequence[str]:
        """Nodes whose update was not finite."""


@dataclass
class Attendance:
    """Which nodes have answered when they were asked. It is read from the records when a run is resumed."""

    asked: dict[str, int] = field(default_factory=dict)
    answered: dict[str, int] = field(default_factory=dict)
    idle: set[tuple[int, str]] = field(default_factory=set)  # (round, node) in which nothing came, or no numbers
    trained: dict[tuple[str, int], int] = field(default_factory=dict)  # node and deepest exit -> the last round
    recalled: int = 0  # up to which round `trained` is complete

    @staticmethod
    def of(records: Iterable[RecordedRound]) -> Attendance:
        """As the records of rounds tell it."""
        attendance = Attendance()
        for record in records:
            attendance.add(record.attendance)
            attendance.idle.update((record.round, node) for node in (*record.missing, *record.dropped))
        return attendance

    def add(self, round: Mapping[str, bool]) -> None:
        """Who of those asked in a round has answered."""
        for node, answered in round.items():
            self.asked[node] = self.asked.get(node, 0) + 1
            self.answered[node] = self.answered.get(node, 0) + answered

    def add_round(self, report: RoundReport) -> None:
        """All that a round has shown."""
        self.add(report.attendance)
        self.idle.update((report.round, node) for node in (*report.missing, *report.dropped))
        self.add_trained(report.tasks)

    def recall(self, plan: TrainingPlan, last: int) -> None:
        """Who trained what in the rounds up to the last one, which the plan knows."""
        for round in range(self.recalled + 1, last + 1):
            self.add_trained(plan.tasks(round, plan.weighting(plan.profile, round)))
        self.recalled = max(self.recalled, last)

    def add_trained(self, tasks: Iterable[Task]) -> None:
        """Who has trained what, and when, so that a node that lost its momentum is noticed."""
        present = (task for task in tasks if (task.round, task.node) not in self.idle)
        self.trained |= {(task.node, task.deepest): task.round for task in present}

    def last_trained(self, task: Task) -> int:
        """The last round before the task's in which its node trained its exit; 0: never."""
        return self.trained.get((task.node, task.deepest), 0)

    def probability(self, node: str) -> float:
        """q: the share of earlier rounds in which the node answered, one more added that it did.

        So it is 1 before the node was ever asked, never 0, and right in the long run.
        """
        return (1 + self.answered.get(node, 0)) / (1 + self.asked.get(node, 0))


def arrived(
    answers: Iterator[Update | Missing],
    report: RoundReport,
    plan: TrainingPlan,
    attendance: Attendance,
    federation: FederationSpec,
) -> Iterator[Update]:
    """The updates that came, by the rule for those that did not."""
    for answer in answers:
        task = answer.task
        if answer.wire_bytes:
            report.wire_bytes[task.node] = answer.wire_bytes
        if isinstance(answer, Update):
            if plan.spec.keeps_momentum and (answer.state_round or 0) < attendance.last_trained(task):
                report.state_lost.append(task.node)
            yield reweighted(answer, attendance) if federation.on_missing == "reweight" else answer
        elif federation.on_missing == "strict":
            verb = "was refused" if answer.refused else "is missing"
            advice = "federation.on_missing = 'skip' or 'reweight' would go on"
            raise TrainingError(
                f"round {task.round}: the update of node {task.node!r} {verb}: {answer.reason}; {advice}"
            )
        else:
            (report.refused if answer.refused else report.missing)[task.node] = answer.reason


def reweighted(update: Update, attendance: Attendance) -> Update:
    """The same update, arrival counted as a part of its probability: p q."""
    task = update.task
    return replace(update, task=replace(task, probability=task.probability * attendance.probability(task.node)))


def finite(updates: Iterator[Update], report: RoundReport) -> Iterator[Update]:
    """The updates whose losses and tensors are numbers; the nodes of the others are named."""
    for update in updates:
        task = update.task
        numbers = all(loss is None or math.isfinite(loss) for loss in update.losses)
        if numbers and all_finite(update.delta) and all_finite(update.buffers):
            for exit, loss in zip(task.exits, update.losses, strict=True):
                if loss is not None:
                    report.losses.setdefault(exit, []).append(loss)
            yield update
        else:
            report.dropped.append(task.node)


@dataclass
class Silence:
    """Nodes that were asked since an update last counted, and what came of it."""

    num_nodes: int
    nodes: dict[str, str] = field(default_factory=dict)

    def hear(self, report: RoundReport) -> None:
        """Stop where no update counts any more. One node that is drawn alone may fail; where two do, nobody is left."""
        self.nodes = {} if report.num_updates else {**self.nodes, **report.lost}
        if len(self.nodes) < min(2, self.num_nodes):
            return
        reasons = [f"node {node!r}: {reason}" for node, reason in self.nodes.items()]
        shown = "; ".join(reasons[:3]) + (f"; and {len(reasons) - 3} more" if len(reasons) > 3 else "")
        advice = DIVERGED if set(self.nodes.values()) == {NOT_FINITE} else "--resume goes on from here"
        raise TrainingError(f"round {report.round}: no update can be used ({shown}); {advice}")


def accounted(
    updates: Iterator[Update], report: RoundReport, plan: TrainingPlan, attendance: Attendance, silence: Silence
) -> Iterator[Update]:
    """The same; when all have passed, what is missing is counted."""
    yield from updates
    silence.hear(report)
    attendance.add_round(report)
    report.lost_weight = lost_weight(plan, report)


def lost_weight(plan: TrainingPlan, report: RoundReport) -> npt.NDArray[np.float64] | None:
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
