"""What the server does about updates that do not come.

`strict` stops. `skip` goes on with what arrived, and reports how much of each exit's weight was lost: the round's
step is short of the full one by just those terms. `reweight` counts arrival as a part of participation: an update of
a node that answers with probability q is divided by p q, so that the sum is that of full participation in expectation,
as long as nodes fail independently of what they would have sent. q is estimated from earlier rounds only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from exitflow.federated.types import Task, Update


@dataclass
class Attendance:
    """Which nodes have answered when they were asked. It is read from the records when a run is resumed."""

    asked: dict[str, int] = field(default_factory=dict)
    answered: dict[str, int] = field(default_factory=dict)
    absent: set[tuple[int, str]] = field(default_factory=set)  # (round, node) in which nothing came
    trained: dict[tuple[str, int], int] = field(default_factory=dict)  # node and deepest exit -> the last round

    @staticmethod
    def of(records: Iterable[Mapping[str, Any]]) -> Attendance:
        """As the records of rounds tell it."""
        attendance = Attendance()
        for record in records:
            attendance.add(record.get("attendance", {}))
            attendance.absent.update((record["round"], node) for node in record.get("missing", {}))
        return attendance

    def add(self, round: Mapping[str, bool]) -> None:
        """Who of those asked in a round has answered."""
        for node, answered in round.items():
            self.asked[node] = self.asked.get(node, 0) + 1
            self.answered[node] = self.answered.get(node, 0) + answered

    def add_round(self, round: int, answered: Mapping[str, bool], tasks: Iterable[Task]) -> None:
        """All that a round has shown."""
        self.add(answered)
        self.absent.update((round, node) for node, came in answered.items() if not came)
        self.add_trained(tasks)

    def add_trained(self, tasks: Iterable[Task]) -> None:
        """Who has trained what, and when, so that a node that lost its momentum is noticed."""
        present = (task for task in tasks if (task.round, task.node) not in self.absent)
        self.trained |= {(task.node, task.deepest): task.round for task in present}

    def last_trained(self, task: Task) -> int:
        """The last round before the task's in which its node trained its exit; 0: never."""
        return self.trained.get((task.node, task.deepest), 0)

    def probability(self, node: str) -> float:
        """q: the share of earlier rounds in which the node answered, one more added that it did.

        So it is 1 before the node was ever asked, never 0, and right in the long run.
        """
        return (1 + self.answered.get(node, 0)) / (1 + self.asked.get(node, 0))


def reweighted(update: Update, attendance: Attendance) -> Update:
    """The same update, arrival counted as a part of its probability: p q."""
    task = update.task
    return replace(update, task=replace(task, probability=task.probability * attendance.probability(task.node)))
