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
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from exitflow.errors import RunError
from exitflow.experiments.costs import TrainingCosts
from exitflow.experiments.system import System, load_system
from exitflow.files import write_atomically


@dataclass(frozen=True)
class TrainingFolder:
    """What a training left behind, as a result of `reproduce` or in a run directory."""

    folder: Path

    @property
    def name(self) -> str:
        """Of the training."""
        return self.folder.name

    @cached_property
    def system(self) -> System:
        """What was trained."""
        return load_system(self.folder / "spec.toml")

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """A record per round; a last line that a kill has cut off does not count."""
        path = self.folder / "rounds.jsonl"
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) if path.is_file() else []
        return [_record(path, number, line) for number, line in enumerate(lines, start=1) if line.endswith("\n")]

    @cached_property
    def profile(self) -> dict[str, Any]:
        """What the weighting knew; empty where nothing was written."""
        path = self.folder / "profile.json"
        return read_json(path) if path.is_file() else {}


def _record(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(line)
        record["round"] + 0
    except (ValueError, KeyError, TypeError):
        raise RunError(f"{path}: line {number} is no record of a round") from None
    return record


@dataclass(frozen=True)
class Result(TrainingFolder):
    """The figures of one training."""

    @cached_property
    def figures(self) -> dict[str, Any]:
        """What `result.json` says."""
        path = self.folder / "result.json"
        found = read_json(path)
        accuracy, exits = found.get("accuracy"), found.get("exit_accuracy")
        if not isinstance(accuracy, dict) or not isinstance(exits, list):
            raise RunError(f"{path}: was not written by exitflow; delete it, and it will be made again")
        return found

    def accuracy(self, setting: str) -> float:
        """Of the whole system, served at that setting."""
        if setting not in self.figures["accuracy"]:
            raise RunError(f"{self.folder / 'result.json'}: says nothing of the serving setting {setting}")
        return float(self.figures["accuracy"][setting])

    @property
    def exit_accuracy(self) -> list[float]:
        """Of each exit on all samples."""
        return [float(value) for value in self.figures["exit_accuracy"]]

    @property
    def costs(self) -> TrainingCosts:
        """What the training took."""
        return TrainingCosts.of(self.records)


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

    def seeds(self) -> tuple[int, ...]:
        """Those with any result."""
        names = [result.name for result in self.all()] + [path.stem for path in self._gradient_variance_files()]
        return tuple(sorted({int(seed) for name in names for seed in re.findall(r"_seed-(\d+)$", name)}))

    def provenances(self) -> list[dict[str, Any]]:
        """When, from which source and where each of the figures came about."""
        return [result.figures for result in self.all()] + [read_json(path) for path in self._gradient_variance_files()]

    def gradient_variance(self, dataset: str, seed: int) -> dict[str, Any] | None:
        """What was measured of the gradients; None where nothing was."""
        path = self.gradient_variance_file(dataset, seed)
        return read_json(path) if path.is_file() else None

    def gradient_variance_file(self, dataset: str, seed: int) -> Path:
        """Where it stands."""
        return self.folder / f"gradient-variance_{dataset}_seed-{seed}.json"

    def _gradient_variance_files(self) -> list[Path]:
        return sorted(self.folder.glob("gradient-variance_*_seed-*.json"))


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
    """When, from which source and on what machine figures come about."""
    import torch

    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": f"{_processor()}, {os.cpu_count()} cores, {platform.system()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


@cache
def commit() -> str:
    """Of the source that runs, as it was when this was first asked; `-changed` where it is not quite that."""
    source = Path(__file__)
    describe = ("describe", "--always", "--dirty=-changed", "--abbrev=12", "--exclude=*")
    try:  # an installed package may lie in a repository that is not its own, and does not track it
        _git(source.parent, "ls-files", "--error-unmatch", source.name)
        return _git(source.parent, *describe)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
