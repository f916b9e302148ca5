import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exitflow.federated.schedules import theorem
from exitflow.theory.bound import optimisation_error
from exitflow.theory.error_costs import weight_costs
from exitflow.theory.estimates import Measured, Setup, curvature_of_rate, estimated_inputs


@given(st.floats(0.01, 10), st.integers(1, 20), st.integers(1, 400))
def test_the_theorems_last_rate_gives_back_its_constants_where_kappa_is_1(mu, num_steps, num_rounds):
    last = theorem(mu, mu, num_steps)(num_rounds, num_steps - 1)
    assert curvature_of_rate(last, num_rounds, num_steps) == pytest.approx(mu, rel=1e-9)


@pytest.mark.parametrize("num_steps", [1, 3, 117])
def test_more_rounds_to_the_same_last_rate_never_allow_a_larger_error(num_steps):
    weights = np.array([0.5, 0.5])
    rounds = [1, 2, 10, 100, 1000, 100_000]
    errors = [optimisation_error(estimate(num_rounds=each, num_steps=num_steps), weights) for each in rounds]
    assert errors == sorted(errors, reverse=True)


def test_noise_costs_the_last_rate_times_its_part_of_the_bound():
    inputs = estimate()
    assert weight_costs(inputs).noise == pytest.approx(0.01 * inputs.noise_by_exit)
    assert weight_costs(inputs).sampling == pytest.approx(0.01 * inputs.sampling_by_exit)


def estimate(curvature=None, **changes):
    measured = Measured(np.array([[1.0, 2.0]]), np.array([[3.0, 4.0]]), np.array([2.5, 2.4]), np.array([10.0, 20.0]))
    fields = {
        "serve_share": np.array([0.8, 0.2]),
        "samples": np.array([40.0]),
        "probabilities": np.array([[0.5, 0.5]]),
        "num_rounds": 100,
        "num_steps": 8,
        "last_rate": 0.01,
    }
    return estimated_inputs(measured, Setup(**{**fields, **changes}), curvature)


def test_the_constants_come_from_what_was_measured():
    inputs = estimate()
    assert inputs.loss_bound == 2.5  # the highest loss at the start
    assert inputs.gradient_variance.tolist() == [[1.0, 2.0]]
    assert inputs.squared_gradient_bound == 4.0
    assert inputs.pseudo_dimension.tolist() == [10, 20]
    assert inputs.smoothness == inputs.strong_convexity == pytest.approx(2 / (0.01 * (7 + 800)))
    assert inputs.squared_distance == pytest.approx(2 * 2.5 / inputs.strong_convexity)
    assert inputs.heterogeneity == 2.5
    assert inputs.uniform_constant == 1.0  # the rule of thumb, not the proof's 320


def test_curvature_that_is_known_goes_before_what_the_rate_says():
    inputs = estimate(curvature=(4.0, 0.5))
    assert (inputs.smoothness, inputs.strong_convexity) == (4.0, 0.5)
