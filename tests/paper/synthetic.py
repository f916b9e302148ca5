"""Results in the documented format, with invented figures: a fixture for tests, never published."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from exitflow.config import encode
from exitflow.federated.measuring import GradientTable
from exitflow.runs.records import Profile, Record, Validation
from exitflow.runs.training_costs import TrainingCosts
from exitflow.topology.rates import serving_plan
from exitflow.topology.settings import PAPER_SETTINGS, parse_setting
from paper.provenance import Provenance
from paper.results import Answers, GradientVariance, Results, TrainingResult, curves_json, publish
from paper.tables import DATASETS, TABLES, Cell, Job, Scale, Table, distinct_trainings, system_for_variance
from paper.training import system_digest

PROVENANCE = Provenance("2026-01-02", "0123456789ab", "a machine, 2 cores, Linux", "unknown", "3.11.9", "2.13.0")
COSTS = TrainingCosts(20_000_000, 10**11)


def write_results(
    path: Path, tables: Iterable[Table] = TABLES.values(), seeds: Sequence[int] = (9, 42), datasets=DATASETS, keep=1.0
) -> Path:
    """A store; `keep` is the share of trainings that have a result."""
    rng = np.random.default_rng(1)
    path.parent.mkdir(parents=True, exist_ok=True)
    jobs = [job for job in distinct_trainings(list(tables), seeds, "small", datasets) if rng.random() < keep]
    for job in jobs:
        write_training(path, job, rng)
    return path


def write_training(path: Path, job: Job, rng: np.random.Generator, num_records: int = 12) -> None:
    weights = serving_plan(job.system.topology).exit_share
    top = (
        np.linspace(0.55, 0.80, len(weights)) + 0.15 * (weights - 1 / len(weights)) + rng.normal(0, 0.01, len(weights))
    )
    records = []
    for number in range(1, num_records + 1):
        exits = tuple((top * (1 - np.exp(-3 * number / num_records))).tolist())
        validation = Validation(float(weights @ exits), exits, exits)
        records.append(
            Record(
                number * job.system.training.rounds // num_records,
                tuple(weights.tolist()),
                losses={"1": 1.0},
                validation=validation if number % 2 == 0 else None,
            )
        )
    served = [*PAPER_SETTINGS, "100-0-0", "0-0-100"]
    accuracy = {each: float(np.array(parse_setting(each)) @ top[-3:]) for each in served}
    own = Answers(tuple(top / 2), {setting: value / 2 for setting, value in accuracy.items()})
    line = TrainingResult(
        job.training,
        job.scale,
        system_digest(job.system),
        Answers(tuple(top), accuracy),
        own if job.system.training.blends_answers else None,
        COSTS,
        61.5,
        PROVENANCE,
    )
    append(path, line, curves_json(job.training, records, _profile(job, weights, rng)))


def _profile(job: Job, weights: np.ndarray, rng: np.random.Generator) -> Profile:
    profile = Profile(serve_share=tuple(weights.tolist()))
    if job.system.training.weighting == "balanced-adj":
        nodes = job.system.topology.nodes
        own = np.array([[node.exit == exit for exit in (1, 2, 3)] for node in nodes])
        table = np.where(own, 0.1 + rng.random(own.shape), np.nan)
        figures = {"mean_variance": table * 1e-4, "variance": table, "second_moment": 2 * table, "loss": 2 + table / 10}
        profile = replace(
            profile,
            num_steps=10,
            multiply_adds=(100_000, 400_000, 1_500_000),
            num_parameters=(100, 1000, 10000),
            node_samples={node.name: 1000 for node in nodes},
            gradients=GradientTable(**figures).to_json(),
            error_terms={"generalisation": 0.4, "bias": 0.1, "noise": 0.3, "sampling": 0.05, "total": 0.85},
        )
    return profile


def write_gradient_variance(path: Path, dataset: str, seed: int, values=(4e-3, 2e-3, 1e-3), scale: Scale = "small"):
    digest = system_digest(system_for_variance(dataset, seed, scale))
    publish(path, GradientVariance(dataset, seed, scale, digest, tuple(values), PROVENANCE))


def put(path: Path, cell: Cell, seed: int, accuracy: dict[str, float], own: dict[str, float] | None = None) -> None:
    """The result of a cell, with figures of the test's choice and no curves."""
    own_answers = Answers((0.1, 0.1, 0.1), own) if own else None
    digest = system_digest(cell.system(seed, "small"))
    answers = Answers((0.1, 0.1, 0.1), accuracy)
    publish(path, TrainingResult(cell.training(seed), "small", digest, answers, own_answers, COSTS))


def append(path: Path, line: TrainingResult, curves) -> None:
    """Like `publish`, but for the order of the lines and the compression, which take their time."""
    with path.open("a") as file:
        file.write(json.dumps(encode(line)) + "\n")
    with Results(path).curves.open("ab") as file:
        file.write(gzip.compress((json.dumps(curves) + "\n").encode()))


def edit(path: Path, change: Callable[[TrainingResult], TrainingResult | None]) -> None:
    """Every line about a training as `change` makes it, and without those of which it makes nothing."""
    lines = [change(line) if isinstance(line, TrainingResult) else line for line in Results(path).lines.values()]
    path.write_text("".join(json.dumps(encode(line)) + "\n" for line in lines if line))


def remove(path: Path, name: str) -> None:
    """The trainings with that in their name."""
    edit(path, lambda line: None if name in line.training.name else line)


def rewrite(path: Path, name: str, **changes) -> None:
    """The lines of the trainings with that in their name."""
    edit(path, lambda line: replace(line, **changes) if name in line.training.name else line)
