"""The records of a training, a line of JSON for each round: read with care, for whoever reads them next."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from exitflow.config import parse_json
from exitflow.errors import RunError
from exitflow.files import LARGE_FILE, read_file

Record = dict[str, Any]


def read_records(path: Path) -> list[Record]:
    """All whole records; a last line that a kill has cut off does not count, and no file holds none."""
    return [record for _, record in read_lines(path)]


def read_lines(path: Path) -> list[tuple[bytes, Record]]:
    """The same, each beside the line that it is."""
    try:
        lines = read_file(path, LARGE_FILE).splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from None
    whole = [(number, line) for number, line in enumerate(lines, start=1) if line.endswith(b"\n")]
    return [(line, _record(path, number, line)) for number, line in whole]


def _record(path: Path, number: int, line: bytes) -> Record:
    try:
        record: Record = parse_json(line)
    except ValueError:
        record = {}
    if not _is_record(record):
        raise RunError(f"{path}: line {number} is no record of a round")
    return record


def _is_record(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("link_bytes"), dict):
        return False
    weights, validation = value.get("exit_weights"), value.get("validation")
    work, seconds = value.get("multiply_adds"), value.get("seconds")
    return (
        type(value.get("round")) is int
        and isinstance(weights, list)
        and _numbers(weights)
        and _numbers(value["link_bytes"].values())
        and all(each is None or is_number(each) for each in (work, seconds))
        and (validation is None or _is_validation(validation))
    )


def _is_validation(value: Any) -> bool:
    """Exits that serve nothing have no accuracy as served."""
    if not isinstance(value, dict):
        return False
    lists = [value.get(key, []) for key in ("exit_accuracy", "served_accuracy")]
    known = [each for items in lists if isinstance(items, list) for each in items if each is not None]
    return all(isinstance(items, list) for items in lists) and _numbers([*known, value.get("accuracy")])


def _numbers(values: Iterable[Any]) -> bool:
    return all(is_number(value) for value in values)


def is_number(value: Any) -> bool:
    """Finite, also as a float, and not true or false."""
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:
        return False
