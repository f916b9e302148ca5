"""The time by which a node serves: real, or virtual in simulations and tests."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from itertools import count
from time import monotonic
from typing import Any, Protocol


class Timer(Protocol):
    """Something that will happen, unless it is cancelled."""

    def cancel(self) -> None:
        """Take back what was to happen."""


class Clock(Protocol):
    """Seconds since any moment, and what is to happen after some of them."""

    def now(self) -> float:
        """Seconds; they never go back."""

    def call_later(self, seconds: float, function: Callable[..., object], *arguments: Any) -> Timer:
        """Call `function(*arguments)` in so many seconds."""


class RealClock:
    """`time.monotonic`, and the timers of the running event loop, whose own time may be as coarse as a millisecond."""

    now = staticmethod(monotonic)

    def call_later(self, seconds: float, function: Callable[..., object], *arguments: Any) -> Timer:
        """Only in an event loop."""
        return asyncio.get_running_loop().call_later(seconds, function, *arguments)


class _VirtualTimer:
    __slots__ = ("arguments", "function")

    def __init__(self, function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        self.function: Callable[..., object] | None = function
        self.arguments = arguments

    def cancel(self) -> None:
        self.function = None
        self.arguments = ()


class VirtualClock:
    """Stands still until it is advanced; then everything that is due happens, in its order, at its own time.

    >>> clock, seen = VirtualClock(), []
    >>> _ = clock.call_later(2.0, lambda: seen.append(clock.now()))
    >>> clock.advance(5.0)
    >>> seen, clock.now()
    ([2.0], 5.0)
    """

    def __init__(self, now: float = 0.0) -> None:
        self._now = now
        self._number = count()  # of timers: those of the same moment go off in the order in which they were set
        self._due: list[tuple[float, int, _VirtualTimer]] = []

    def now(self) -> float:
        """Seconds by which it was advanced."""
        return self._now

    def call_later(self, seconds: float, function: Callable[..., object], *arguments: Any) -> Timer:
        """Call `function(*arguments)` when it has been advanced by so many seconds."""
        timer = _VirtualTimer(function, arguments)
        heapq.heappush(self._due, (self._now + max(seconds, 0.0), next(self._number), timer))
        return timer

    def advance(self, seconds: float) -> None:
        """Let so many seconds pass, and with them whatever is due by then, also what that sets in motion."""
        end = self._now + seconds
        while self._due and self._due[0][0] <= end:
            self._now, _, timer = heapq.heappop(self._due)
            if timer.function:
                timer.function(*timer.arguments)
        self._now = end


async def sleep(clock: Clock, seconds: float) -> None:
    """Wait in an event loop until so many seconds of this clock have passed."""
    passed = asyncio.get_running_loop().create_future()
    timer = clock.call_later(seconds, _resolve, passed)
    try:
        await passed
    finally:
        timer.cancel()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
