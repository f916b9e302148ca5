"""Which requests that wait are computed together, and which are refused because too many wait."""

from __future__ import annotations

from collections import deque
from typing import Protocol, TypeVar


class Sized(Protocol):
    """What can be queued."""

    @property
    def size(self) -> int:
        """Samples."""

    @property
    def key(self) -> object:
        """What it can be computed together with."""

    @property
    def expired(self) -> bool:
        """Whether nobody waits for it any more."""


J = TypeVar("J", bound=Sized)


def has_room(queued: int, size: int, queue_size: int) -> bool:
    """Whether `size` samples may wait behind `queued` others; a request too large for the queue may wait alone."""
    return queued == 0 or queued + size <= queue_size


def take_batch(queue: deque[J], max_batch: int) -> tuple[list[J], int]:
    """(jobs, samples that left the queue): the oldest, and those behind it that can be computed with it."""
    jobs: list[J] = []
    size = left = 0
    while queue:
        job = queue[0]
        if not job.expired:
            if jobs and (size + job.size > max_batch or job.key != jobs[0].key):
                break
            jobs.append(job)
            size += job.size
        queue.popleft()
        left += job.size
    return jobs, left
