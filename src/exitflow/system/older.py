"""Systems as earlier versions of exitflow wrote them: what became of each key of their [training] table.

Run directories, bundles and published results keep the system that they were made with, and `modernised` reads it as it
is written today. A file that a person writes is not changed behind their back: an old key gets a sentence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from exitflow.errors import ConfigError
from exitflow.parts import REMOVED

# A key that stands in a table now: old key -> (table, key in it).
_MOVED = {
    "final_learning_rate": ("schedule", "final_learning_rate"),
    "warmup_rounds": ("schedule", "warmup_rounds"),
    "momentum": ("optimiser", "momentum"),
    "momentum_between_rounds": ("optimiser", "momentum_between_rounds"),
    "weight_decay": ("optimiser", "weight_decay"),
    "joint_loss": ("objective", "joint_loss"),
    "proximal_weight": ("objective", "proximal_weight"),
    "distillation_weight": ("distillation", "weight"),
    "distillation_temperature": ("distillation", "temperature"),
    "distillation_start": ("distillation", "start"),
    "distillation_ramp": ("distillation", "ramp"),
}
_NOW_TABLES = ("schedule", "objective")  # were a name, which is the key `name` of a table now

# A key that is gone: the value with which it changed nothing, and what to do instead.
_REMOVED: dict[str, tuple[Any, str]] = {
    "local_epochs": (1, "local_steps says how many steps a node makes; without it they are one pass over the data"),
    "strong_convexity": (None, "explain(system, curvature=(L, mu)) takes it from Python"),
    "smoothness": (None, "explain(system, curvature=(L, mu)) takes it from Python"),
    "server_learning_rate": (1.0, "TrainingPlan(server_learning_rate=...) takes it from Python"),
    "projection_radius": (None, "TrainingPlan(projection_radius=...) takes it from Python"),
    "on_nonfinite": ("drop", "an update that holds NaN or infinity is dropped, and its node named in rounds.jsonl"),
}
_REMOVED_WEIGHTINGS = {
    "adaptive": (f"{REMOVED}adaptive", "it did no better than 'serving-rate' in our trainings; 'auto' does"),
    "bound-min": (
        "exitflow.federated.weighting:bound_min",
        "it did no better than 'serving-rate' in our trainings; as a weighting of your own it is "
        "'exitflow.federated.weighting:bound_min'",
    ),
}
_REMOVED_SCHEDULES = {"theorem": "exitflow.federated.schedules.theorem is its function, for Python"}


def modernised(old: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of a system that this or an earlier version has written, as they are written today."""
    if not isinstance(old.get("training"), Mapping):
        return dict(old)
    training = dict(old["training"])
    for key, (neutral, advice) in _REMOVED.items():
        if training.pop(key, neutral) != neutral:
            raise ConfigError(f"has been removed: {advice}", key=f"training.{key}")
    for name in _NOW_TABLES:
        if isinstance(training.get(name), str):
            training[name] = {"name": training[name]}
    for key, (table, new_key) in _MOVED.items():
        if key in training:
            training[table] = {**training.get(table, {}), new_key: training.pop(key)}
    weighting = training.get("weighting")
    if weighting in _REMOVED_WEIGHTINGS:
        training["weighting"] = _REMOVED_WEIGHTINGS[weighting][0]
    return {**old, "training": training}


def refuse_older_keys(training: Mapping[str, Any]) -> None:
    """Refuse a [training] table with what only earlier versions knew, and say what stands there today."""
    for key, value in training.items():
        if key in _MOVED:
            table, new_key = _MOVED[key]
            raise ConfigError(f"is now {new_key} in the table [training.{table}]", key=key)
        if key in _REMOVED:
            raise ConfigError(f"has been removed: {_REMOVED[key][1]}", key=key)
        if key in _NOW_TABLES and isinstance(value, str):
            raise ConfigError(f"is a table now: write training.{key}.name = {value!r}", key=key)
    weighting = training.get("weighting")
    if isinstance(weighting, str) and weighting in _REMOVED_WEIGHTINGS:
        raise ConfigError(f"{weighting!r} has been removed: {_REMOVED_WEIGHTINGS[weighting][1]}", key="weighting")
    if isinstance(schedule := training.get("schedule"), dict) and schedule.get("name") in _REMOVED_SCHEDULES:
        problem = f"{schedule['name']!r} has been removed: {_REMOVED_SCHEDULES[schedule['name']]}"
        raise ConfigError(problem, key="schedule.name")
