"""What the weights cost, and the cheapest, against other ways to find them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize

from exitflow.theory.bound import error_bound, least_optimisation
from exitflow.theory.error_costs import WeightCosts, calibrated_costs, cheapest_weights, fixed_error, weight_costs
from tests.theory.cases import inputs_and_weights, paper_inputs


@given(inputs_and_weights())
def test_the_bound_is_the_cost_of_the_weights_and_what_is_fixed(case):
    inputs, weights = case
    expected = error_bound(inputs, weights).total
    assert weight_costs(inputs).terms(weights).total + fixed_error(inputs) == pytest.approx(expected, rel=1e-12)


@given(inputs_and_weights())
def test_no_calibrated_error_is_more_than_the_loss_that_can_be_lost(case):
    inputs, weights = case
    most, costs, literal = inputs.loss_bound, calibrated_costs(inputs), weight_costs(inputs)
    for each in (weights, *np.eye(len(weights))):
        terms, before = costs.terms(each), literal.terms(each)
        assert terms.generalisation <= most * (1 + 1e-9)
        assert terms.bias <= most * (1 + 1e-9)
        assert terms.noise + terms.sampling <= most * (1 + 1e-9)
        for name in ("generalisation", "bias", "noise", "sampling"):
            assert getattr(terms, name) <= getattr(before, name) * (1 + 1e-9)


def test_what_is_below_the_loss_bound_is_left_as_it_is():
    """Many steps, many samples: only the bias, which is 4 M at worst, is scaled."""
    inputs = paper_inputs(num_rounds=10**7, samples=np.full(7, 1e12), uniform_constant=1.0)
    literal, costs = weight_costs(inputs), calibrated_costs(inputs)
    assert costs.noise.tolist() == literal.noise.tolist()
    assert costs.sampling.tolist() == literal.sampling.tolist()
    assert costs.generalisation.tolist() == literal.generalisation.tolist()
    assert costs.bias == pytest.approx(2.3 / 0.95)


def test_the_deviation_of_each_exit_is_cut_at_the_loss_and_then_all_are_scaled_alike():
    """By the theorem 2 M sqrt(Pdim / |S|): 1.2 M, 4 M and 0.4 M here. An exit's loss is no more than M off."""
    ratio = np.array([0.6, 2.0, 0.2]) ** 2
    inputs = paper_inputs(pseudo_dimension=paper_inputs().exit_samples * ratio, uniform_constant=1.0)
    most = inputs.loss_bound
    assert weight_costs(inputs).generalisation.tolist() == pytest.approx([1.2 * most, 4 * most, 0.4 * most])
    assert calibrated_costs(inputs).generalisation.tolist() == pytest.approx([0.6 * most, most, 0.2 * most])


def test_noise_and_sampling_are_scaled_until_the_worst_weights_cost_the_loss():
    """One exit has the most noise, another the most sampling: what counts is their sum."""
    inputs = paper_inputs(num_rounds=1, gradient_bound=np.array([[50.0, 0.8, 0.1]] * 7))
    literal, costs = weight_costs(inputs), calibrated_costs(inputs)
    assert literal.noise.argmax() != literal.sampling.argmax()
    assert (literal.noise + literal.sampling).max() > inputs.loss_bound
    assert (costs.noise + costs.sampling).max() == pytest.approx(inputs.loss_bound)


def test_a_deviation_that_could_be_anything_tells_no_exit_from_another():
    costs = calibrated_costs(paper_inputs())  # 320 sqrt(Pdim / |S|) is far above 1 at all exits
    assert costs.generalisation.tolist() == pytest.approx([2.3] * 3)


@st.composite
def any_costs(draw):
    num_exits = draw(st.integers(1, 5))
    share = np.array([draw(st.just(0.0) | st.floats(1e-3, 1)) for _ in range(num_exits)])
    share[draw(st.integers(0, num_exits - 1))] += 1e-3  # somebody serves
    coefficient = st.just(0.0) | st.floats(1e-3, 10)
    columns = [np.array([draw(coefficient) for _ in range(num_exits)]) for _ in range(3)]
    return WeightCosts(share / share.sum(), columns[0], draw(coefficient), columns[1], columns[2])


def by_scipy(costs):
    """min over w = Lambda + up - down of the smooth problem in (up, down), by sequential quadratic programming."""
    share = costs.serve_share
    n = len(share)

    def objective(x):
        weights = share + x[:n] - x[n:]
        square = costs.noise + costs.sampling
        return costs.generalisation @ weights + costs.bias * x.sum() / 2 + square @ weights**2

    constraints = [
        {"type": "eq", "fun": lambda x: x[:n].sum() - x[n:].sum()},
        {"type": "ineq", "fun": lambda x: share + x[:n] - x[n:]},
    ]
    bounds = [(0, 1)] * (2 * n)
    start = np.concatenate([1 / n - np.minimum(share, 1 / n), share - np.minimum(share, 1 / n)])
    found = minimize(
        objective,
        start,
        method="SLSQP",
        bounds=bounds,
        constraints=constraints,
        options={"ftol": 1e-12, "maxiter": 500},
    )
    weights = np.maximum(share + found.x[:n] - found.x[n:], 0)
    return weights / weights.sum()


@given(any_costs())
def test_the_cheapest_weights_cost_no_more_than_what_a_general_solver_finds(costs):
    best = cheapest_weights(costs)
    assert (best >= 0).all()
    assert best.sum() == pytest.approx(1)
    other = by_scipy(costs)
    assert costs.terms(best).total <= costs.terms(other).total + 1e-6


@given(any_costs(), st.lists(st.floats(0, 1), min_size=5, max_size=5))
def test_no_weights_cost_less_than_the_cheapest(costs, others):
    others = np.array(others[: len(costs.serve_share)]) + 1e-6
    candidates = [others / others.sum(), costs.serve_share, *np.eye(len(others))]
    least = costs.terms(cheapest_weights(costs)).total
    assert all(least <= costs.terms(each).total + 1e-7 for each in candidates)


def costs_with(**changes):
    fields = {"generalisation": np.zeros(2), "bias": 0.0, "noise": np.zeros(2), "sampling": np.zeros(2)}
    return WeightCosts(np.array([0.8, 0.2]), **(fields | changes))


def test_each_error_alone_gives_its_own_optimum():
    assert cheapest_weights(costs_with(bias=1.0)).tolist() == pytest.approx([0.8, 0.2])
    assert cheapest_weights(costs_with(generalisation=np.array([2.0, 1.0]))).tolist() == pytest.approx([0, 1])
    assert cheapest_weights(costs_with(noise=np.array([3.0, 1.0]))).tolist() == pytest.approx([0.25, 0.75])


def test_noise_moves_the_weights_until_it_is_worth_no_more_bias():
    """Moving d from exit 1 to exit 2 costs 1 d of bias and changes the noise by -2 * 2 (0.8 - d) d: stops at 4 w_1 = 1."""
    assert cheapest_weights(costs_with(bias=1.0, noise=np.array([2.0, 0.0]))).tolist() == pytest.approx([0.25, 0.75])
    assert cheapest_weights(costs_with(bias=3.3, noise=np.array([2.0, 0.0]))).tolist() == pytest.approx([0.8, 0.2])


def test_short_trainings_avoid_noise_and_long_ones_bias():
    """Exit 3 serves most and is the noisiest: with few steps it gets less weight, with many what it serves."""
    share = np.array([0.05, 0.15, 0.8])
    short, long = (
        cheapest_weights(calibrated_costs(paper_inputs(serve_share=share, num_rounds=rounds))) for rounds in (1, 10**7)
    )
    assert short[2] < 0.6
    assert long.tolist() == pytest.approx(share.tolist())
    noise_only = least_optimisation(paper_inputs(num_rounds=1))
    assert noise_only[2] < short[2]
