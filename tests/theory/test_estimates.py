import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exitflow.federated.schedules import theorem
from exitflow.theory.estimates import Measured, Setup, curvature_of_rates, estimated_inputs


@given(st.floats(0.01, 10), st.floats(1, 50), st.integers(1, 8), st.integers(2, 400))
def test_the_theorems_own_rates_give_back_its_constants(mu, condition, num_steps, num_rounds):
    """8 kappa >= J holds; and kappa <= J T / 8, or so few steps cannot tell."""
    num_rounds += round(8 * condition / num_steps)
    rates = theorem(mu, condition * mu, num_steps)
    found = curvature_of_rates(rates(1, 0), rates(num_rounds, num_steps - 1), num_rounds * num_steps)
    assert found == pytest.approx((condition * mu, mu), rel=1e-6)


@pytest.mark.parametrize("last", [0.1, 0.2, 0.0999])
def test_rates_that_hardly_fall_belong_to_the_worst_condition_that_the_steps_can_tell(last):
    assert curvature_of_rates(0.1, last, 800) == pytest.approx((2.5, 2.5 / 100))


def test_the_condition_number_is_one_at_least():
    smoothness, mu = curvature_of_rates(0.1, 1e-9, 10)
    assert smoothness == mu == pytest.approx(2.5)
    assert curvature_of_rates(0.1, 0.1, 1) == pytest.approx((2.5, 2.5))


def estimate(**changes):
    measured = Measured(np.array([[1.0, 2.0]]), np.array([[3.0, 4.0]]), np.array([2.5, 2.4]), np.array([10.0, 20.0]))
    fields = {
        "serve_share": np.array([0.8, 0.2]),
        "samples": np.array([40.0]),
        "probabilities": np.array([[0.5, 0.5]]),
        "num_rounds": 100,
        "num_steps": 8,
        "first_rate": 1.0,
        "last_rate": 0.01,
    }
    return estimated_inputs(measured, Setup(**fields), **changes)


def test_the_constants_come_from_what_was_measured():
    inputs = estimate()
    assert inputs.loss_bound == 2.5  # the highest loss at the start
    assert inputs.gradient_variance.tolist() == [[1.0, 2.0]]
    assert inputs.squared_gradient_bound == 4.0
    assert inputs.pseudo_dimension.tolist() == [10, 20]
    assert inputs.smoothness == 0.25
    assert inputs.strong_convexity == pytest.approx(2 * 99 / 799)
    assert inputs.squared_distance == pytest.approx(2 * 2.5 / inputs.strong_convexity)
    assert inputs.heterogeneity == 2.5
    assert inputs.uniform_constant == 1.0  # the rule of thumb, not the proof's 320


def test_curvature_that_is_known_goes_before_what_the_rates_say():
    inputs = estimate(curvature=(4.0, 0.5))
    assert (inputs.smoothness, inputs.strong_convexity) == (4.0, 0.5)
