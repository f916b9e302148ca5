"""Why one weighting and not another: what the weights of each cost by Theorem 1, for one system and its data."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from exitflow.config import require
from exitflow.data.dataset import Dataset
from exitflow.errors import ConfigError, TrainingError
from exitflow.federated.measuring import GradientTable, measure_gradients
from exitflow.federated.training_spec import GIVEN, TrainingSpec
from exitflow.federated.weighting import WEIGHTINGS, ExitProfile, bound_min
from exitflow.parts import part_name
from exitflow.runs.arguments import check_dataset, check_system
from exitflow.runs.backends import open_backend
from exitflow.system.assembly import Assembly, dataset_of
from exitflow.system.system import System
from exitflow.theory.bound import BoundInputs, error_bound
from exitflow.theory.error_costs import ErrorTerms, calibrated_costs, fixed_error

LEAST = "bound-min"  # the weights that cost least by the bound, which no weighting of a system file has


@dataclass(frozen=True)
class Explanation:
    """The weights of every weighting in the last round, and what they cost."""

    system: str
    weighting: str  # the system's own, or GIVEN
    weights: dict[str, tuple[float, ...]]
    terms: dict[str, ErrorTerms]  # calibrated: no error above the loss that can be lost
    inputs: dict[str, BoundInputs]  # the theorem's constants, measured or estimated, for the training under each
    why_left_out: str = ""  # why the system cannot be trained under the other weightings, where there are any

    @property
    def cheapest(self) -> str:
        """The weighting with the lowest total, among equals the first in the table."""
        least = min(terms.total for terms in self.terms.values())
        return next(name for name, terms in self.terms.items() if terms.total <= least * (1 + 1e-9))

    def to_json(self) -> dict[str, Any]:
        """The explanation as values that JSON can hold."""
        inputs = self.inputs[self.weighting]
        names = ("loss_bound", "smoothness", "strong_convexity", "condition", "squared_gradient_bound")
        more = ("heterogeneity", "squared_distance", "num_rounds", "num_steps")
        return {
            "system": self.system,
            "weighting": self.weighting,
            "cheapest": self.cheapest,
            "serve_share": inputs.serve_share.tolist(),
            "exit_samples": inputs.exit_samples.tolist(),
            "num_parameters": inputs.pseudo_dimension.tolist(),
            "constants": {name: getattr(inputs, name) for name in (*names, *more)},
            "fixed_error": fixed_error(inputs),
            "weightings": {name: self._weighting_json(name) for name in self.weights},
        }

    def _weighting_json(self, name: str) -> dict[str, Any]:
        weights = self.weights[name]
        return {
            "weights": list(weights),
            "exit_samples": self.inputs[name].exit_samples.tolist(),
            "terms": self.terms[name].to_json(),
            "bound": error_bound(self.inputs[name], np.array(weights)).to_json(),
        }


def explain(
    system: System,
    *,
    backend: str = "serial",
    workers: int | None = None,
    dataset: Dataset | None = None,
    curvature: tuple[float, float] | None = None,
) -> Explanation:
    """Measure the gradients of `system` at its initial model, and set all weightings side by side.

    Each with what nodes train under it. Those under which `system` could not be trained are left out. `curvature` is
    (L, mu) of the loss, the theorem's smoothness and strong convexity, where they are known.
    """
    check_system(system)
    check_dataset(dataset)
    check_curvature(curvature)
    dataset = dataset or dataset_of(system)
    named = {name: name for name in (*WEIGHTINGS, system.training.weighting)} | {LEAST: part_name("", bound_min)}
    trainings = {name: replace(system.training, weighting=each, exit_weights=()) for name, each in named.items()}
    if system.training.exit_weights:
        trainings[GIVEN] = system.training

    def measured_for(training: TrainingSpec) -> ExitProfile:
        assembly = Assembly(replace(system, training=training), dataset)
        return assembly.measured_profile(_measured(assembly, backend, workers), curvature)

    own = system.training.trains_all_exits
    measured = {own: measured_for(system.training)}
    why_left_out = ""
    for training in [each for each in trainings.values() if each.trains_all_exits != own][:1]:
        try:
            measured[not own] = measured_for(training)
        except (ConfigError, TrainingError) as error:
            why_left_out = str(error)
    profiles = {
        name: measured[training.trains_all_exits]
        for name, training in trainings.items()
        if training.trains_all_exits in measured
    }
    weights = {
        name: trainings[name].exit_weighting(profile, system.training.rounds) for name, profile in profiles.items()
    }
    inputs = {name: profile.bound for name, profile in profiles.items() if profile.bound}
    return Explanation(
        system.name,
        system.training.weighting_name,
        {name: tuple(each.tolist()) for name, each in weights.items()},
        {name: calibrated_costs(inputs[name]).terms(each) for name, each in weights.items()},
        inputs,
        why_left_out,
    )


def _measured(assembly: Assembly, backend_name: str, workers: int | None) -> GradientTable:
    nodes = [node.name for node in assembly.system.topology.nodes]
    state, probabilities = assembly.initial_state(), assembly.profile.probabilities
    with tempfile.TemporaryDirectory() as folder:
        trainer = assembly.trainer(Path(folder))
        with open_backend(backend_name, trainer, state, workers=workers) as backend:
            return measure_gradients(nodes, probabilities, state, backend)


def check_curvature(curvature: tuple[float, float] | None) -> None:
    """Refuse constants that no function has."""
    if curvature is not None:
        smoothness, mu = curvature
        problem = f"expected (L, mu) with L >= mu > 0, got {curvature}"
        require(0 < mu <= smoothness < math.inf, "curvature", problem)
