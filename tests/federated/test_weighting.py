from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exitflow.federated.weighting import WEIGHTINGS, ExitProfile, bound_min, steadiest
from exitflow.theory.error_costs import calibrated_costs
from tests.theory.cases import paper_inputs


def profile(**changes):
    """The paper's tree of 7 with the equal partition of 45,000 images and its figures for CIFAR-10."""
    fields = {
        "serve_share": np.array([0.8, 0.15, 0.05]),
        "multiply_adds": np.array([77.7e6, 691.7e6, 1766.4e6]),
        "samples": np.array([3750.0] * 4 + [7500.0] * 2 + [15000.0]),
        "probabilities": np.array([[1.0, 0, 0]] * 4 + [[0, 1.0, 0]] * 2 + [[0, 0, 1.0]]),
        "num_rounds": 100,
        "gradient_variance": np.array([0.00374, 0.00224, 0.00101]),
    }
    known = ExitProfile(**(fields | changes))
    bound = paper_inputs(
        serve_share=known.serve_share, samples=known.samples, probabilities=known.probabilities, num_rounds=100
    )
    return replace(known, bound=bound)


@pytest.mark.parametrize("name", WEIGHTINGS)
@given(round=st.integers(1, 100), shares=st.lists(st.floats(0.01, 1), min_size=3, max_size=3))
def test_every_weighting_gives_a_share_to_each_exit(name, round, shares):
    weights = WEIGHTINGS[name](profile(serve_share=np.array(shares) / sum(shares)), round)
    assert weights.shape == (3,)
    assert (weights >= 0).all()
    assert weights.sum() == pytest.approx(1.0, abs=1e-12)


def test_equal_weight():
    assert WEIGHTINGS["equal-weight"](profile(), 5).tolist() == [1 / 3] * 3


def test_serving_rate_is_the_share_of_requests():
    assert WEIGHTINGS["serving-rate"](profile(), 5).tolist() == pytest.approx([0.8, 0.15, 0.05])


def test_flops_prop_ramps_from_equal_weights_to_the_relative_costs():
    weight = WEIGHTINGS["flops-prop"]
    assert weight(profile(), 1).tolist() == pytest.approx([1 / 3] * 3)
    relative = [77.7 / 1766.4, 691.7 / 1766.4, 1.0]
    assert weight(profile(), 100).tolist() == pytest.approx([cost / sum(relative) for cost in relative])
    at_20 = [relative[0], 0.2, 0.2]
    assert weight(profile(), 20).tolist() == pytest.approx([cost / sum(at_20) for cost in at_20])


def test_balanced_adj_by_hand():
    """o_e = 1 / (v_e^2 sum_i (|S_i| / |S_e|)^2); the sums are 1/4, 1/2 and 1."""
    o = [1 / (0.00374**2 / 4), 1 / (0.00224**2 / 2), 1 / 0.00101**2]
    expected = [(share + value / sum(o)) / 2 for share, value in zip([0.8, 0.15, 0.05], o, strict=True)]
    assert WEIGHTINGS["balanced-adj"](profile(), 1).tolist() == pytest.approx(expected)


@given(st.lists(st.floats(0.01, 1), min_size=3, max_size=3))
def test_no_other_weighting_has_a_lower_calibrated_bound_than_bound_min(shares):
    known = profile(serve_share=np.array(shares) / sum(shares))
    costs = calibrated_costs(known.bound)
    total = {name: costs.terms(weighting(known, 100)).total for name, weighting in WEIGHTINGS.items()}
    assert costs.terms(bound_min(known, 100)).total <= min(total.values()) + 1e-12


def variation(weights, known):
    """What the authors minimise: sum over (i, e) of alpha_{i,e}^2 v_e^2, alpha_{i,e} = Lambda-tilde_e |S_i| / |S_{e,p}|, loop by loop."""
    total = 0.0
    for e in range(3):
        trained_by = [i for i in range(len(known.samples)) if known.probabilities[i, e] > 0]
        s_ep = sum(known.samples[i] for i in trained_by)
        total += sum((weights[e] * known.samples[i] / s_ep) ** 2 * known.gradient_variance[e] ** 2 for i in trained_by)
    return total


@given(st.lists(st.floats(0.001, 1), min_size=3, max_size=3), st.sampled_from([0.0, 0.2]))
def test_no_weights_vary_less_than_the_steadiest(others, help_probability):
    p = help_probability
    known = profile(probabilities=np.array([[1.0, 0, 0]] * 4 + [[p, 1 - p, 0]] * 2 + [[p, p, 1 - 2 * p]]))
    best = variation(steadiest(known), known)
    assert best <= variation(np.array(others) / sum(others), known) * (1 + 1e-12)


def test_exits_whose_gradients_do_not_vary_at_all_share_what_is_not_lambdas():
    known = profile(gradient_variance=np.array([0.0, 1.0, 0.0]))
    expected = (known.serve_share + np.array([0.5, 0.0, 0.5])) / 2
    assert WEIGHTINGS["balanced-adj"](known, 1).tolist() == pytest.approx(expected.tolist())


def test_samples_of_helping_nodes_count_for_the_exit():
    helped = profile(probabilities=np.array([[1.0, 0, 0]] * 4 + [[0.2, 0.8, 0]] * 2 + [[0.2, 0.2, 0.6]]))
    assert profile().exit_samples.tolist() == [15000, 15000, 15000]
    assert helped.exit_samples.tolist() == [45000, 30000, 15000]


def test_auto_follows_the_serving_shares_and_leaves_no_exit_out():
    weights = WEIGHTINGS["auto"](profile(serve_share=np.array([1.0, 0.0, 0.0])), 1)
    assert weights == pytest.approx([0.9 + 0.1 / 3, 0.1 / 3, 0.1 / 3])


def test_auto_weighs_an_exit_by_its_traffic_and_data_where_no_weight_slows_a_deep_layer():
    shares = np.array([1.0, 0.0, 0.0])
    alike = profile(serve_share=shares, normalised_step=True)
    assert alike.exit_samples.tolist() == [15000, 15000, 15000]
    assert WEIGHTINGS["auto"](alike, 1) == pytest.approx(0.9 * np.array([4, 1, 1]) / 6 + 0.1 / 3)
    all_exits = replace(alike, probabilities=np.array([[1.0, 0, 0]] * 4 + [[1, 1, 0]] * 2 + [[1, 1, 1]]))
    assert all_exits.exit_samples.tolist() == [45000, 30000, 15000]
    parts = np.array([4 * 3**4, 2**4, 1])
    assert WEIGHTINGS["auto"](all_exits, 1) == pytest.approx(0.9 * parts / parts.sum() + 0.1 / 3)
