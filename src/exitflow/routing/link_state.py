"""What a node knows of the link to one parent: whether it may be used, and what may still be under way on it.

The breaker opens when the parent cannot be reached, or fails a few times in a row (`_WEIGHTS`). Then nothing is sent
until the parent has said that it is ready. A pure state machine: whoever has the network tells it what happened.
"""

from __future__ import annotations

from threading import Lock

MAX_FAILURES = 3  # in a row, of a parent that is slow or answers nonsense
FIRST_PAUSE, LAST_PAUSE = 0.25, 5.0  # seconds between asking a parent that is down
IDLE_PAUSE = 2.0  # seconds without an answer after which a parent is asked whether it is still there

# What a failure counts towards cutting the link. A parent is well that is only busy, or finds a client's numbers too
# large for its part of the network. One whose caller was in a hurry may be; but if all are, in a row, it is not.
_WEIGHTS = {"unreachable": MAX_FAILURES, "version": MAX_FAILURES, "overloaded": 0, "invalid": 0, "deadline": 0.25}


class InAir:
    """Samples that were sent over a link, and of which nobody knows whether the other end has received them.

    A network that stands still delivers everything at once afterwards, also what nobody waits for any more. So a sample
    counts until an answer to it comes, or to something that was sent after it: a connection keeps the order.
    """

    def __init__(self) -> None:
        self.count = 0
        self._lock = Lock()  # of the count: tokens are taken in any thread, answers come in the event loop
        self._turn = 0
        self._lost: list[tuple[int, int]] = []  # (turn, samples) whose answers are waited for no more

    def take(self, count: int) -> None:
        """So many more will be sent."""
        with self._lock:
            self.count += count

    def next_turn(self) -> int:
        """Note that something is sent now."""
        self._turn += 1
        return self._turn

    def answered(self, turn: int, count: int = 0) -> None:
        """The `count` samples of this turn have arrived, and all that was lost before."""
        with self._lock:
            self.count -= count + sum(lost for sent, lost in self._lost if sent < turn)
        self._lost = [(sent, lost) for sent, lost in self._lost if sent >= turn]

    def lost(self, turn: int, count: int) -> None:
        """Nobody waits for the answer to these any more, but they may still arrive."""
        self._lost.append((turn, count))


class LinkState:
    """It begins open, with nothing under way."""

    def __init__(self) -> None:
        self.in_air = InAir()
        self.problem = ""  # why the breaker is open; "": it is closed
        self.times_cut = 0
        self._failures = 0.0
        self._pause = FIRST_PAUSE

    @property
    def open(self) -> bool:
        """Whether requests may flow (the breaker is closed)."""
        return not self.problem

    def succeeded(self) -> None:
        """An answer came, and it was sound."""
        self._failures, self._pause = 0.0, FIRST_PAUSE

    def failed(self, reason: str, detail: str) -> bool:
        """Whether this failure was one too many, and the link is cut now."""
        weight = _WEIGHTS.get(reason, 1)
        self._failures += weight
        if not self.open or not weight or self._failures < MAX_FAILURES:
            return False
        self.problem = f"{reason}: {detail}"
        self.times_cut += 1
        return True

    def next_pause(self) -> float:
        """Seconds until the parent should be asked whether it is ready; while it is down, longer each time."""
        if self.open:
            return IDLE_PAUSE
        pause, self._pause = self._pause, min(2 * self._pause, LAST_PAUSE)
        return pause

    def mended(self) -> None:
        """The parent says that it is ready; one more failure cuts it again."""
        self.problem, self._failures = "", MAX_FAILURES - 1
