"""Which jobs make a batch."""

from collections import deque
from dataclasses import dataclass

from exitflow.routing.queueing import QueueLimits, take_batch


@dataclass
class Job:
    size: int
    key: str = "a"
    expired: bool = False


def test_the_oldest_of_one_key_go_together_up_to_the_limit():
    jobs = [Job(2), Job(3), Job(9, expired=True), Job(3), Job(1, "b"), Job(1)]
    queue = deque(jobs)
    assert take_batch(queue, 8) == ([jobs[0], jobs[1], jobs[3]], 17)
    assert take_batch(queue, 8) == ([jobs[4]], 1)
    assert take_batch(queue, 8) == ([jobs[5]], 1)
    assert take_batch(queue, 8) == ([], 0)


def test_what_is_larger_than_a_batch_is_computed_alone():
    queue = deque([Job(50), Job(1)])
    assert take_batch(queue, 8) == ([Job(50)], 50)


def test_a_queue_is_full_when_one_more_would_not_fit_but_whatever_is_first_waits():
    limits = QueueLimits(5)
    assert limits.leave_room(3, 2, 9.0)
    assert not limits.leave_room(4, 2, 9.0)
    assert limits.leave_room(0, 50, 9.0)


def test_a_queue_is_full_when_those_waiting_will_take_too_long():
    limits = QueueLimits(100, seconds=2.0)
    assert limits.leave_room(4, 1, 0.5)
    assert not limits.leave_room(5, 1, 0.5)
    assert limits.leave_room(0, 50, 0.5)
