"""What other weights than those of a training would have cost by Theorem 1, from the gradients that it measured.

The gradients at the initial model do not depend on the weighting, so one training that measured them tells the cost of
all weightings under which nodes train the same.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from exitflow.errors import RunError, TrainingError
from exitflow.federated.measuring import GradientTable, measured_profile
from exitflow.federated.sampling import probability_matrix
from exitflow.federated.weighting import WEIGHTINGS, ExitProfile, bound_min
from exitflow.report.series import Training
from exitflow.theory.error_costs import ErrorTerms, calibrated_costs


def recorded_terms(training: Training, weightings: Iterable[str]) -> dict[str, ErrorTerms]:
    """Of the weights in the last round, calibrated; {} where the training measured no gradients."""
    if not training.profile.gradients:
        return {}
    try:
        profile = _measured_profile(training)
        assert profile.bound is not None
        costs, last = calibrated_costs(profile.bound), profile.num_rounds
        known = {**WEIGHTINGS, "bound-min": bound_min}
        return {name: costs.terms(known[name](profile, last)) for name in weightings}
    except (ArithmeticError, AttributeError, LookupError, TrainingError, TypeError, ValueError):
        raise RunError(f"{training.name}: its profile is not as exitflow writes it; restore it") from None


def _measured_profile(training: Training) -> ExitProfile:
    known, spec = training.profile, training.system.training
    samples = {name: float(count) for name, count in known.node_samples.items()}
    profile = ExitProfile(
        serve_share=np.array(known.serve_share, dtype=np.float64),
        multiply_adds=np.array(known.multiply_adds, dtype=np.float64),
        samples=np.array(list(samples.values())),
        probabilities=probability_matrix(training.system.topology, samples, spec),
        num_rounds=spec.rounds,
        normalised_step=spec.server_step == "coverage",
    )
    table = GradientTable.from_json(known.gradients or {})
    steps, parameters = known.num_steps or 0, list(known.num_parameters)
    if steps < 1:
        raise ValueError(steps)
    return measured_profile(profile, table, num_parameters=parameters, spec=spec, num_steps=steps)
