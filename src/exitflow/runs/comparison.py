"""The same system trained under several weightings and by several methods, each with several seeds."""

from __future__ import annotations

import hashlib
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from exitflow.config import require
from exitflow.data.dataset import Dataset
from exitflow.evaluation.accuracy import Evaluation
from exitflow.federated.training_spec import GIVEN, TrainingSpec
from exitflow.runs.arguments import check_dataset, check_seeds, check_system, checked_path
from exitflow.runs.measured_accuracy import keep_accuracy
from exitflow.runs.methods import apply_method
from exitflow.runs.runs import evaluate
from exitflow.runs.spread import Spread
from exitflow.runs.training import resume_or_train
from exitflow.runs.training_costs import TrainingCosts
from exitflow.system.assembly import dataset_of
from exitflow.system.system import System, layers


@dataclass(frozen=True)
class Comparison:
    """Evaluations by weighting or method, one for each seed, and what their trainings took."""

    system: str
    seeds: tuple[int, ...]
    evaluations: dict[str, tuple[Evaluation, ...]]
    costs: dict[str, tuple[TrainingCosts, ...]]
    methods: tuple[str, ...] = ()  # which of the names are methods, and no weightings
    layers: dict[str, tuple[int, ...]] = field(default_factory=dict)  # name -> of each exit; itself if not given

    def accuracy(self, name: str) -> Spread:
        """The accuracy of the whole system, as served."""
        return Spread.of([evaluation.accuracy for evaluation in self.evaluations[name]])

    def exit_accuracy(self, name: str) -> tuple[Spread | None, ...]:
        """The accuracy of each exit on all samples; where every node has a network of its own, the layer's mean.

        None for a layer without any.
        """
        found = [self._by_layer(name, evaluation.exit_accuracy) for evaluation in self.evaluations[name]]
        by_exit = ([each for each in values if each is not None] for values in zip(*found, strict=True))
        return tuple(Spread.of(values) if values else None for values in by_exit)

    def _by_layer(self, name: str, accuracies: Sequence[float]) -> list[float | None]:
        layers = self.layers.get(name, tuple(range(1, len(accuracies) + 1)))
        members: dict[int, list[float]] = {layer: [] for layer in range(1, max(layers) + 1)}
        for layer, accuracy in zip(layers, accuracies, strict=True):
            members[layer].append(accuracy)
        return [statistics.fmean(each) if each else None for each in members.values()]

    def bytes_sent(self, name: str) -> float:
        """Over all links in both directions, of a training; mean over the seeds."""
        return statistics.fmean(cost.bytes_sent for cost in self.costs[name])

    def multiply_adds(self, name: str) -> float | None:
        """The cost of all forward passes of a training, mean over the seeds; None for runs too old to have counted."""
        counts = [cost.multiply_adds for cost in self.costs[name]]
        return None if None in counts else statistics.fmean(count for count in counts if count is not None)

    def to_json(self) -> dict[str, Any]:
        """The comparison as values that JSON can hold."""
        found = {name: self._json(name) for name in self.evaluations}
        weightings = {name: each for name, each in found.items() if name not in self.methods}
        methods = {name: each for name, each in found.items() if name in self.methods}
        return {"system": self.system, "seeds": list(self.seeds), "weightings": weightings, "methods": methods}

    def _json(self, name: str) -> dict[str, Any]:
        return {
            "accuracy": vars(self.accuracy(name)),
            "exit_accuracy": [spread and vars(spread) for spread in self.exit_accuracy(name)],
            "bytes_sent": self.bytes_sent(name),
            "multiply_adds": self.multiply_adds(name),
            "seeds": [evaluation.to_json() for evaluation in self.evaluations[name]],
        }


def default_folder(system: System) -> Path:
    """A folder of its own for every system, under `runs`: another file, or a changed one, never meets old runs."""
    plain = replace(system, training=replace(system.training, weighting="equal-weight", seed=0))
    digest = hashlib.blake2b(plain.to_toml().encode(), digest_size=4).hexdigest()
    plain_name = re.sub(r"[^\w.-]", "-", system.name, flags=re.ASCII)[:100]
    return Path("runs") / f"{plain_name}-{digest}"


def compare(
    system: System,
    weightings: Sequence[str],
    seeds: Sequence[int],
    *,
    methods: Sequence[str] = (),
    out: str | Path | None = None,
    backend: str = "serial",
    workers: int | None = None,
    dataset: Dataset | None = None,
    observer: Callable[[str, float], None] | None = None,
) -> Comparison:
    """Train `system` under every weighting and by every method, with every seed, and evaluate it.

    The weights that the system itself gives, if any, are compared too. Runs that are there are used, unfinished ones
    are gone on with.
    """
    check_system(system)
    check_dataset(dataset)
    check_seeds(seeds)
    folder = checked_path(out) if out else default_folder(system)
    variants = _variants(system, compared(system.training, weightings), methods)
    dataset = dataset or dataset_of(system)
    evaluations: dict[str, list[Evaluation]] = {name: [] for name in variants}
    costs: dict[str, list[TrainingCosts]] = {name: [] for name in variants}
    for name, seed in ((name, seed) for seed in seeds for name in variants):
        variant = replace(variants[name], training=replace(variants[name].training, seed=seed))
        label = f"{name}, seed {seed}"
        run = resume_or_train(
            variant,
            folder / f"{name}-seed-{seed}",
            backend=backend,
            workers=workers,
            dataset=dataset,
            observer=(lambda rounds, label=label: observer(label, rounds)) if observer else None,
        )
        evaluations[name].append(evaluate(run, dataset=dataset))
        keep_accuracy(run.path, evaluations[name][-1])
        costs[name].append(run.costs)
    return Comparison(
        system.name,
        tuple(seeds),
        {name: tuple(done) for name, done in evaluations.items()},
        {name: tuple(each) for name, each in costs.items()},
        tuple(methods),
        {name: layers(each) for name, each in variants.items()},
    )


def compared(training: TrainingSpec, weightings: Sequence[str]) -> list[str]:
    """What is compared where these weightings are named: with them, and first, the weights that a system gives."""
    others = [name for name in weightings if name != GIVEN]
    require(len(others) == len(weightings) or bool(training.exit_weights), GIVEN, "the system gives none to compare")
    return [GIVEN, *others] if training.exit_weights else others


def _variants(system: System, weightings: Sequence[str], methods: Sequence[str]) -> dict[str, System]:
    """What is to be trained; whatever a method cannot do with this system is said before anything is."""
    trainings = {
        name: system.training if name == GIVEN else replace(system.training, weighting=name, exit_weights=())
        for name in weightings
    }
    weighted = {name: replace(system, training=training) for name, training in trainings.items()}
    return weighted | {name: apply_method(name, system) for name in methods}
