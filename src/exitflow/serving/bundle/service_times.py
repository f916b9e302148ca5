"""How long the segments of a bundle take on this machine: the `service_ms` of a system file, measured."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from exitflow.serving.bundle.bundle import Bundle
from exitflow.serving.bundle.engine import Array, Engine

WARM_UP = 10  # runs that do not count


@dataclass(frozen=True)
class ServiceTime:
    """Milliseconds of one request, the median and the 99th percentile."""

    exit: int
    from_input: tuple[float, float]  # all segments up to the exit, as at a device, or where inputs are forwarded
    from_features: tuple[float, float] | None  # the exit's own segment; None for the first


def service_times(bundle: Bundle, *, threads: int = 1, repeats: int = 200) -> list[ServiceTime]:
    """Measure every exit, with one of the bundle's own samples."""
    sample = bundle.samples().inputs[:1]
    found = []
    features = answer = None  # of the exit before
    for exit in range(1, len(bundle.segments) + 1):
        engine = Engine(bundle.segments[:exit], blends=bundle.manifest.blends, threads=threads)
        own = None
        if features is not None and answer is not None:
            own = _measure(engine, {exit - 1: features}, {exit - 1: answer}, repeats)
        found.append(ServiceTime(exit, _measure(engine, {0: sample}, MappingProxyType({}), repeats), own))
        features, answer = engine.run({0: sample})
    return found


def _measure(
    engine: Engine, parts: Mapping[int, Array], before: Mapping[int, Array], repeats: int
) -> tuple[float, float]:
    seconds = []
    for _ in range(WARM_UP + repeats):
        started = time.perf_counter()
        engine.run(parts, before)
        seconds.append(time.perf_counter() - started)
    median, late = np.percentile(seconds[WARM_UP:], (50, 99)).tolist()
    return 1e3 * median, 1e3 * late
