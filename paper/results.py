"""Results on disk: what was trained, its records and its final figures, without the weights.

    RESULTS/TRAINING/spec.toml      the system, resolved
    RESULTS/TRAINING/rounds.jsonl   records of its rounds: of all, or of a hundred, spread evenly
    RESULTS/TRAINING/profile.json   what the weighting knew
    RESULTS/TRAINING/result.json    the figures on test data, what all rounds took, and where and when they came about
    RESULTS/gradient-variance_DATASET_seed-N.json

A training has a result once `result.json` is there; it is written last.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from exitflow.errors import RunError
from exitflow.files import write_atomically
from exitflow.runs.records import Record, is_number, read_records
from exitflow.runs.training_costs import TrainingCosts
from exitflow.runs.training_folder import TrainingFolder, expect, read_json

COSTS = "costs"  # in `result.json`: what the training took
OWN_ANSWERS = "own_answers"  # in `result.json`: the accuracies if exits that answer together did not
NUM_RECORDS = 100  # of a training that are kept at most, beside those that were validated
MADE_AGAIN = "; delete it, and it will be made again"
PROVENANCE = ("date", "commit", "machine", "instructions", "python", "torch")
NUM_EXITS = 3  # of the paper's network, whose gradients its Table 3 is about


@dataclass(frozen=True)
class Result(TrainingFolder):
    """The figures of one training: as its exits answer, or by what each says by itself where they answer together."""

    own_answers: bool = False

    @cached_property
    def records(self) -> list[Record]:
        """Of its rounds, in order, up to the last."""
        path, rounds = self.folder / "rounds.jsonl", self.system.training.rounds
        found = read_records(path)
        last = found[-1]["round"] if found else 0
        if last != rounds:
            raise RunError(f"{path}: expected records up to round {rounds}, got them up to {last}; {self._begin_anew}")
        num_exits = self.system.topology.num_exits
        for record in found:
            if len(record["exit_weights"]) != num_exits:
                problem = f"round {record['round']}: exit_weights: expected {num_exits} numbers"
                raise RunError(f"{path}: {problem}, got {len(record['exit_weights'])}; {self._begin_anew}")
        return found

    @property
    def _begin_anew(self) -> str:
        return f"restore it, or delete {self.folder}, which will then be trained again"

    @cached_property
    def figures(self) -> dict[str, Any]:
        """What `result.json` says."""
        path = self.folder / "result.json"
        found = read_json(path, advice=MADE_AGAIN)
        seconds, own = found.get("seconds"), found.get(OWN_ANSWERS)
        _check_accuracies(found, path)
        _check_provenance(found, path)
        _expect(seconds is None or is_number(seconds), path, "seconds", "a number", seconds)
        costs = found.get(COSTS)
        _expect(costs is None or _are_costs(costs), path, COSTS, "the numbers bytes_sent and multiply_adds", costs)
        if own is not None or self.own_answers:
            _expect(isinstance(own, dict), path, OWN_ANSWERS, "the accuracies of exits by themselves", own)
            _check_accuracies(own, path, f"{OWN_ANSWERS}.")
        return found

    @property
    def _accuracies(self) -> dict[str, Any]:
        figures = self.figures
        return figures[OWN_ANSWERS] if self.own_answers else figures

    def accuracy(self, setting: str) -> float:
        """Of the whole system, served at that setting."""
        found = self._accuracies["accuracy"]
        if setting not in found:
            where = f"{self.folder / 'result.json'}: {f'{OWN_ANSWERS}: ' if self.own_answers else ''}"
            raise RunError(f"{where}says nothing of the serving setting {setting}{MADE_AGAIN}")
        return float(found[setting])

    @property
    def exit_accuracy(self) -> list[float]:
        """Of each exit on all samples."""
        found, num_exits = self._accuracies["exit_accuracy"], self.system.topology.num_exits
        expected = f"{num_exits} numbers, one for each exit"
        _expect(len(found) == num_exits, self.folder / "result.json", "exit_accuracy", expected, found)
        return [float(value) for value in found]

    @property
    def costs(self) -> TrainingCosts:
        """What the training took."""
        if counted := self.figures.get(COSTS):
            return TrainingCosts(counted["bytes_sent"], counted["multiply_adds"])
        rounds = self.system.training.rounds  # all of which have records in results of before they were counted
        if len(self.records) != rounds:
            problem = f"has {len(self.records)} of {rounds} rounds, and without them what the training took is unknown"
            raise RunError(f"{self.folder / 'rounds.jsonl'}: {problem}; {self._begin_anew}")
        return TrainingCosts.of(self.records)


class Results:
    """A folder of results."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def get(self, name: str, *, own_answers: bool = False) -> Result | None:
        """The result of a training; None where there is none yet."""
        folder = self.folder / name
        return Result(folder, own_answers) if (folder / "result.json").exists() else None

    def all(self) -> list[Result]:
        """Every result, by name."""
        return [Result(path.parent) for path in sorted(self.folder.glob("*/result.json"))]

    def seeds(self) -> tuple[int, ...]:
        """Those with any result."""
        names = [result.name for result in self.all()] + [path.stem for path in self._gradient_variance_files()]
        return tuple(sorted({int(seed) for name in names for seed in re.findall(r"_seed-(\d+)$", name)}))

    def provenances(self) -> list[dict[str, Any]]:
        """When, from which source and where each of the figures came about."""
        variances = {path: read_json(path, advice=MADE_AGAIN) for path in self._gradient_variance_files()}
        for path, found in variances.items():
            _check_provenance(found, path)
        return [*(result.figures for result in self.all()), *variances.values()]

    def gradient_variance(self, dataset: str, seed: int) -> dict[str, Any] | None:
        """What was measured of the gradients; None where nothing was."""
        path = self.gradient_variance_file(dataset, seed)
        if not path.is_file():
            return None
        found = read_json(path, advice=MADE_AGAIN)
        values = found.get("gradient_variance")
        known = isinstance(values, list) and len(values) == NUM_EXITS and all(map(_is_variance, values))
        _expect(known, path, "gradient_variance", f"{NUM_EXITS} numbers from 0 on, one for each exit", values)
        return found

    def gradient_variance_file(self, dataset: str, seed: int) -> Path:
        """Where it stands."""
        return self.folder / f"gradient-variance_{dataset}_seed-{seed}.json"

    def gradient_variance_scales(self) -> dict[Path, Any]:
        """At which scale each of these was measured."""
        return {path: read_json(path, advice=MADE_AGAIN).get("scale") for path in self._gradient_variance_files()}

    def _gradient_variance_files(self) -> list[Path]:
        return sorted(self.folder.glob("gradient-variance_*_seed-*.json"))


def _check_accuracies(found: Any, path: Path, prefix: str = "") -> None:
    accuracy, exits = found.get("accuracy"), found.get("exit_accuracy")
    by_setting = isinstance(accuracy, dict) and all(map(_is_fraction, accuracy.values()))
    _expect(by_setting, path, f"{prefix}accuracy", "a number from 0 to 1 for each serving setting", accuracy)
    by_exit = isinstance(exits, list) and all(map(_is_fraction, exits))
    _expect(by_exit, path, f"{prefix}exit_accuracy", "a number from 0 to 1 for each exit", exits)


def _check_provenance(found: Any, path: Path) -> None:
    for key in PROVENANCE:
        if key in found:
            _expect(isinstance(found[key], str), path, key, "a text", found[key])


def _expect(condition: bool, path: Path, key: str, expected: str, value: Any) -> None:
    expect(condition, path, key, expected, value, advice=MADE_AGAIN)


def _is_variance(value: Any) -> bool:
    return is_number(value) and value >= 0


def _are_costs(value: Any) -> bool:
    if not isinstance(value, dict) or not is_number(value.get("bytes_sent")):
        return False
    counted = value.get("multiply_adds", "")
    return counted is None or is_number(counted)


def _is_fraction(value: Any) -> bool:
    return is_number(value) and 0 <= value <= 1


def costs_json(records: Sequence[Record]) -> dict[str, Any]:
    """What the training of these records took, as `result.json` has it."""
    return {COSTS: asdict(TrainingCosts.of(records))}


def records_to_keep(records: Sequence[Record]) -> list[Record]:
    """All where they are few; the last is always among them."""
    step = max(1, -(-len(records) // NUM_RECORDS))
    return [each for each in records if (len(records) - each["round"]) % step == 0 or each["validation"]]


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
        "instructions": torch.backends.cpu.get_cpu_capability(),  # which decide the last bits of a sum
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
