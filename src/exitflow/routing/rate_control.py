"""What a node forwards, so that no link ever carries more than its limit.

Two parts. The threshold follows the traffic: it is the quantile of the recent confidences at which just as many
requests fall below it as the links can take, and it leans towards keeping the buckets half full. Where recent requests
are a bad guide, after a spell of hard ones or a crowd that has gone, the links would idle: so tokens that overflow
unused raise the share to be forwarded, and requests that find none lower it; what goes up only for that leaves half of
the tokens to the harder. Behind the threshold every link has a token bucket, which is never exceeded: out of tokens, a
request is answered locally, the surest first. What is under way holds its token, so that the limit is kept where it
matters, at the receiver, also when the network stands still for a while.

Times are seconds of a monotonic clock, rates are requests/s, and a request is one sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from exitflow.routing.confidence import serves
from exitflow.routing.link_state import InAir
from exitflow.topology.graph import Link

FloatArray = npt.NDArray[np.float64]

ARRIVAL_MEMORY = 5.0  # seconds over which the arrival rate is averaged
WINDOW = 1000  # recent confidences
RETUNE_EVERY = 8  # requests
FEEDBACK = 0.5  # 1/s: how fast a bucket that is too full or too empty is led back to half
URGE = 0.5  # doublings of the share to be forwarded, for a burst of tokens that overflowed
LEFT_TO_HARDER = 0.5  # part of the burst that is not for those who are forwarded only so that it is used
JITTER = 0.05  # seconds by which requests may bunch on their way without the receiver seeing more than was allowed


class TokenBucket:
    """At most `rate * t + burst` tokens in any t seconds. It starts empty, so that a restart grants nothing.

    It never holds more than `burst` less what is in the air: all of that may arrive at once, at any moment.
    """

    def __init__(self, rate: float, burst: float, now: float, in_air: InAir | None = None) -> None:
        self.rate = rate
        self._in_air = in_air or InAir()
        self.burst = max(burst - rate * JITTER, 1.0) if rate > 0 else 0.0
        self.overflowed = 0.0  # tokens that came while it was full
        self._tokens = 0.0
        self._updated = now

    def _earned(self, now: float) -> float:
        return self._tokens + max(now - self._updated, 0.0) * self.rate

    def look(self, now: float) -> float:
        """How many there would be, were it asked for any; nothing changes."""
        return min(self._earned(now), self._room)

    @property
    def _room(self) -> float:
        return max(self.burst - self._in_air.count, 0.0)

    def tokens(self, now: float) -> float:
        """How many tokens the bucket has now."""
        earned = self._earned(now)
        self._tokens = min(earned, self._room)
        self.overflowed += max(earned - self.burst, 0.0)
        self._updated = max(now, self._updated)
        return self._tokens

    def take(self, now: float, count: int = 1) -> bool:
        """So many of them, if there are."""
        if self.tokens(now) < count:
            return False
        self._tokens -= count
        return True


class ArrivalRate:
    """An exponential average, begun at what was planned."""

    def __init__(self, planned: float, now: float) -> None:
        self._value = planned
        self._updated = now

    def value(self, now: float) -> float:
        """The rate of late, in requests/s."""
        return self._value * math.exp(-max(now - self._updated, 0.0) / ARRIVAL_MEMORY)

    def add(self, count: int, now: float) -> None:
        """Note that `count` requests have come."""
        self._value = self.value(now) + count / ARRIVAL_MEMORY
        self._updated = max(now, self._updated)


class Recent:
    """A ring of the last confidences, begun with those of the calibration."""

    def __init__(self, begin: Sequence[float]) -> None:
        self._ring = np.zeros(WINDOW)
        self._count = 0
        if begin:
            self.add(np.asarray(begin, dtype=np.float64))

    def add(self, values: FloatArray) -> None:
        """The newest overwrite the oldest."""
        if len(values) == 1:
            self._ring[self._count % WINDOW] = values[0]
            self._count += 1
            return
        places = (self._count + np.arange(len(values))) % WINDOW
        self._ring[places] = values
        self._count += len(values)

    def quantile(self, fraction: float) -> float:
        """Below it lies `fraction` of them."""
        filled = self._ring[: min(self._count, WINDOW)]
        if fraction >= 1 or not len(filled):
            return math.inf
        if fraction <= 0:
            return -math.inf
        place = min(int(fraction * len(filled)), len(filled) - 1)
        return float(np.partition(filled, place)[place])


class Calibration(Protocol):
    """What a node should expect to see, and where to cut it."""

    @property
    def confidences(self) -> Sequence[float]:
        """The confidences of what a node receives, as on validation data."""

    @property
    def cut(self) -> float:
        """It answers from this confidence up."""


class ForwardControl:
    """The threshold of one node and the budgets of its links."""

    def __init__(
        self,
        links: Sequence[Link],
        calibration: Calibration,
        *,
        planned_rate: float,
        burst_seconds: float,
        now: float,
        limited: bool = True,
        in_air: Mapping[str, InAir] | None = None,
    ) -> None:
        """Without `limited`, the calibrated threshold alone decides, and no link is protected.

        `in_air`, by parent, is kept by whoever sends; without it, what is sent has arrived.
        """
        self._in_air = in_air or {}
        limits = {link.name: link.max_transfer_rate if limited else None for link in links}
        self._buckets = {
            name: None
            if limit is None
            else TokenBucket(limit, max(limit * burst_seconds, 1.0), now, self._in_air.get(name))
            for name, limit in limits.items()
        }
        self._adapts = limited
        self._arrivals = ArrivalRate(planned_rate, now)
        self._recent = Recent(calibration.confidences)
        self._since_tuned = 0
        self._refused = 0  # since then, for want of tokens
        self._urge = 0.0  # doublings of the share to be forwarded
        self._turn = 0
        self.threshold = calibration.cut if links else -math.inf
        self._hard = self.threshold  # what the recent confidences alone would have it be

    def arrival_rate(self, now: float) -> float:
        """The rate of late at which requests arrive, in requests/s."""
        return self._arrivals.value(now)

    def tokens(self, now: float) -> Mapping[str, float | None]:
        """How many tokens each link has; None where it has no limit."""
        return {name: bucket.look(now) if bucket else None for name, bucket in self._buckets.items()}

    @property
    def bursts(self) -> Mapping[str, float | None]:
        """The most that each link may carry at once; None where it has no limit."""
        return {name: bucket.burst if bucket else None for name, bucket in self._buckets.items()}

    def hardest_first(self, confidences: FloatArray, open_parents: Sequence[str], now: float) -> Sequence[int]:
        """Learn from a batch, and say which of its samples the threshold does not let the node answer."""
        self._arrivals.add(len(confidences), now)
        if not self._buckets:
            return ()
        if self._adapts:
            self._recent.add(confidences)
            self._since_tuned += len(confidences)
            if self._since_tuned >= RETUNE_EVERY:
                self._tune(open_parents, now)
                self._since_tuned = self._refused = 0
        return _hardest_first(confidences, self.threshold)

    def take_for(self, confidence: float, open_parents: Sequence[str], now: float) -> str | None:
        """A parent to ask about a sample of this confidence, its token taken; None where no link has room."""
        parent = self.reserve(open_parents, now, spare=LEFT_TO_HARDER if confidence >= self._hard else 0.0)
        self._refused += parent is None
        return parent

    def reserve(self, candidates: Sequence[str], now: float, *, count: int = 1, spare: float = 0.0) -> str | None:
        """A parent with room for `count` more, now taken; `spare` is the part of the burst that must be left."""
        name = self._with_room(candidates, now, count, spare)
        if name is not None and name in self._in_air:
            self._in_air[name].take(count)
        return name

    def _with_room(self, candidates: Sequence[str], now: float, count: int, spare: float) -> str | None:
        unlimited = [name for name in candidates if self._buckets[name] is None]
        if unlimited:
            self._turn += 1
            return unlimited[self._turn % len(unlimited)]
        buckets = [(name, bucket) for name in candidates if (bucket := self._buckets[name]) and bucket.rate > 0]
        able = [entry for entry in buckets if entry[1].tokens(now) >= max(count, spare * entry[1].burst)]
        if not able:
            return None
        name, bucket = max(able, key=lambda entry: entry[1].tokens(now) / entry[1].rate)
        bucket.take(now, count)
        return name

    def _tune(self, open_parents: Sequence[str], now: float) -> None:
        buckets = [bucket for name in open_parents if (bucket := self._buckets[name])]
        if len(buckets) < len(open_parents):
            self.threshold = self._hard = math.inf
            return
        target = sum(bucket.rate + FEEDBACK * (bucket.tokens(now) - bucket.burst / 2) for bucket in buckets)
        rate = self._arrivals.value(now)
        share = target / rate if rate > 0 else 1.0
        self._learn(buckets, share, now)
        self._hard = self._recent.quantile(share)
        self.threshold = self._recent.quantile(share * 2**self._urge) if self._urge else self._hard

    def _learn(self, buckets: Sequence[TokenBucket], share: float, now: float) -> None:
        """From what went wrong since the last time; a token counts as missed only if a request could have taken it."""
        for bucket in filter(None, self._buckets.values()):
            bucket.tokens(now)  # of parents that are cut off too: nobody missed theirs
        missed = min(sum(bucket.overflowed for bucket in buckets), self._since_tuned)
        for bucket in filter(None, self._buckets.values()):
            bucket.overflowed = 0.0
        burst = sum(bucket.burst for bucket in buckets)
        if burst:
            most = -math.log2(share) if 0 < share < 1 else 0.0  # then all are forwarded
            self._urge = min(max(self._urge + URGE * (missed - self._refused) / burst, 0.0), most)


def _hardest_first(confidences: FloatArray, threshold: float) -> Sequence[Any]:
    """Rows that the threshold does not let the node answer."""
    if len(confidences) == 1:
        return () if confidences[0] >= threshold else (0,)
    rows = np.flatnonzero(~serves(confidences, threshold))
    return rows[np.argsort(confidences[rows], kind="stable")].tolist()  # type: ignore[no-any-return]
