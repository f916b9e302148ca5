"""What stands around Algorithm 1 in every round: each option wraps the stream of updates, and knows of no other.

    backend.run -> told -> arrived -> finite -> [private] -> accounted -> aggregate

Updates pass one at a time. What an option has to say at the end of a round it says when the stream has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from exitflow.federated.aggregation import Aggregation
from exitflow.federated.options.faults import Attendance, Silence, accounted, arrived, finite
from exitflow.federated.options.federation_spec import FederationSpec
from exitflow.federated.options.privacy import Privacy
from exitflow.federated.plan import TrainingPlan
from exitflow.federated.round_report import RoundReport
from exitflow.federated.types import Missing, ServerState, Update

Progress = Callable[[int, int, int], None]  # round, answers so far, tasks in this round
Wrapped = tuple[Iterator[Update], Aggregation]
Wrap = Callable[[Iterator[Update | Missing], Aggregation, ServerState, RoundReport], Wrapped]


@dataclass(frozen=True)
class Options:
    """What a training asks for beside Algorithm 1."""

    federation: FederationSpec = field(default_factory=FederationSpec)
    privacy: Privacy | None = None
    attendance: Attendance = field(default_factory=Attendance)
    progress: Progress | None = None

    def around(self, plan: TrainingPlan, *, after: int) -> Wrap:
        """What wraps the updates and the server's rule in each round of a training that goes on after a round."""
        attendance, silence = self.attendance, Silence(len(plan.nodes))
        if plan.spec.keeps_momentum:
            attendance.recall(plan, after)

        def wrap(
            answers: Iterator[Update | Missing], rule: Aggregation, state: ServerState, report: RoundReport
        ) -> Wrapped:
            updates = arrived(told(answers, report, self.progress), report, plan, attendance, self.federation)
            updates = finite(updates, report)
            if self.privacy:
                probability = attendance.probability if self.federation.on_missing == "reweight" else None
                rule = self.privacy.noisy(rule, plan, report, probability)
                updates = self.privacy.private(updates, state.buffers, plan.coverage)
            return accounted(updates, report, plan, attendance, silence), rule

        return wrap


def told(
    answers: Iterator[Update | Missing], report: RoundReport, progress: Progress | None
) -> Iterator[Update | Missing]:
    """The same; whoever watches is told of each."""
    for count, answer in enumerate(answers, start=1):
        if progress:
            progress(report.round, count, len(report.tasks))
        yield answer
