"""Requests into batches, with a wait that follows the load.

Alone, a request is computed at once. As long as others keep coming in every turn of the event loop, they are gathered;
while a batch is being computed, the next gathers. A quick batch is computed in the event loop, where nothing gathers
meanwhile: when such batches have been forming, the next one is given a moment to fill up to the size that is usual of
late, but never longer than a batch takes to compute. The queue is bounded: what does not fit is refused at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Any, Generic, Protocol, TypeVar

SMOOTHING = 0.2  # of the averages below
# A batch quicker than this is computed in the event loop, where a thread would cost more: its protocol could overlap
# with others' computing, but while requests come one by one there are no others.
INLINE_SECONDS = 0.002
INLINE_SECONDS_ALONE = 0.05


class OverloadedError(Exception):
    """The queue is full."""


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
R = TypeVar("R")


class Batcher(Generic[J, R]):
    """Calls `compute` with jobs of one key, up to `max_batch` samples together, and `deliver` with its result."""

    def __init__(
        self,
        compute: Callable[[Sequence[J]], R],
        deliver: Callable[[Sequence[J], R | Exception], None],
        *,
        max_batch: int,
        max_wait: float,
        queue_size: int,
    ) -> None:
        self._compute, self._deliver = compute, deliver
        self._max_batch, self._max_wait, self._queue_size = max_batch, max_wait, queue_size
        self._queue: deque[J] = deque()
        self.queued = 0  # samples
        self._usual_batch = 1.0
        self._usual_seconds = 0.0
        self._busy = False
        self._came = False  # a job, in this turn of the event loop
        self._since = 0.0  # when the batch that gathers was begun
        self._timer: asyncio.Handle | None = None
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")

    def submit(self, job: J) -> None:
        """Queue it, or raise OverloadedError."""
        if self.queued + job.size > self._queue_size and self.queued:
            raise OverloadedError
        self._queue.append(job)
        self.queued += job.size
        self._came = True
        if not self._busy and (self._timer is None or self._full):
            self._gather_soon()

    @property
    def _full(self) -> bool:
        return self.queued >= self._max_batch or self.queued + 0.5 >= self._usual_batch > 1.5

    @property
    def _computes_inline(self) -> bool:
        return 0 < self._usual_seconds < (INLINE_SECONDS if self._usual_batch > 1.5 else INLINE_SECONDS_ALONE)

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or computed."""
        return not self._queue and not self._busy

    def close(self) -> None:
        """Let the thread go."""
        self._thread.shutdown(wait=False)

    def _gather_soon(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        else:
            self._since = monotonic()
        self._came = False
        self._timer = self._loop.call_soon(self._gather)

    def _gather(self) -> None:
        """Once more around the event loop if others came in this turn; else wait for the usual size, or begin."""
        waited = monotonic() - self._since
        left = min(self._max_wait, self._usual_seconds) - waited
        if self.queued >= self._max_batch:
            self._start()
        elif self._came and waited < self._max_wait:
            self._came = False
            self._timer = self._loop.call_soon(self._gather)
        elif self._computes_inline and self.queued + 0.5 < self._usual_batch and left > 0:
            self._timer = self._loop.call_later(left, self._start)
        else:
            self._start()

    def _start(self) -> None:
        self._timer = None
        jobs = self._take()
        if not jobs:
            return
        started = monotonic()
        if self._computes_inline:
            try:
                result: R | Exception = self._compute(jobs)
            except Exception as error:
                result = error
            self._finish(jobs, result, started)
        else:
            self._busy = True
            future = self._loop.run_in_executor(self._thread, self._compute, jobs)
            future.add_done_callback(lambda done: self._finish(jobs, _outcome(done), started))

    def _finish(self, jobs: Sequence[J], result: R | Exception, started: float) -> None:
        self._busy = False
        size = sum(job.size for job in jobs)
        seconds = monotonic() - started
        usual = self._usual_seconds or seconds
        self._usual_seconds = usual + SMOOTHING * (min(seconds, 2 * usual) - usual)  # one hiccup is not the usual
        self._usual_batch += SMOOTHING * (size - self._usual_batch)
        self._deliver(jobs, result)
        if self._queue:
            self._gather_soon()

    def _take(self) -> list[J]:
        """The oldest, and those behind it that can be computed with it."""
        jobs: list[J] = []
        size = 0
        while self._queue:
            job = self._queue[0]
            if not job.expired:
                if jobs and (size + job.size > self._max_batch or job.key != jobs[0].key):
                    break
                jobs.append(job)
                size += job.size
            self._queue.popleft()
            self.queued -= job.size
        return jobs


def _outcome(done: asyncio.Future[Any]) -> Any:
    error = done.exception()
    if error is None:
        return done.result()
    return error if isinstance(error, Exception) else RuntimeError(str(error))
