"""What `evaluate` and `compare` found on test data, kept in the folder of the run for whoever reads it next."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from exitflow.config import decode, encode, parse_json
from exitflow.errors import ConfigError, RunError
from exitflow.evaluation.accuracy import Evaluation
from exitflow.files import MEDIUM_FILE, read_file, write_atomically

NAME = "test-accuracy.json"


@dataclass(frozen=True)
class MeasuredAccuracy:
    """How accurately a run answers test data as planned, in fractions."""

    accuracy: float  # of the whole system as served
    exit_accuracy: tuple[float, ...]  # of each exit on all samples
    node_accuracy: dict[str, float | None]  # of each node on what it serves; None where it serves nothing


def keep_accuracy(folder: Path, evaluation: Evaluation) -> None:
    """Write down what was found for the system as planned."""
    nodes = {name: served.accuracy for name, served in evaluation.nodes.items()}
    found = MeasuredAccuracy(evaluation.accuracy, tuple(map(float, evaluation.exit_accuracy)), nodes)
    write_atomically(folder / NAME, (json.dumps(encode(found), indent=1) + "\n").encode())


def read_accuracy(folder: Path) -> MeasuredAccuracy | None:
    """What was found; None where nobody has evaluated the run yet."""
    path = folder / NAME
    try:
        return decode(MeasuredAccuracy, parse_json(read_file(path, MEDIUM_FILE)))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from None
    except (ConfigError, ValueError) as error:
        raise RunError(f"{path}: is damaged: {error}; delete it, and `exitflow evaluate` will write it again") from None
