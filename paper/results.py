"""The store of results: what was trained at one scale, and what came out of it, without the weights.

    SCALE.jsonl            a line for each training: what it is, the digest of its system, its figures on test data,
                           what it took, and where they come from; and one for each measurement of gradients
    SCALE.curves.jsonl.gz  a line for each training: the records of its rounds, of all or of a hundred, spread evenly,
                           and what the weighting knew

Lines are sorted, so that two versions can be compared. A training has a result once it has a line in SCALE.jsonl, which
is written last. Whoever publishes holds a lock and replaces whole files: a kill leaves the old store or the new one.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from exitflow.config import decode, encode, parse_json, require
from exitflow.errors import ConfigError, RunError
from exitflow.files import LARGE_FILE, locked, read_file, write_atomically
from exitflow.runs.records import Profile, Record, Validation
from exitflow.runs.training_costs import TrainingCosts
from exitflow.system.system import System
from paper import tables
from paper.provenance import Provenance
from paper.tables import Job, Scale
from paper.training import Training

NUM_RECORDS = 100  # of a training that are kept at most, beside those that were validated
NUM_EXITS = 3  # of the paper's network, whose gradients its Table 3 is about
COLUMNS = ("exit_weights", "validation", "losses")  # of the curves
MADE_AGAIN = "; remove the line, and what it is about will be made again"
STORES = Path("paper/results")  # from the root of the repository


@dataclass(frozen=True)
class Answers:
    """How well a training answers test data; all numbers are fractions."""

    exit_accuracy: tuple[float, ...]  # of each exit on all samples
    accuracy: dict[str, float]  # of the whole system, for each serving setting
    served_accuracy: dict[str, tuple[float | None, ...]] = field(default_factory=dict)  # of each exit on what it serves

    def __post_init__(self) -> None:
        for key, found in (("exit_accuracy", self.exit_accuracy), ("accuracy", self.accuracy.values())):
            wrong = [value for value in found if not 0 <= value <= 1]
            require(not wrong, key, f"expected numbers from 0 to 1, got {wrong[:1]}")


@dataclass(frozen=True)
class TrainingResult:
    """A line of the store about a training."""

    training: Training
    scale: Scale
    system: str  # its digest
    answers: Answers
    own_answers: Answers | None = None  # if exits that answer together did not
    costs: TrainingCosts | None = None
    seconds: float | None = None
    provenance: Provenance = field(default_factory=Provenance)
    retired: str | None = None  # why nothing like it is trained any more

    @property
    def order(self) -> tuple[Any, ...]:
        """Of the lines."""
        return (0, self.training)


@dataclass(frozen=True)
class GradientVariance:
    """A line of the store about the gradients at each exit before training."""

    gradients_of: str  # a data set
    seed: int
    scale: Scale
    system: str
    variance: tuple[float, ...]
    provenance: Provenance = field(default_factory=Provenance)

    def __post_init__(self) -> None:
        known = len(self.variance) == NUM_EXITS and all(value >= 0 for value in self.variance)
        problem = f"expected {NUM_EXITS} numbers from 0 on, one for each exit, got {list(self.variance)}"
        require(known, "variance", problem)

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.gradients_of}, seed {self.seed}"

    @property
    def order(self) -> tuple[Any, ...]:
        """Of the lines: behind all trainings."""
        return (1, self.gradients_of, self.seed)


Line = TrainingResult | GradientVariance


@dataclass(frozen=True)
class Curves:
    """The records of a training, column by column, and what the weighting knew."""

    training: Training
    rounds: tuple[int, ...]
    exit_weights: tuple[tuple[float, ...], ...]
    validation: tuple[Validation | None, ...]
    losses: tuple[dict[str, float | None], ...]
    profile: Profile = field(default_factory=Profile)

    def __post_init__(self) -> None:
        lengths = {len(getattr(self, key)) for key in ("rounds", *COLUMNS)}
        require(len(lengths) == 1, "rounds", f"columns are of different lengths: {sorted(lengths)}")


@dataclass(frozen=True)
class Result:
    """A training in the store: as its exits answer, or by what each says by itself where they answer together."""

    line: TrainingResult
    results: Results = field(repr=False, compare=False)
    own_answers: bool = False

    @property
    def training(self) -> Training:
        """Which one it is."""
        return self.line.training

    @property
    def name(self) -> str:
        """For people."""
        return self.training.name

    @property
    def system(self) -> System:
        """What was trained."""
        return self.results.jobs[self.training].system

    @property
    def answers(self) -> Answers:
        """How well it answers."""
        found = self.line.own_answers if self.own_answers else self.line.answers
        if found is None:
            raise RunError(f"{self.where}: own_answers: the accuracies of exits by themselves are missing{MADE_AGAIN}")
        return found

    @property
    def where(self) -> str:
        """For an error."""
        return f"{self.results.path}: {self.name}"

    def accuracy(self, setting: str) -> float:
        """Of the whole system, served at that setting."""
        found = self.answers.accuracy
        if setting not in found:
            own = "own_answers: " if self.own_answers else ""
            raise RunError(f"{self.where}: {own}says nothing of the serving setting {setting}{MADE_AGAIN}")
        return found[setting]

    @property
    def exit_accuracy(self) -> list[float]:
        """Of each exit on all samples."""
        return list(self.answers.exit_accuracy)

    @property
    def costs(self) -> TrainingCosts:
        """What the training took."""
        if self.line.costs is None:
            raise RunError(f"{self.where}: does not say what the training took{MADE_AGAIN}")
        return self.line.costs

    @cached_property
    def records(self) -> list[Record]:
        """Of its rounds, in order, up to the last."""
        found = self.results.curves_of(self.training)
        last, rounds = (found.rounds or (0,))[-1], self.system.training.rounds
        if last != rounds:
            raise RunError(
                f"{self.results.curves}: {self.name}: expected records up to round {rounds}, got them up to {last}"
            )
        columns = zip(found.rounds, found.exit_weights, found.validation, found.losses, strict=True)
        return [
            Record(round, weights, losses=losses, validation=validation)
            for round, weights, validation, losses in columns
        ]

    @property
    def profile(self) -> Profile:
        """What the weighting knew."""
        return self.results.curves_of(self.training).profile


class Results:
    """The store in one file and its curves, as they are when they are first asked for."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def curves(self) -> Path:
        """The file of the curves."""
        return self.path.with_suffix(".curves.jsonl.gz")

    @cached_property
    def lines(self) -> dict[tuple[Any, ...], Line]:
        """All of the store, in order; none where there is no file."""
        return {line.order: line for line in _read_lines(self.path)}

    @cached_property
    def _trainings(self) -> dict[Training, TrainingResult]:
        return {line.training: line for line in self.lines.values() if isinstance(line, TrainingResult)}

    @cached_property
    def _curves(self) -> dict[Training, dict[str, Any]]:
        return {_training(columns): columns for columns in _read_curves(self.curves)}

    @cached_property
    def scale(self) -> Scale | None:
        """Of its first result."""
        return next((line.scale for line in self.lines.values()), None)

    @cached_property
    def jobs(self) -> dict[Training, Job]:
        """What tables ask for at this scale, for the seeds that have any result."""
        if self.scale is None:
            return {}
        found = tables.distinct_trainings(list(tables.TABLES.values()), self.seeds(), self.scale)
        return {job.training: job for job in found}

    def get(self, training: Training, *, own_answers: bool = False) -> Result | None:
        """The result of a training; None where there is none yet."""
        line = self._trainings.get(training)
        return Result(line, self, own_answers) if line else None

    def all(self) -> list[Result]:
        """Every training, in order."""
        return [Result(line, self) for line in self._trainings.values()]

    def seeds(self) -> tuple[int, ...]:
        """Those with any result."""
        found = {line.training.seed if isinstance(line, TrainingResult) else line.seed for line in self.lines.values()}
        return tuple(sorted(found))

    def provenances(self) -> list[Provenance]:
        """When, from which source and where each of the figures came about."""
        return [line.provenance for line in self.lines.values()]

    def gradient_variances(self) -> list[GradientVariance]:
        """All that was measured."""
        return [line for line in self.lines.values() if isinstance(line, GradientVariance)]

    def gradient_variance(self, dataset: str, seed: int) -> tuple[float, ...] | None:
        """What was measured of the gradients; None where nothing was."""
        found = (each for each in self.gradient_variances() if (each.gradients_of, each.seed) == (dataset, seed))
        return next((each.variance for each in found), None)

    def curves_of(self, training: Training) -> Curves:
        """The columns of a training's records."""
        found = self._curves.get(training)
        where = f"{self.curves}: {training.name}"
        advice = "restore it, or remove the training's line, and it will be trained again"
        if found is None:
            raise RunError(f"{where}: is missing; {advice}")
        try:
            return decode(Curves, found)
        except ConfigError as error:
            raise RunError(f"{where}: {error}; {advice}") from None


def curves_json(training: Training, records: Sequence[Record], profile: Profile) -> dict[str, Any]:
    """Of the records to keep, for `publish`."""
    kept = records_to_keep(records)
    losses = [{exit: loss and float(f"{loss:.6g}") for exit, loss in record.losses.items()} for record in kept]
    return encode(
        Curves(
            training,
            tuple(record.round for record in kept),
            tuple(record.exit_weights for record in kept),
            tuple(record.validation for record in kept),
            tuple(losses),
            profile,
        )
    )


def publish(path: Path, line: Line, curves: Mapping[str, Any] | None = None) -> None:
    """Add a line to the store, and its curves, in the place of any that it has of the same training."""
    with _changing(path):
        store = Results(path)
        if curves:
            columns = {**store._curves, _training(curves): curves}
            text = "".join(_to_json(columns[training]) for training in sorted(columns))
            write_atomically(store.curves, gzip.compress(text.encode(), mtime=0))
        lines = {**store.lines, line.order: line}
        write_atomically(path, "".join(_to_json(encode(lines[key])) for key in sorted(lines)).encode())


@contextmanager
def _changing(path: Path) -> Iterator[None]:
    """One process at a time."""
    with locked(path.with_name(f".{path.stem}.lock"), f"{path}: is being written", wait=True):
        yield


def _to_json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, allow_nan=False) + "\n"


def _read_lines(path: Path) -> Iterator[Line]:
    known: set[tuple[Any, ...]] = set()
    for number, text in enumerate(_read(path).splitlines(), start=1):
        try:
            value = parse_json(text)
            is_training = isinstance(value, dict) and "training" in value
            line: Line = decode(TrainingResult, value) if is_training else decode(GradientVariance, value)
            require(line.order not in known, "training", "is there already, in a line above")
        except (ConfigError, ValueError) as error:
            raise RunError(f"{path}, line {number}: {error}{MADE_AGAIN}") from None
        known.add(line.order)
        yield line


def _read_curves(path: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = gzip.decompress(data).splitlines() if (data := _read(path)) else []
        for line in lines:
            yield cast(dict[str, Any], parse_json(line))
    except (EOFError, gzip.BadGzipFile, zlib.error, ValueError) as error:
        raise RunError(f"{path}: is damaged: {error}; restore it") from None


def _training(columns: Mapping[str, Any]) -> Training:
    """Whose records they are."""
    try:
        return decode(Training, columns["training"])
    except (ConfigError, KeyError, TypeError):
        raise RunError(f"a line of curves says not of which training they are: {str(columns)[:80]}") from None


def _read(path: Path) -> bytes:
    """Nothing, where there is no file."""
    try:
        return read_file(path, LARGE_FILE)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from None


def records_to_keep(records: Sequence[Record]) -> list[Record]:
    """All where they are few; the last is always among them."""
    step = max(1, -(-len(records) // NUM_RECORDS))
    return [each for each in records if (len(records) - each.round) % step == 0 or each.validation]
