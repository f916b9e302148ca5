"""Which requests that wait are computed together, and which are refused because too many wait."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Protocol, TypeVar


class Sized(Protocol):
    """Something that can be queued: it says how many samples it has."""

    @property
    def size(self) -> int:
        """How many samples it has."""

    @property
    def key(self) -> object:
        """What it can be computed together with."""

    @property
    def expired(self) -> bool:
        """Whether nobody waits for it any more."""


J = TypeVar("J", bound=Sized)


@dataclass(frozen=True)
class QueueLimits:
    """How much may wait: whatever is reached first."""

    samples: int
    seconds: float = math.inf

    def leave_room(self, queued: int, size: int, usual_seconds: float) -> bool:
        """Whether `size` samples may wait behind `queued` others, of which each usually takes `usual_seconds`.

        A request too large for the queue may wait alone.
        """
        return queued == 0 or (queued + size <= self.samples and queued * usual_seconds <= self.seconds)


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
