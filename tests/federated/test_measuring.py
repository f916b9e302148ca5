import json
import math

import numpy as np
import pytest

from exitflow.errors import TrainingError
from exitflow.federated.measuring import GradientTable, exit_means, measure_gradients, measured_profile
from exitflow.federated.schedules import make_schedule
from exitflow.federated.training_spec import OptimiserSpec, TrainingSpec
from exitflow.federated.types import GradientFigures
from exitflow.federated.weighting import ExitProfile
from exitflow.theory.estimates import curvature_of_rate

NAN = math.nan


class Figures:
    """A backend that knows the variance of every pair."""

    def __init__(self, variances):
        self.variances = variances

    def measure_gradients(self, state, pairs):
        found = [self.variances[pair] for pair in pairs]
        return [GradientFigures(value, 10 * value, 11 * value, 2 + value / 10) for value in found]


PROFILE = ExitProfile(
    serve_share=np.array([0.5, 0.5]),
    multiply_adds=np.ones(2),
    samples=np.array([30.0, 10.0, 1.0]),
    probabilities=np.array([[1.0, 0.0], [0.5, 0.5], [1.0, 0.0]]),
    num_rounds=1,
)
TABLE = measure_gradients(
    ["a", "b", "c"],
    PROFILE.probabilities,
    None,
    Figures({("a", 1): 1.0, ("b", 1): 4.0, ("b", 2): 7.0, ("c", 1): NAN}),
)


def test_figures_are_averaged_over_nodes_by_their_samples():
    assert exit_means(TABLE.mean_variance, PROFILE.samples).tolist() == [(30 * 1.0 + 10 * 4.0) / 40, 7.0]


def test_an_exit_whose_gradients_nobody_can_measure_is_named():
    with pytest.raises(TrainingError, match="exit 2: the nodes that train it have too few samples"):
        exit_means(np.array([[1.0, NAN], [NAN, NAN]]), np.ones(2))


def test_a_table_survives_json_to_the_bit():
    table = GradientTable(*(np.array([[1 / 3, NAN], [2 / 7, 1e-300]]) * factor for factor in (1, 2, 3, 4)))
    again = GradientTable.from_json(json.loads(json.dumps(table.to_json(), allow_nan=False)))
    for name, values in vars(table).items():
        np.testing.assert_array_equal(getattr(again, name), values)


@pytest.mark.parametrize(
    ("kept", "gain"),
    [
        ("keep", 10.0),  # under momentum 0.9 a rate works like one ten times as large
        ("reset", np.mean([sum(0.9**later for later in range(8 - step)) for step in range(8)])),  # to the round's end
    ],
)
def test_the_bound_gets_what_was_measured_and_the_last_rate_of_the_training(kept, gain):
    optimiser = OptimiserSpec(momentum=0.9, momentum_between_rounds=kept)
    spec = TrainingSpec(rounds=100, learning_rate=0.1, optimiser=optimiser)
    bound = measured_profile(PROFILE, TABLE, num_parameters=[5, 9], spec=spec, num_steps=8).bound
    assert bound.gradient_variance[:2, 0].tolist() == [10.0, 40.0]
    assert bound.gradient_variance[2, 0] == pytest.approx(17.5)  # could not measure: as the others
    assert bound.gradient_bound[1].tolist() == [44.0, 77.0]
    assert bound.gradient_bound[2, 0] == pytest.approx(11 * 1.75)
    assert bound.loss_bound == pytest.approx(2.7)
    assert bound.pseudo_dimension.tolist() == [5, 9]
    last = gain * make_schedule(spec, 8)(100, 7)
    assert bound.smoothness == bound.strong_convexity == pytest.approx(curvature_of_rate(last, 100, 8))
    assert (bound.num_rounds, bound.num_steps, bound.server_learning_rate) == (100, 8, 1.0)


def test_curvature_that_is_known_is_used():
    known = {"num_parameters": [5, 9], "spec": TrainingSpec(), "num_steps": 8}
    bound = measured_profile(PROFILE, TABLE, **known, curvature=(3.0, 0.1)).bound
    assert (bound.smoothness, bound.strong_convexity) == (3.0, 0.1)
