"""What is drawn as one line: the trainings of one kind, one for each seed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from exitflow.federated.training_spec import GIVEN
from exitflow.federated.weighting import WEIGHTINGS
from exitflow.runs.methods import METHODS
from exitflow.runs.records import Profile, Record
from exitflow.runs.spread import Spread
from exitflow.system.system import System, layers


class Training(Protocol):
    """What has to be known of a training, wherever it is kept, to draw it."""

    @property
    def name(self) -> str:
        """What a page calls the training."""

    @property
    def system(self) -> System:
        """The system that was trained."""

    @property
    def records(self) -> list[Record]:
        """The records of its rounds, in order."""

    @property
    def profile(self) -> Profile:
        """What the weighting knew; empty where that is not known."""


@dataclass(frozen=True)
class Curve:
    """A value at some rounds, with its spread over the seeds."""

    rounds: tuple[int, ...]
    values: tuple[Spread, ...]


@dataclass(frozen=True)
class Series:
    """Trainings that differ in their seed only."""

    label: str
    weighting: str  # empty where a method brings its own
    trainings: tuple[Training, ...]

    @property
    def kind(self) -> str:
        """What decides its colour: the weighting, or the method where that has weights of its own."""
        return self.weighting or self.label.partition(" + ")[0]

    @property
    def variant(self) -> str:
        """What the label says beyond the kind."""
        return self.label.replace(self.kind, "", 1).strip(" +")

    @property
    def error_terms(self) -> dict[str, Spread]:
        """The terms of the error bound, in units of the loss; empty where nothing was measured."""
        found = [terms for each in self.trainings if (terms := each.profile.error_terms)]
        return {name: Spread.of([terms[name] for terms in found]) for name in found[0]} if found else {}

    def exit_accuracy(self, exit: int) -> Curve:
        """On validation data; of several networks cut from that exit, the mean."""
        return self._curve(lambda record: self._at(exit, _exit_accuracy(record), statistics.fmean))

    def accuracy(self) -> Curve:
        """As served, on validation data, at the setting that was trained for."""
        return self._curve(lambda record: record.validation.accuracy if record.validation else None)

    def exit_weight(self, exit: int) -> Curve:
        """The aggregation weight of an exit, Lambda-tilde_e, in every round."""
        return self._curve(lambda record: self._at(exit, record.exit_weights, sum))

    def _at(
        self, exit: int, values: Sequence[float | None] | None, total: Callable[[list[float]], float]
    ) -> float | None:
        """The values of all that was cut from that exit, taken together; None where there are none."""
        numbered = zip(layers(self.trainings[0].system), values or (), strict=False)
        found = [value for layer, value in numbered if layer == exit and value is not None]
        return total(found) if found else None

    def _curve(self, value: Callable[[Record], float | None]) -> Curve:
        """Over the rounds that all trainings have; those without any do not count."""
        by_seed: list[dict[int, float]] = []
        for training in self.trainings:
            found = {record.round: value(record) for record in training.records}
            if known := {round: each for round, each in found.items() if each is not None}:
                by_seed.append(known)
        rounds = tuple(sorted(set.intersection(*map(set, by_seed)))) if by_seed else ()
        return Curve(rounds, tuple(Spread.of([found[round] for found in by_seed]) for round in rounds))


def _exit_accuracy(record: Record) -> tuple[float | None, ...] | None:
    return record.validation.exit_accuracy if record.validation else None


def by_kind(trainings: Sequence[Training]) -> list[Series]:
    """Runs as series: those of one weighting are one, or of one method where `compare` named them after it."""
    weightings = (GIVEN, *WEIGHTINGS)
    members: dict[str, list[Training]] = {name: [] for name in (*weightings, *METHODS)}
    for training in trainings:
        name = training.name.rpartition("-seed-")[0]
        members[name if name in METHODS else training.system.training.weighting_name].append(training)
    return [Series(name, name if name in weightings else "", tuple(found)) for name, found in members.items() if found]
