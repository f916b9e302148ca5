"""Plans for every combination of some values: which link is worth paying for, how many edge servers are enough."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from exitflow.config import Changes, parse_assignment, parse_changes, require
from exitflow.errors import ConfigError
from exitflow.evaluation.outputs import ExitOutputs
from exitflow.planning.prospects import Prospect, best_prospect
from exitflow.system.system import System, load_system, read_system

MAX_POINTS = 10_000
RANGE_POINTS = 10  # of a range between numbers that are not both whole, or are far apart
MAX_WHOLE = 20  # whole numbers of a range that are all taken


@dataclass(frozen=True)
class Vary:
    """A key of the system file, and the values that it takes in turn."""

    key: str  # dotted, such as tiers.edge.count
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Point:
    """One combination, and what comes of it."""

    values: tuple[Any, ...]  # of each key
    prospect: Prospect | None
    problem: str = ""  # why there is no prospect
    on_front: bool = False  # no other point is better in one thing and as good in all others


@dataclass(frozen=True)
class WhatIf:
    """All points, in the order in which the keys were given."""

    name: str
    keys: tuple[str, ...]
    points: tuple[Point, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values, as `exitflow whatif --json` prints them."""
        points = [
            {
                **dict(zip(self.keys, point.values, strict=True)),
                **(point.prospect.to_json() if point.prospect else {"problem": point.problem}),
                "on_front": point.on_front,
            }
            for point in self.points
        ]
        return {"name": self.name, "keys": list(self.keys), "points": points}


def parse_vary(text: str) -> Vary:
    """The keys and values of a text such as `tiers.edge.count=1,2,4` or `tiers.device.max_transfer_rate=1..20`."""
    key, equals, values = text.partition("=")
    if not equals or not key.strip() or not values.strip():
        problem = f"expected KEY=A,B,C or KEY=FROM..TO, such as tiers.edge.count=1,2,4, got {text!r}"
        raise ConfigError(problem, key="--vary")
    first, dots, last = values.partition("..")
    if dots:
        return Vary(key.strip(), _range(first, last, text))
    return Vary(key.strip(), tuple(parse_assignment(f"{key}={value}")[1] for value in values.split(",")))


def _range(first: str, last: str, text: str) -> tuple[float, ...]:
    try:
        start, stop = float(first), float(last)
    except ValueError:
        start = stop = math.nan
    require(-math.inf < start < stop < math.inf, "--vary", f"expected two numbers, the smaller first, got {text!r}")
    if start.is_integer() and stop.is_integer():
        if stop - start < MAX_WHOLE:
            return tuple(range(int(start), int(stop) + 1))
        return tuple(dict.fromkeys(round(value) for value in np.linspace(start, stop, RANGE_POINTS)))
    return tuple(np.linspace(start, stop, RANGE_POINTS).tolist())


def what_if(
    source: str,
    varies: Sequence[Vary],
    *,
    overrides: Changes = (),
    outputs_for: Callable[[System], ExitOutputs | None] = lambda system: None,
    progress: Callable[[float], None] = lambda share: None,
) -> WhatIf:
    """The prospects of the system in `source` at every combination of the values; P1 where there are outputs."""
    keys = [vary.key for vary in varies]
    require(len(set(keys)) == len(keys), "--vary", "names a key twice")
    number = math.prod(len(vary.values) for vary in varies)
    require(number <= MAX_POINTS, "--vary", f"makes {number:,} combinations, at most {MAX_POINTS:,} are explored")
    overrides = parse_changes(overrides)
    system = load_system(source, overrides)
    points = []
    for values in itertools.product(*(vary.values for vary in varies)):
        points.append(_point(source, overrides, keys, values, outputs_for))
        progress(len(points) / number)
    if all(point.prospect is None for point in points):
        raise ConfigError(f"none of the {number} combinations can be: {points[0].problem}", key="--vary")
    return WhatIf(system.name, tuple(keys), _with_front(points))


def _point(
    source: str,
    overrides: Mapping[str, Any],
    keys: Sequence[str],
    values: tuple[Any, ...],
    outputs_for: Callable[[System], ExitOutputs | None],
) -> Point:
    changes: Mapping[str, Any] = dict(zip(keys, values, strict=True))
    try:
        system = read_system(source, {**overrides, **changes})
        found = best_prospect(system.topology, outputs_for(system))
    except ConfigError as error:
        return Point(values, None, str(error))
    if found.timing and found.timing.latency is None:
        where, busy = found.timing.bottleneck
        return Point(values, None, f"{where} would be busy {100 * busy:.0f} % of the time")
    return Point(values, found)


def _with_front(points: Sequence[Point]) -> tuple[Point, ...]:
    merits = np.array([_merits(point.prospect) for point in points if point.prospect])
    beaten = (((merits >= own).all(axis=1) & (merits > own).any(axis=1)).any() for own in merits)
    return tuple(
        Point(point.values, point.prospect, point.problem, not next(beaten)) if point.prospect else point
        for point in points
    )


def _merits(found: Prospect) -> tuple[float, ...]:
    """Larger is better; what is not known is the same for all."""
    right = found.depth if found.accuracy is None else found.accuracy
    return (right, -(found.value("p99") or 0.0), -(found.value("cost") or 0.0))
