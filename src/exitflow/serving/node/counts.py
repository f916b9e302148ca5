"""What a node has seen since it started: plain numbers, cheap to count, read by metrics, statistics and `load`."""

from __future__ import annotations

import bisect
from collections import Counter
from dataclasses import dataclass, field

BOUNDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)  # seconds


@dataclass
class Histogram:
    """How many values lie at or below each of `bounds`, and beyond."""

    bounds: tuple[float, ...] = BOUNDS
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float, count: int = 1) -> None:
        """`count` values of this size."""
        self.counts[bisect.bisect_left(self.bounds, value)] += count
        self.total += value * count


@dataclass
class NodeCounts:
    """In samples, unless it says requests; seconds are sums."""

    arrived: int = 0  # from clients, also what was refused
    from_children: Counter[str] = field(default_factory=Counter)
    served: int = 0  # answered by this node's own exit
    fallbacks: Counter[str] = field(default_factory=Counter)  # served here because a parent failed: reason
    over_limit: Counter[str] = field(default_factory=Counter)  # refused: a child sent more than its link's limit
    out_of_tokens: int = 0  # served here because the link was full
    rejected: int = 0  # requests refused because the queue was full
    invalid: int = 0  # requests that made no sense
    expired: int = 0  # requests whose deadline passed before an answer
    abandoned: int = 0  # calls whose message did not come, or whose answer was not taken
    answered: Counter[int] = field(default_factory=Counter)  # requests by the deepest exit that answered
    refused: Counter[str] = field(default_factory=Counter)  # calls of any kind by the reason
    batches: Counter[int] = field(default_factory=Counter)  # size -> how many
    queue_seconds: float = 0.0
    compute_seconds: float = 0.0
    request_seconds: Histogram = field(default_factory=Histogram)
    audited: int = 0
    agreed: int = 0
    last_inference_ms: int = 0  # wall clock
    failed: int = 0  # requests on which the engine failed

    @property
    def received(self) -> int:
        """How many requests have come, from clients and children."""
        return self.arrived + self.from_children.total()

    @property
    def requests(self) -> int:
        """How many requests were answered."""
        return self.answered.total()
