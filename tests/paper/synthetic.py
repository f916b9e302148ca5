"""Results in the documented format, with invented figures: a fixture for tests, never published."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from exitflow.federated.measuring import GradientTable
from exitflow.topology.rates import serving_plan
from exitflow.topology.settings import PAPER_SETTINGS, parse_setting
from paper.tables import DATASETS, TABLES, Job, Table, distinct_trainings

PROVENANCE = {
    "date": "2026-01-02",
    "commit": "0123456789ab",
    "machine": "a machine, 2 cores, Linux",
    "python": "3.11.9",
    "torch": "2.13.0",
}


def write_results(
    folder: Path, tables: Iterable[Table] = TABLES.values(), seeds: Sequence[int] = (9, 42), datasets=DATASETS, keep=1.0
) -> Path:
    """`keep` is the share of trainings that have a result."""
    rng = np.random.default_rng(1)
    for job in distinct_trainings(list(tables), seeds, "small", datasets):
        if rng.random() < keep:
            write_training(folder / job.name, job, rng)
    return folder


def write_training(folder: Path, job: Job, rng: np.random.Generator, num_records: int = 12) -> None:
    folder.mkdir(parents=True)
    weights = serving_plan(job.system.topology).exit_share
    top = (
        np.linspace(0.55, 0.80, len(weights)) + 0.15 * (weights - 1 / len(weights)) + rng.normal(0, 0.01, len(weights))
    )
    (folder / "spec.toml").write_text(job.system.to_toml())
    with (folder / "rounds.jsonl").open("w") as file:
        for number in range(1, num_records + 1):
            exits = (top * (1 - np.exp(-3 * number / num_records))).tolist()
            validation = {"exit_accuracy": exits, "served_accuracy": exits, "accuracy": float(weights @ exits)}
            record = {
                "round": number * job.system.training.rounds // num_records,
                "exit_weights": list(weights),
                "losses": {"1": 1.0},
                "validation": validation if number % 2 == 0 else None,
                "num_tasks": 7,
                "dropped": [],
                "link_bytes": {},
                "seconds": 1.0,
            }
            file.write(json.dumps(record) + "\n")
    (folder / "profile.json").write_text(json.dumps(_profile(job, weights, rng)))
    served = [*PAPER_SETTINGS, "100-0-0", "0-0-100"]
    accuracy = {each: float(np.array(parse_setting(each)) @ top[-3:]) for each in served}
    figures = {"exit_accuracy": top.tolist(), "accuracy": accuracy}
    if job.system.training.blends_answers:
        figures["own_answers"] = {
            "exit_accuracy": (top / 2).tolist(),
            "accuracy": {setting: value / 2 for setting, value in accuracy.items()},
        }
    figures |= {"costs": {"bytes_sent": 20_000_000, "multiply_adds": 10**11}, "seconds": 61.5, **PROVENANCE}
    (folder / "result.json").write_text(json.dumps(figures))


def _profile(job: Job, weights: np.ndarray, rng: np.random.Generator) -> dict[str, object]:
    profile: dict[str, object] = {"serve_share": weights.tolist(), "error_terms": None, "gradients": None}
    if job.system.training.weighting == "balanced-adj":
        nodes = job.system.topology.nodes
        own = np.array([[node.exit == exit for exit in (1, 2, 3)] for node in nodes])
        table = np.where(own, 0.1 + rng.random(own.shape), np.nan)
        figures = {"mean_variance": table * 1e-4, "variance": table, "second_moment": 2 * table, "loss": 2 + table / 10}
        profile |= {
            "num_steps": 10,
            "multiply_adds": [1e5, 4e5, 1.5e6],
            "num_parameters": [100, 1000, 10000],
            "node_samples": {node.name: 1000 for node in nodes},
            "gradients": GradientTable(**figures).to_json(),
            "error_terms": {"generalisation": 0.4, "bias": 0.1, "noise": 0.3, "sampling": 0.05, "total": 0.85},
        }
    return profile


def write_gradient_variance(folder: Path, dataset: str, seed: int, values=(4e-3, 2e-3, 1e-3)) -> None:
    path = folder / f"gradient-variance_{dataset}_seed-{seed}.json"
    path.write_text(json.dumps({"gradient_variance": list(values), "scale": "small", **PROVENANCE}))
