"""When requests arrive, and which: Poisson at every device, in the shape of a trace, with a drift half-way.

A trace is a table of bins of equal length: when each begins, in seconds, and how many requests came in it. It gives the
shape over time; the height is the plan's: over the whole duration a device gets as many requests as its rate says.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from exitflow.config import require
from exitflow.errors import ConfigError, MissingExtraError
from exitflow.files import SMALL_FILE, read_file
from exitflow.topology.graph import Node, Topology

FloatArray = npt.NDArray[np.float64]

DriftKind = Literal["difficulty", "traffic", "burst"]
DRIFTS = ("difficulty", "traffic", "burst")
MAX_BINS = 100_000
AT_ONCE = 512  # arrivals of a device that are drawn together
EVEN = 0.01  # of a bin's length, by which it may differ from the others


@dataclass(frozen=True)
class Trace:
    """How the rate of requests goes up and down."""

    shape: tuple[float, ...]  # of each bin, beside the mean, which is 1

    @staticmethod
    def of(times: Sequence[float], requests: Sequence[float]) -> Trace:
        """From when bins begin and how many requests came in them, or a ConfigError."""
        moments, counts = np.asarray(times, dtype=np.float64), np.asarray(requests, dtype=np.float64)
        require(2 <= len(moments) <= MAX_BINS, "", f"needs 2 to {MAX_BINS:,} bins, got {len(moments):,}")
        require(bool(np.isfinite(moments).all()), "seconds", "holds what is no number")
        steps = np.diff(moments)
        back = np.flatnonzero(steps <= 0)
        require(not len(back), "seconds", f"time goes back or stands still after {moments[back[:1]].tolist()}")
        uneven = np.flatnonzero(np.abs(steps - np.median(steps)) > EVEN * np.median(steps))
        if len(uneven):
            where = f"{moments[uneven[0]]:g} and {moments[uneven[0] + 1]:g}"
            problem = f"bins must be equally long, {np.median(steps):g} here: there is a gap between {where}"
            raise ConfigError(problem, key="seconds")
        valid = bool(np.isfinite(counts).all() and (counts >= 0).all())
        require(valid, "requests", "must be numbers from 0 up in every bin")
        require(bool(counts.sum() > 0), "requests", "are 0 in every bin")
        return Trace(tuple((counts / counts.mean()).tolist()))


def load_trace(path: str) -> Trace:
    """From a CSV or Parquet file with the columns `seconds` and `requests`."""
    try:
        columns = _parquet(Path(path)) if path.endswith(".parquet") else _csv(read_file(Path(path), SMALL_FILE))
        return Trace.of(*columns)
    except ConfigError as error:
        raise error.within(source=path) from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", source=path) from None


def _csv(data: bytes) -> tuple[list[float], list[float]]:
    try:
        rows = list(csv.DictReader(io.StringIO(data.decode("utf-8-sig"))))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"is no CSV file: {error}") from None
    if not rows or not {"seconds", "requests"} <= set(rows[0]):
        raise ConfigError("needs a header with the columns seconds and requests, and rows below it")
    columns: tuple[list[float], list[float]] = ([], [])
    for line, row in enumerate(rows, start=2):
        for key, values in zip(("seconds", "requests"), columns, strict=True):
            try:
                values.append(float(row[key]))
            except (TypeError, ValueError):
                raise ConfigError(f"line {line} holds no number: {row[key]!r:.50}", key=key) from None
    return columns


def _parquet(path: Path) -> tuple[list[float], list[float]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise MissingExtraError(str(error.name), "data") from None
    try:
        table = pyarrow.parquet.read_table(io.BytesIO(read_file(path, SMALL_FILE)), columns=["seconds", "requests"])
        return table["seconds"].to_pylist(), table["requests"].to_pylist()
    except (pyarrow.ArrowException, KeyError):
        raise ConfigError("is no Parquet file with the columns seconds and requests") from None


@dataclass(frozen=True)
class Workload:
    """All requests of some time; the same for the same seed."""

    topology: Topology  # whose arrival rates are the mean ones
    ease: FloatArray  # (N,) of each sample, by which a drift of difficulty takes the harder half
    duration: float  # seconds
    seed: int = 0
    drift: DriftKind | None = None
    trace: Trace | None = None

    @cached_property
    def devices(self) -> tuple[Node, ...]:
        """The nodes at which requests arrive."""
        return tuple(node for node in self.topology.nodes if node.arrival_rate > 0)

    @cached_property
    def hard(self) -> npt.NDArray[np.intp]:
        """The harder half of the samples."""
        return np.argsort(self.ease)[: max(len(self.ease) // 2, 1)]

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {node.name: number for number, node in enumerate(self.devices)}

    def factor(self, device: str, elapsed: FloatArray) -> FloatArray:
        """By how much the arrival rate of a device differs from its mean, at each moment."""
        late = elapsed > self.duration / 2
        factor = np.ones(len(elapsed))
        if self.drift == "traffic":
            busy = (len(self.devices) + 1) // 2
            factor[late] = len(self.devices) / busy if self._numbers[device] < busy else 0.0
        elif self.drift == "burst":
            factor[late] = np.where(elapsed[late] % 1 < 0.5, 2.0, 0.0)
        if self.trace:
            shape = np.asarray(self.trace.shape)
            bins = (elapsed / self.duration * len(shape)).astype(np.intp)
            factor *= shape[bins.clip(max=len(shape) - 1)]
        return factor

    @property
    def most(self) -> float:
        """An upper bound of all factors."""
        return (1.0 if self.drift in (None, "difficulty") else 2.0) * (max(self.trace.shape) if self.trace else 1.0)

    def rows(self, elapsed: FloatArray, rng: np.random.Generator) -> npt.NDArray[np.intp]:
        """A sample for each moment."""
        rows = rng.integers(len(self.ease), size=len(elapsed))
        if self.drift == "difficulty":
            late = elapsed > self.duration / 2
            rows[late] = rng.choice(self.hard, size=int(late.sum()))
        return rows

    def arrivals(self, device: Node) -> Iterator[tuple[float, int]]:
        """When a request arrives at `device`, and which sample it is: thinned from the highest rate."""
        rng = np.random.default_rng([self.seed, self._numbers[device.name]])
        rate, begin = device.arrival_rate * self.most, 0.0
        while begin < self.duration:
            end = min(begin + AT_ONCE / rate, self.duration)
            moments = np.sort(rng.uniform(begin, end, rng.poisson(rate * (end - begin))))
            kept = moments[rng.random(len(moments)) * self.most < self.factor(device.name, moments)]
            yield from zip(kept.tolist(), self.rows(kept, rng).tolist(), strict=True)
            begin = end


def enlarged(node: Node, factor: int) -> Node:
    """A node that stands above so many times more devices: its limits, bandwidths and cores in proportion."""
    links = tuple(
        replace(
            link,
            max_transfer_rate=None if link.max_transfer_rate is None else factor * link.max_transfer_rate,
            bandwidth_mbps=None if link.bandwidth_mbps is None else factor * link.bandwidth_mbps,
        )
        for link in node.parents
    )
    return replace(node, parents=links, cores=factor * (node.cores or 1) if node.service_ms else node.cores)
