"""Mean and deviation over trainings that differ in their seed only."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over seeds; no deviation for a single seed."""

    mean: float
    std: float | None

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """The spread of one value or several."""
        return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)
