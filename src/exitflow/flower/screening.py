"""Which updates of nodes elsewhere are fit to be believed.

A node may be damaged, out of date, or in a stranger's hands. What it sends must answer the very task that it got,
hold the covered tensors by name, shape and type and nothing else, and not be far longer than the updates of others.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from torch.nn.utils import get_total_norm

from exitflow.federated.types import Missing, Update
from exitflow.tensors import Tensors

ROUNDS_REMEMBERED = 10  # whose norms say what is usual


def mismatch(found: Tensors, expected: Tensors) -> str | None:
    """How tensors that came differ from those that should have come, in name, shape or type; None: not at all."""
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            return f"tensor {name!r} is missing"
        if name not in expected:
            return f"tensor {name!r} was not asked for"
        came, asked = found[name], expected[name]
        if came.shape != asked.shape:
            return f"tensor {name!r} has shape {list(came.shape)} instead of {list(asked.shape)}"
        if came.dtype != asked.dtype:
            return f"tensor {name!r} is {came.dtype} instead of {asked.dtype}"
    return None


@dataclass
class SizeScreen:
    """Refuses updates whose elements are, in the root mean square, `limit` times as large as is usual.

    What is usual is the median over all nodes, and over the last rounds, so that a minority cannot shift it. The
    first round's updates are held back until all are there, and compared with one another.
    """

    limit: float
    _usual: deque[_Sizes] = field(default_factory=lambda: deque(maxlen=ROUNDS_REMEMBERED))

    def __call__(self, updates: Iterable[Update | Missing]) -> Iterator[Update | Missing]:
        """The same in the same order, with the updates that are too large made missing."""
        measured: Iterable[tuple[Update | Missing, _Sizes | None]] = (
            (update, _Sizes.of(update) if isinstance(update, Update) else None) for update in updates
        )
        usual = _median(self._usual)
        if usual is None:
            measured = list(measured)
            usual = _median([sizes for _, sizes in measured if sizes and sizes.finite])
        accepted = []
        for update, sizes in measured:
            if isinstance(update, Missing) or sizes is None or usual is None or not sizes.finite:
                yield update  # for what is not finite the loop has a rule of its own
            elif reason := sizes.excess(usual, self.limit):
                yield Missing(update.task, reason, True, update.wire_bytes, update.seconds)
            else:
                accepted.append(sizes)
                yield update
        if (median := _median(accepted)) is not None:
            self._usual.append(median)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Root mean squares of the elements of an update's two parts."""

    delta: float
    buffers: float

    @staticmethod
    def of(update: Update) -> _Sizes:
        return _Sizes(_root_mean_square(update.delta), _root_mean_square(update.buffers))

    @property
    def finite(self) -> bool:
        return math.isfinite(self.delta) and math.isfinite(self.buffers)

    def excess(self, usual: _Sizes, limit: float) -> str | None:
        """Which part is too large, if one is."""
        for part in ("delta", "buffers"):
            own, others = getattr(self, part), getattr(usual, part)
            if own > limit * others:
                return (
                    f"its {part} are {own / others:.3g} times as large as is usual" if others else f"{part} are not 0"
                )
        return None


def _median(sizes: Collection[_Sizes]) -> _Sizes | None:
    if not sizes:
        return None
    return _Sizes(statistics.median(each.delta for each in sizes), statistics.median(each.buffers for each in sizes))


def _root_mean_square(tensors: Tensors) -> float:
    count = sum(tensor.numel() for tensor in tensors.values())
    return float(get_total_norm([tensor.double() for tensor in tensors.values()])) / math.sqrt(count) if count else 0.0
