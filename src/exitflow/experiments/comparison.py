"""The same system trained in several ways, each with several seeds."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from exitflow.data.dataset import Dataset
from exitflow.evaluation.accuracy import Evaluation
from exitflow.experiments.assembly import dataset_of
from exitflow.experiments.figures import Spread
from exitflow.experiments.runs import evaluate
from exitflow.experiments.system import System
from exitflow.experiments.training import resume_or_train


@dataclass(frozen=True)
class Comparison:
    """Evaluations by weighting, one for each seed."""

    system: str
    seeds: tuple[int, ...]
    evaluations: dict[str, tuple[Evaluation, ...]]

    def accuracy(self, weighting: str) -> Spread:
        """Of the whole system."""
        return Spread.of([evaluation.accuracy for evaluation in self.evaluations[weighting]])

    def exit_accuracy(self, weighting: str) -> tuple[Spread, ...]:
        """Of each exit on all samples."""
        by_exit = zip(*(evaluation.exit_accuracy for evaluation in self.evaluations[weighting]), strict=True)
        return tuple(Spread.of(values) for values in by_exit)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        weightings = {
            name: {
                "accuracy": vars(self.accuracy(name)),
                "exit_accuracy": [vars(spread) for spread in self.exit_accuracy(name)],
                "seeds": [evaluation.to_json() for evaluation in evaluations],
            }
            for name, evaluations in self.evaluations.items()
        }
        return {"system": self.system, "seeds": list(self.seeds), "weightings": weightings}


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
    out: str | Path | None = None,
    backend: str = "serial",
    workers: int | None = None,
    dataset: Dataset | None = None,
    observer: Callable[[str, float], None] | None = None,
) -> Comparison:
    """Train and evaluate every combination. Runs that are there are used, unfinished ones are gone on with."""
    folder = Path(out) if out else default_folder(system)
    dataset = dataset or dataset_of(system)
    evaluations: dict[str, list[Evaluation]] = {weighting: [] for weighting in weightings}
    variants = [(weighting, seed) for seed in seeds for weighting in weightings]
    for weighting, seed in variants:
        variant = replace(system, training=replace(system.training, weighting=weighting, seed=seed))
        label = f"{weighting}, seed {seed}"
        run = resume_or_train(
            variant,
            folder / f"{weighting}-seed-{seed}",
            backend=backend,
            workers=workers,
            dataset=dataset,
            observer=(lambda rounds, label=label: observer(label, rounds)) if observer else None,
        )
        evaluations[weighting].append(evaluate(run, dataset=dataset))
    return Comparison(system.name, tuple(seeds), {name: tuple(done) for name, done in evaluations.items()})
