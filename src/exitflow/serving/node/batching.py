"""Requests into batches that grow with the load by themselves; nothing waits for a batch to fill.

Alone, a request is computed at once, in the event loop, where a thread would cost more. Under load a thread computes,
and meanwhile the next batch gathers. Only then can it be seen that there are others, because a busy event loop takes in
nothing: so now and then a request that seems alone goes to the thread too. The queue is bounded: what does not fit is
refused at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Generic, TypeVar

from exitflow.routing.clock import Clock
from exitflow.routing.queueing import QueueLimits, Sized, take_batch

INLINE_SECONDS = 0.01  # what would take longer goes to the thread
LOOK_EVERY = 16  # batches in the event loop, then one in the thread
ALONE_AFTER = 32  # batches in the thread during which nobody came
SMOOTHING = 0.2  # of the usual seconds


class OverloadedError(Exception):
    """The queue is full, so a request is refused."""


J = TypeVar("J", bound=Sized)
R = TypeVar("R")


class Batcher(Generic[J, R]):
    """Calls `compute` with jobs of one key, up to `max_batch` samples together, and `deliver` with its result."""

    def __init__(
        self,
        compute: Callable[[Sequence[J]], R],
        deliver: Callable[[Sequence[J], R | Exception], None],
        *,
        max_batch: int,
        limits: QueueLimits,
        clock: Clock,
        inline_seconds: float = INLINE_SECONDS,
    ) -> None:
        """`deliver` is called in the event loop, `compute` there or in the thread, never twice at a time."""
        self._compute, self._deliver = compute, deliver
        self._max_batch, self._limits, self._clock = max_batch, limits, clock
        self._inline_seconds = inline_seconds
        self._lock = Lock()  # of the next three
        self._queue: deque[J] = deque()
        self.queued = 0  # samples
        self._working = False  # or about to
        self._taken = self._delivered = 0  # batches
        self._usual_seconds = 0.0  # a sample
        self._alone_for = ALONE_AFTER  # batches in the thread
        self._inline_for = LOOK_EVERY  # batches in the event loop since then
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")

    def submit(self, job: J) -> None:
        """Queue it, or raise OverloadedError; in the event loop."""
        with self._lock:
            if not self._limits.leave_room(self.queued, job.size, self._usual_seconds):
                raise OverloadedError
            self._queue.append(job)
            self.queued += job.size
            start, self._working = not self._working, True
        if start:
            self._loop = asyncio.get_running_loop()
            self._loop.call_soon(self._start)  # with what else comes in this turn of the event loop

    @property
    def idle(self) -> bool:
        """Whether nothing is queued, computed or about to be delivered."""
        return not self._working and self._taken == self._delivered

    def close(self) -> None:
        """Let the thread of the engine end."""
        self._thread.shutdown(wait=False)

    def _start(self) -> None:
        if not self._seems_alone or self.queued * self._usual_seconds > self._inline_seconds:
            self._thread.submit(self._work)
            return
        self._inline_for += 1
        computed = []
        while jobs := self._next():
            computed.append((jobs, self._outcome(jobs)))
        for jobs, result in computed:  # last: whatever that raises, the next job is computed
            self._hand_out(jobs, result)

    @property
    def _seems_alone(self) -> bool:
        return len(self._queue) == 1 and self._alone_for >= ALONE_AFTER and self._inline_for < LOOK_EVERY

    def _work(self) -> None:
        """In the thread, until nothing is queued: it takes batch after batch without asking the event loop."""
        self._inline_for = 0
        while jobs := self._next():
            result = self._outcome(jobs)
            self._alone_for = 0 if self._queue else self._alone_for + 1
            self._loop.call_soon_threadsafe(self._hand_out, jobs, result)

    def _outcome(self, jobs: Sequence[J]) -> R | Exception:
        started = self._clock.now()
        try:
            return self._compute(jobs)
        except Exception as error:
            return error
        finally:
            seconds = (self._clock.now() - started) / sum(job.size for job in jobs)
            usual = self._usual_seconds or seconds
            self._usual_seconds = usual + SMOOTHING * (min(seconds, 2 * usual) - usual)  # one hiccup is not the usual

    def _hand_out(self, jobs: Sequence[J], result: R | Exception) -> None:
        self._delivered += 1
        try:
            self._deliver(jobs, result)
        except Exception as error:
            self._deliver(jobs, error)

    def _next(self) -> list[J]:
        with self._lock:
            jobs, left = take_batch(self._queue, self._max_batch)
            self.queued -= left
            self._working = bool(jobs)
            self._taken += self._working
            return jobs
