"""What a training left behind in its folder, without the weights."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from exitflow.config import parse_json
from exitflow.errors import RunError
from exitflow.files import MEDIUM_FILE, read_file
from exitflow.runs.records import Record, is_number, read_records
from exitflow.system.system import System, load_resolved
from exitflow.theory.error_costs import ErrorTerms


@dataclass(frozen=True)
class TrainingFolder:
    """What a training left behind, as a result of `reproduce` or in a run directory."""

    folder: Path

    @property
    def name(self) -> str:
        """The name of the training."""
        return self.folder.name

    @cached_property
    def system(self) -> System:
        """The system that was trained."""
        return load_resolved(self.folder / "spec.toml")

    @cached_property
    def records(self) -> list[Record]:
        """The records of its rounds, in order."""
        return read_records(self.folder / "rounds.jsonl")

    @property
    def num_rounds_done(self) -> int:
        """Whether or not each of them has left a record."""
        return int(self.records[-1]["round"]) if self.records else 0

    @cached_property
    def profile(self) -> dict[str, Any]:
        """What the weighting knew; empty where nothing was written."""
        path = self.folder / "profile.json"
        if not path.is_file():
            return {}
        found = read_json(path)
        if (terms := found.get("error_terms")) is not None:
            known = isinstance(terms, dict) and all(is_number(terms.get(field.name)) for field in fields(ErrorTerms))
            expect(known, path, "error_terms", "the terms of the error bound", terms, advice="; restore it")
        return found


def read_json(path: Path, *, advice: str = "") -> dict[str, Any]:
    """An object from a file; `advice` ends the sentence where there is none."""
    try:
        value = parse_json(read_file(path, MEDIUM_FILE))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RunError(f"{path}: cannot be read: {reason}{advice}") from None
    if not isinstance(value, dict):
        raise RunError(f"{path}: expected an object, got {type(value).__name__}{advice}")
    return value


def expect(condition: bool, path: Path, key: str, expected: str, value: Any, *, advice: str = "") -> None:
    """Refuse a file whose `key` is not what it should be; `advice` ends the sentence."""
    if not condition:
        text = json.dumps(value)
        got = text if len(text) <= 80 else f"{text[:79]}…"
        raise RunError(f"{path}: {key}: expected {expected}, got {got}{advice}")
