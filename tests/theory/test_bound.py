"""The terms of Theorem 1 against the paper's lines, and the weights that are best for each of them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exitflow.theory.bound import (
    error_bound,
    gradient_bounds,
    inverse_shares,
    least_bias,
    least_generalisation,
    least_noise,
    least_optimisation,
    noise_parts,
    optimisation_error,
    statistical_heterogeneity,
    total_variation,
)
from tests.oracles import theory
from tests.theory.cases import bound_inputs, inputs_and_weights, literal, paper_inputs

near = pytest.approx


@given(inputs_and_weights())
def test_every_term_is_that_of_the_paper(case):
    inputs, weights = case
    found, paper = error_bound(inputs, weights), literal(inputs)
    assert found.generalisation == near(theory.generalisation(paper, weights), rel=1e-12)
    assert found.bias == near(theory.bias(paper, weights), rel=1e-9, abs=1e-12)
    assert found.parts.noise == near(theory.noise(paper, weights), rel=1e-12)
    assert found.parts.heterogeneity == near(theory.heterogeneity(paper), rel=1e-12)
    assert found.parts.drift == near(theory.drift(paper), rel=1e-12)
    assert found.parts.sampling == near(theory.sampling(paper, weights), rel=1e-12, abs=1e-12)
    assert found.optimisation == near(theory.optimisation(paper, weights), rel=1e-12)
    assert found.total == near(theory.total(paper, weights), rel=1e-12)


def test_the_terms_by_hand():
    """One node, two exits, the second trained in half of the rounds: alpha = (3/4, 1/4); kappa 2, gamma 15, J T = 5, so the decay is 1/10."""
    inputs = paper_inputs(
        serve_share=np.array([0.25, 0.75]),
        samples=np.array([100.0]),
        probabilities=np.array([[1.0, 0.5]]),
        pseudo_dimension=np.array([1.0, 4.0]),
        gradient_variance=np.array([[16.0, 32.0]]),
        gradient_bound=np.array([[20.0, 40.0]]),
        loss_bound=10.0,
        smoothness=2.0,
        strong_convexity=1.0,
        heterogeneity=3.0,
        squared_distance=6.0,
        num_rounds=1,
        num_steps=5,
        uniform_constant=1.0,
    )
    found = error_bound(inputs, np.array([0.75, 0.25]))
    assert found.generalisation == near(10 * (0.75 * 0.1 + 0.25 * 0.2))
    assert found.bias == near(2 * 10 * 0.5)
    assert found.parts.noise == near(9 + 2)
    assert found.parts.heterogeneity == near(36)
    assert found.parts.drift == near(8 * 16 * 40)  # G^2 = max G_{i,e}, not its square
    assert found.parts.sampling == near(4 * 25 * (1 / 16) * 1 * 40)
    assert found.optimisation == near(0.1 * (2 * found.parts.total + 8 * 6))


@given(inputs_and_weights(), st.sampled_from([0.3, 1.0]))
def test_exits_that_are_trained_at_once_are_bounded_too(case, participation):
    inputs, weights = case
    drawn_together = np.where(inputs.probabilities > 0, participation, 0.0)
    inputs = replace(inputs, probabilities=drawn_together, joint_exits=True)
    found, paper = noise_parts(inputs, weights), literal(inputs)
    assert found.noise >= theory.joint_noise(paper, weights) * (1 - 1e-12)
    assert found.sampling >= theory.joint_sampling(paper, weights) * (1 - 1e-12)


@pytest.mark.parametrize("joint", [False, True])
def test_noise_of_exits_that_are_alike_averages_out_only_where_each_has_its_own_batch(joint):
    """One node with two exits of equal weight. From one batch their gradients are the same, and so is their mean."""
    alike = {"gradient_variance": np.full((1, 2), 8.0), "gradient_bound": np.full((1, 2), 8.0)}
    one_node = {"serve_share": np.full(2, 0.5), "samples": np.ones(1), "probabilities": np.full((1, 2), 0.5)}
    inputs = paper_inputs(**alike, **one_node, pseudo_dimension=np.ones(2), num_steps=1, joint_exits=joint)
    found = noise_parts(inputs, np.full(2, 0.5))
    assert found.noise == near(8.0 if joint else 4.0)
    assert found.sampling == near(4 * (8.0 if joint else 4.0))


def test_a_node_counts_as_often_as_it_has_exits_and_not_as_the_system_has():
    inputs = paper_inputs(
        serve_share=np.full(2, 0.5),
        samples=np.ones(2),
        probabilities=np.array([[0.5, 0.0], [0.0, 0.5]]),
        gradient_variance=np.full((2, 2), 8.0),
        gradient_bound=np.full((2, 2), 8.0),
        pseudo_dimension=np.ones(2),
    )
    weights = np.full(2, 0.5)
    assert noise_parts(replace(inputs, joint_exits=True), weights) == noise_parts(inputs, weights)


def test_the_optimisation_error_falls_as_one_over_the_steps():
    weights = np.full(3, 1 / 3)
    few, many = (optimisation_error(paper_inputs(num_rounds=rounds), weights) for rounds in (10**4, 10**6))
    assert few / many == near(100, rel=0.01)


@given(bound_inputs(), st.floats(0, 10))
def test_a_gradients_second_moment_is_bounded_by_its_variance_and_the_diameter(inputs, diameter):
    found = gradient_bounds(inputs.gradient_variance, inputs.smoothness, diameter)
    for value, variance in zip(found.flat, inputs.gradient_variance.flat, strict=True):
        assert value == near(theory.gradient_bound(variance, inputs.smoothness, diameter), rel=1e-12)


@given(bound_inputs())
def test_heterogeneity_is_that_of_the_paper(inputs):
    at_best, least = inputs.gradient_bound, inputs.gradient_variance  # any two tables of numbers
    expected = theory.statistical_heterogeneity(at_best.tolist(), least.tolist(), inputs.probabilities.tolist())
    assert statistical_heterogeneity(at_best, least, inputs.trained) == expected


def test_total_variation():
    assert total_variation(np.array([1.0, 0.0]), np.array([0.0, 1.0])) == 1.0
    assert total_variation(np.array([0.5, 0.5]), np.array([0.8, 0.2])) == near(0.3)


LITERAL_OPTIMA = {
    least_generalisation: theory.least_generalisation,
    least_bias: lambda paper: paper.Lambda,
    least_optimisation: theory.least_optimisation,
    least_noise: theory.least_noise,
}


@pytest.mark.parametrize("optimum", LITERAL_OPTIMA)
@given(bound_inputs())
def test_the_best_weights_for_an_error_alone_are_those_of_the_paper(optimum, inputs):
    assert optimum(inputs).tolist() == near(LITERAL_OPTIMA[optimum](literal(inputs)), rel=1e-9)


def test_exits_with_the_same_lowest_complexity_ratio_share_the_weight():
    inputs = paper_inputs(pseudo_dimension=paper_inputs().exit_samples * np.array([2.0, 1.0, 1.0]))
    assert least_generalisation(inputs).tolist() == [0, 0.5, 0.5]


OPTIMA = {
    "generalisation": (least_generalisation, lambda inputs, weights: error_bound(inputs, weights).generalisation),
    "bias": (least_bias, lambda inputs, weights: error_bound(inputs, weights).bias),
    "optimisation": (least_optimisation, optimisation_error),
    "noise": (least_noise, lambda inputs, weights: noise_parts(inputs, weights).noise),
}


@pytest.mark.heavy
@pytest.mark.parametrize("name", OPTIMA)
@given(inputs_and_weights())
def test_no_weights_are_better_for_an_error_than_its_own(name, case):
    optimum, error = OPTIMA[name]
    inputs, others = case
    best = optimum(inputs)
    assert best.sum() == near(1)
    assert (best >= 0).all()
    assert error(inputs, best) <= error(inputs, others) * (1 + 1e-9) + 1e-12


def test_the_optima_by_hand():
    inputs = paper_inputs(probabilities=np.array([[1.0, 0, 0]] * 4 + [[0, 1.0, 0]] * 2 + [[0, 0, 1.0]]))
    assert least_generalisation(inputs).tolist() == [1, 0, 0]  # the fewest parameters for equal samples
    assert least_bias(inputs).tolist() == near([0.8, 0.15, 0.05])
    inverse = np.array([4 / 0.2, 2 / 0.5, 1 / 3.0])  # sum_i (|S_i| / |S_e|)^2 is 1/4, 1/2, 1
    assert least_noise(inputs).tolist() == near((inverse / inverse.sum()).tolist())
    assert least_optimisation(inputs).tolist() == near((inverse / inverse.sum()).tolist())  # nobody is ever absent


@given(st.lists(st.floats(0, 10), min_size=2, max_size=4))
def test_exits_that_cost_nothing_share_all_the_weight(costs):
    weights = inverse_shares(np.array([0.0, *costs]))
    free = np.array([0.0, *costs]) == 0
    assert weights.tolist() == near((free / free.sum()).tolist())


def variance_of_a_draw(gradients, probabilities, weights):
    """E||U - E U||^2 of one node that trains exit e, or none, with p_e, and counts alpha_e / p_e times: all draws."""
    mean = sum(weight * gradient for weight, gradient in zip(weights, gradients, strict=True))
    draws = [(p, weight / p * gradient) for p, weight, gradient in zip(probabilities, weights, gradients, strict=True)]
    draws.append((1 - sum(probabilities), np.zeros_like(mean)))
    return sum(chance * np.sum((update - mean) ** 2) for chance, update in draws)


def sampling_of_one_node(gradients, probabilities, weights):
    """What Lemma 3 allows it: B's last part is 4 J^2 times that."""
    exits = len(weights)
    inputs = paper_inputs(
        serve_share=np.full(exits, 1 / exits),
        samples=np.ones(1),
        probabilities=np.array([probabilities]),
        pseudo_dimension=np.ones(exits),
        gradient_variance=np.ones((1, exits)),
        gradient_bound=np.array([[np.sum(gradient**2) for gradient in gradients]]),
        num_steps=1,
    )
    return noise_parts(inputs, np.array(weights)).sampling / 4


@given(
    st.lists(st.tuples(st.floats(0.01, 1), st.floats(0, 1), st.floats(0, 3), st.floats(0, 3)), min_size=1, max_size=4)
)
def test_lemma_3_holds_where_gradients_do_not_point_apart(exits):
    shares = np.array([each[0] for each in exits])
    probabilities = shares / max(1.0, shares.sum())
    weights, gradients = [each[1] for each in exits], [np.array(each[2:]) for each in exits]
    allowed = sampling_of_one_node(gradients, probabilities, weights)
    assert variance_of_a_draw(gradients, probabilities, weights) <= allowed * (1 + 1e-9) + 1e-12


def test_lemma_3_does_not_hold_where_they_do():
    """Why docs/theory.md calls it a slip of the paper."""
    case = [np.array([1.0]), np.array([-1.0])], [0.5, 0.5], [0.5, 0.5]
    assert variance_of_a_draw(*case) == near(1.0)
    assert sampling_of_one_node(*case) == near(0.5)


def test_with_another_server_rate_than_1_the_theorem_does_not_hold_as_printed():
    """F = w^2 / 2 without noise, one node, the theorem's rates, start at 1; docs/theory.md has the figures."""
    alone = {"serve_share": np.ones(1), "samples": np.ones(1), "probabilities": np.ones((1, 1))}
    nothing = {"gradient_variance": np.zeros((1, 1)), "gradient_bound": np.ones((1, 1)), "heterogeneity": 0.0}
    curved = {"smoothness": 1.0, "strong_convexity": 1.0, "squared_distance": 1.0, "num_steps": 1}

    def error_and_bound(eta_s, rounds=1000):
        inputs = paper_inputs(
            **alone, **nothing, **curved, pseudo_dimension=np.ones(1), num_rounds=rounds, server_learning_rate=eta_s
        )
        weight = 1.0
        for step in range(1, rounds + 1):
            weight -= eta_s * 2 / (inputs.gamma + step) * weight
        return weight**2 / 2, optimisation_error(inputs, np.ones(1))

    error, bound = error_and_bound(1.0)
    assert error < bound
    error, bound = error_and_bound(0.1)
    assert error == near(0.070, abs=5e-4)
    assert bound == near(0.004, abs=5e-4)
