"""What is drawn as one line: the trainings of one kind, one for each seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from exitflow.experiments.figures import Spread
from exitflow.experiments.results import TrainingFolder
from exitflow.federated.weighting import WEIGHTINGS

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Curve:
    """Spreads at some rounds."""

    rounds: tuple[int, ...]
    values: tuple[Spread, ...]


@dataclass(frozen=True)
class Series:
    """Trainings that differ in their seed only."""

    label: str
    weighting: str  # empty where a method brings its own
    trainings: tuple[TrainingFolder, ...]

    @property
    def kind(self) -> str:
        """What decides its colour: the weighting, or the method where that has weights of its own."""
        return self.weighting or self.label

    @property
    def variant(self) -> str:
        """What the label says beyond the kind."""
        return self.label.replace(self.kind, "", 1).strip(" +")

    @property
    def error_terms(self) -> dict[str, Spread]:
        """Of the error bound, in units of the loss; empty where nothing was measured."""
        found = [each.profile["error_terms"] for each in self.trainings if each.profile.get("error_terms")]
        return {name: Spread.of([terms[name] for terms in found]) for name in found[0]} if found else {}

    def exit_accuracy(self, exit: int) -> Curve:
        """On validation data."""
        return self._curve(lambda record: _validated(record, "exit_accuracy", exit))

    def accuracy(self) -> Curve:
        """As served, on validation data, at the setting that was trained for."""
        return self._curve(lambda record: _validated(record, "accuracy"))

    def exit_weight(self, exit: int) -> Curve:
        """Lambda-tilde_e."""
        return self._curve(lambda record: record["exit_weights"][exit - 1])

    def _curve(self, value: Callable[[Record], float | None]) -> Curve:
        """Over the rounds that all trainings have."""
        by_seed: list[dict[int, float]] = []
        for training in self.trainings:
            found = {record["round"]: value(record) for record in training.records}
            by_seed.append({round: each for round, each in found.items() if each is not None})
        rounds = tuple(sorted(set.intersection(*map(set, by_seed)))) if by_seed else ()
        return Curve(rounds, tuple(Spread.of([found[round] for found in by_seed]) for round in rounds))


def _validated(record: Record, key: str, exit: int | None = None) -> float | None:
    validation = record.get("validation")
    if not validation:
        return None
    found = validation[key] if exit is None else validation[key][exit - 1]
    return None if found is None else float(found)


def by_weighting(trainings: Sequence[TrainingFolder]) -> list[Series]:
    """Of runs: those of one weighting are one series."""
    found = {training.system.training.weighting for training in trainings}
    names = [name for name in WEIGHTINGS if name in found]
    return [
        Series(name, name, tuple(each for each in trainings if each.system.training.weighting == name))
        for name in names
    ]
