"""What a training writes about itself: a record of every round, and what the weighting knew. Both are JSON.

They are decoded once, here, into frozen dataclasses; what does not fit them is refused. A record is a line of
`rounds.jsonl`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exitflow.config import decode, encode, parse_json, require
from exitflow.errors import ConfigError, RunError
from exitflow.files import LARGE_FILE, read_file

Matrix = tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True)
class Validation:
    """How well the global model answered validation data; an exit that serves nothing has no accuracy as served."""

    accuracy: float  # of the system as served
    exit_accuracy: tuple[float | None, ...] = ()  # of each exit on all samples
    served_accuracy: tuple[float | None, ...] = ()  # of each exit on what it serves
    metrics: dict[str, float] = field(default_factory=dict)  # of the user's own

    def __post_init__(self) -> None:
        _require_finite("accuracy", (self.accuracy, *self.exit_accuracy, *self.served_accuracy))


@dataclass(frozen=True)
class WireBytes:
    """What was really sent to a node, and by it."""

    down: int
    up: int


@dataclass(frozen=True)
class Record:
    """A round, as it went. Fields of which there is nothing to tell are left out of the file."""

    round: int  # from 1
    exit_weights: tuple[float, ...]  # Lambda-tilde, of each exit
    link_bytes: dict[str, int] = field(default_factory=dict)  # child->parent: in each direction, before compression
    losses: dict[str, float | None] = field(default_factory=dict)  # exit -> mean loss of the nodes that trained it
    validation: Validation | None = None  # every so many rounds, and after the last
    num_asked: int | None = None  # nodes that had a task; None in records that are older than that count
    num_tasks: int | None = None  # nodes whose update counted
    dropped: tuple[str, ...] = ()  # nodes whose update was not finite
    missing: dict[str, str] = field(default_factory=dict)  # node -> why no update of it came
    refused: dict[str, str] = field(default_factory=dict)  # node -> why its update was not believed
    state_lost: tuple[str, ...] = ()  # nodes that have lost their momentum
    lost_weight: tuple[float, ...] = ()  # of each exit, the share of its weight that did not arrive
    attendance: dict[str, bool] = field(default_factory=dict)  # node that was asked -> whether it answered
    wire_bytes: dict[str, WireBytes] = field(default_factory=dict)  # node -> what was really sent, over Flower
    privacy: dict[str, float] | None = None  # epsilons and delta so far, where updates get noise
    multiply_adds: int | None = None  # of the nodes' forward passes; None in records that are older than that count
    seconds: float | None = None

    def __post_init__(self) -> None:
        numbers = (*self.exit_weights, *self.losses.values(), *self.lost_weight, self.seconds)
        _require_finite("exit_weights", numbers)

    def figures(self) -> Iterator[tuple[str, float]]:
        """Its figures by name, as a tracker shows them; what was not measured is left out."""
        yield from ((f"loss/exit {exit}", loss) for exit, loss in self.losses.items() if loss is not None)
        yield from ((f"weight/exit {exit}", weight) for exit, weight in enumerate(self.exit_weights, start=1))
        if self.seconds is not None:
            yield "seconds", self.seconds
        if validation := self.validation:
            yield "validation/accuracy as served", validation.accuracy
            for exit, accuracy in enumerate(validation.exit_accuracy, start=1):
                if accuracy is not None:
                    yield f"validation/exit {exit}", accuracy
            yield from ((f"validation/{name}", value) for name, value in validation.metrics.items())

    def to_json(self) -> bytes:
        """Its line of the file, without the end."""
        told = {name: value for name, value in encode(self).items() if value not in ([], {})}
        return json.dumps(told, allow_nan=False).encode()


@dataclass(frozen=True)
class Profile:
    """What the weighting knew of exits and nodes before the first round. Nothing of it where nothing was written."""

    num_steps: int | None = None  # J
    serve_share: tuple[float, ...] = ()  # Lambda
    multiply_adds: tuple[int, ...] = ()  # of each exit, for one input
    num_parameters: tuple[int, ...] = ()  # of each exit
    exit_samples: tuple[float, ...] = ()  # |S_{e,p}|
    node_samples: dict[str, int] = field(default_factory=dict)  # |S_i|
    gradient_variance: tuple[float, ...] | None = None  # v, where the weighting needs it, as what follows
    gradients: dict[str, Matrix] | None = None  # figures by node and exit
    error_terms: dict[str, float] | None = None  # what the weights cost by the bound


def read_profile(path: Path) -> Profile:
    """The profile in a file; an empty one where there is no file."""
    try:
        return decode(Profile, parse_json(read_file(path, LARGE_FILE)))
    except FileNotFoundError:
        return Profile()
    except (OSError, ValueError, ConfigError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        advice = "restore it; a run that goes on can also do without, and measures again"
        raise RunError(f"{path}: is damaged, or was not written by exitflow: {reason}; {advice}") from None


def read_records(path: Path) -> list[Record]:
    """All whole records; a last line that a kill has cut off does not count, and no file holds none."""
    return [record for _, record in read_lines(path)]


def read_lines(path: Path) -> list[tuple[bytes, Record]]:
    """The same, each beside the line that it is."""
    try:
        lines = read_file(path, LARGE_FILE).splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from None
    whole = [(number, line) for number, line in enumerate(lines, start=1) if line.endswith(b"\n")]
    return [(line, _record(path, number, line)) for number, line in whole]


def _record(path: Path, number: int, line: bytes) -> Record:
    try:
        return decode(Record, parse_json(line))
    except (ValueError, ConfigError) as error:
        raise RunError(f"{path}: line {number} is no record of a round: {error}") from None


def _require_finite(key: str, numbers: Iterable[Any]) -> None:
    require(all(each is None or math.isfinite(each) for each in numbers), key, "expected finite numbers")
