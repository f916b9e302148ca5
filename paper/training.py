"""What a training is known by, and what decides it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from exitflow.system.system import System, what_decides


@dataclass(frozen=True, order=True)
class Training:
    """A training of one scale: two with the same identity have the same system."""

    dataset: str
    num_nodes: int
    partition: str
    trained_as: str  # the label of the row of a table
    setting: str  # which shares the exits serve, as far as the training knows of them
    seed: int

    @property
    def name(self) -> str:
        """For people, and for the folder in which it is being trained; nothing reads it."""
        label = self.trained_as.replace(" + ", "+").replace(" ", "-")
        parts = (self.dataset, f"{self.num_nodes}-nodes", self.partition, label, self.setting, f"seed-{self.seed}")
        return "_".join(parts)


def system_digest(system: System) -> str:
    """Of everything that decides how `system` is trained.

    What is as the library has it by default does not count, so that a key that is added later changes no digest.
    """
    text = json.dumps(_given(what_decides(system)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _given(value: Any) -> Any:
    """The fields that are not at their defaults, as JSON; families always say which they are."""
    if dataclasses.is_dataclass(value):
        found = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
        return {
            field.name: _given(item) for field, item in found if field.name == "family" or item != _default_of(field)
        }
    if isinstance(value, Mapping):
        return {key: _given(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_given(item) for item in value]
    return value


def _default_of(field: dataclasses.Field[Any]) -> Any:
    factory = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()
