"""Results on disk: what was trained, its records and its final figures, without the weights.

    RESULTS/TRAINING/spec.toml      the system, resolved
    RESULTS/TRAINING/rounds.jsonl   a record per round
    RESULTS/TRAINING/profile.json   what the weighting knew
    RESULTS/TRAINING/result.json    the figures on test data, and where and when they came about
    RESULTS/gradient-variance_DATASET_seed-N.json

A training has a result once `result.json` is there; it is written last.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from exitflow.errors import RunError
from exitflow.experiments.costs import TrainingCosts
from exitflow.files import write_atomically


@dataclass(frozen=True)
class Result:
    """The figures of one training."""

    folder: Path

    @cached_property
    def figures(self) -> dict[str, Any]:
        """What `result.json` says."""
        return read_json(self.folder / "result.json")

    @property
    def name(self) -> str:
        """Of the training."""
        return self.folder.name

    def accuracy(self, setting: str) -> float:
        """Of the whole system, served at that setting."""
        return float(self.figures["accuracy"][setting])

    @property
    def exit_accuracy(self) -> list[float]:
        """Of each exit on all samples."""
        return [float(value) for value in self.figures["exit_accuracy"]]

    @property
    def costs(self) -> TrainingCosts:
        """What the training took."""
        return TrainingCosts.of(self.records)

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """A record per round."""
        lines = (self.folder / "rounds.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]


class Results:
    """A folder of results."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def get(self, name: str) -> Result | None:
        """The result of a training; None where there is none yet."""
        folder = self.folder / name
        return Result(folder) if (folder / "result.json").is_file() else None

    def all(self) -> list[Result]:
        """Every result, by name."""
        return [Result(path.parent) for path in sorted(self.folder.glob("*/result.json"))]

    def gradient_variance(self, dataset: str, seed: int) -> dict[str, Any] | None:
        """What was measured of the gradients; None where nothing was."""
        path = self.gradient_variance_file(dataset, seed)
        return read_json(path) if path.is_file() else None

    def gradient_variance_file(self, dataset: str, seed: int) -> Path:
        """Where it stands."""
        return self.folder / f"gradient-variance_{dataset}_seed-{seed}.json"


def read_json(path: Path) -> dict[str, Any]:
    """An object from a file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise RunError(f"{path}: expected an object, got {type(value).__name__}")
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Atomically."""
    write_atomically(path, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())


def provenance() -> dict[str, Any]:
    """When, from which source and on what machine figures came about."""
    import torch

    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": _commit(),
        "machine": f"{_processor()}, {os.cpu_count()} cores, {platform.system()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _commit() -> str:
    """Of the source that runs; `-changed` where it is not quite that."""
    source = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty=-changed", "--abbrev=12", "--exclude=*"],
            cwd=source,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
