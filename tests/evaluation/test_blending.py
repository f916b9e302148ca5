"""Exits answer together with those before them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exitflow.evaluation.blending import RIDGE, Blend, blended, fit_blends
from exitflow.evaluation.outputs import ExitOutputs
from tests.oracles import blending as oracle


def outputs(knowledge, num_samples=200, num_classes=4, seed=0):
    """Exit e's logits are noise, with `knowledge[e]` added to the right one."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(num_classes, size=num_samples)
    logits = rng.normal(size=(len(knowledge), num_samples, num_classes))
    logits[:, np.arange(num_samples), labels] += np.array(knowledge)[:, None]
    return ExitOutputs(logits.astype(np.float32), labels)


def test_an_answer_is_the_weighted_sum_of_the_one_before_and_its_own():
    logits = np.array([[[1.0, 0.0]], [[0.0, 2.0]], [[4.0, 0.0]]], dtype=np.float32)
    found = blended(ExitOutputs(logits, np.array([0])), (Blend(0, 1), Blend(0.5, 1), Blend(2, 0.25)))
    assert found.logits.tolist() == [[[1.0, 0.0]], [[0.5, 2.0]], [[2.0, 4.0]]]
    assert found.labels.tolist() == [0]


def test_with_no_blends_every_exit_answers_by_itself():
    own = outputs([1, 2])
    assert blended(own, ()) is own


@given(st.lists(st.floats(0, 3), min_size=2, max_size=3), st.integers(0, 20))
def test_answers_are_those_of_the_oracle(knowledge, seed):
    own = outputs(knowledge, num_samples=5, seed=seed)
    blends = fit_blends(own)
    weights = [(blend.before, blend.own) for blend in blends]
    for sample, found in enumerate(blended(own, blends).logits[-1]):
        assert found == pytest.approx(oracle.answer(own.logits[:, sample].tolist(), weights), abs=1e-4)


@pytest.mark.parametrize("knowledge", [(1, 2), (2, 1), (0, 1), (3, 3)])
def test_the_weights_have_the_least_cross_entropy(knowledge):
    own = outputs(knowledge, num_samples=100)
    _, found = fit_blends(own)
    before, said = own.logits.tolist()
    expected = oracle.best_weights(before, said, own.labels.tolist(), RIDGE)
    assert (found.before, found.own) == pytest.approx(expected, abs=1e-4)


def test_the_third_exit_is_fitted_to_the_answer_of_the_second():
    own = outputs((1, 1, 1), num_samples=100)
    _, second, third = fit_blends(own)
    answers = second.answer(own.logits[0], own.logits[1]).tolist()
    expected = oracle.best_weights(answers, own.logits[2].tolist(), own.labels.tolist(), RIDGE)
    assert (third.before, third.own) == pytest.approx(expected, abs=1e-4)


def test_an_exit_that_knows_nothing_hardly_counts_and_two_that_know_help_each_other():
    fitted, judged = (outputs((1.5, 1.5, 0), num_samples=4000, seed=seed) for seed in (0, 1))
    blends = fit_blends(fitted)
    assert abs(blends[2].own) < 0.05
    first, second, third = blended(judged, blends).exit_accuracy
    assert second > first + 0.05
    assert third == pytest.approx(second, abs=0.01)
    assert judged.exit_accuracy[2] == pytest.approx(0.25, abs=0.05)


def test_an_exit_that_has_diverged_spoils_no_other():
    own = outputs((np.nan, 1, np.nan, 2))
    blends = fit_blends(own)
    assert blends == (Blend(0, 1),) * 4
    assert np.array_equal(blended(own, blends).logits, own.logits, equal_nan=True)


def test_a_blend_that_overflows_says_so_in_its_answer_and_nowhere_else():
    most = np.full((1, 2), 3e38, dtype=np.float32)
    assert np.isinf(Blend(2, 1).answer(most, most)).all()
    assert np.isnan(Blend(2, -2).answer(most, most)).all()


def test_few_samples_hardly_move_the_weights_from_a_plain_mean():
    judged = outputs((0.5, 1, 1.5), num_samples=2000, num_classes=5, seed=99)
    mean = blended(judged, (Blend(0, 1), Blend(0.5, 0.5), Blend(0.5, 0.5))).exit_accuracy[2]
    for seed in range(20):
        few = outputs((0.5, 1, 1.5), num_samples=2, num_classes=5, seed=seed)
        assert blended(judged, fit_blends(few)).exit_accuracy[2] > mean - 0.1


@pytest.mark.parametrize("scale", [1e6, 1e15, 1e30])
def test_logits_of_any_size_are_fitted_or_left_as_they_are(scale):
    """Also where exits say the same, as those of one common network do."""
    logits = outputs((1, 1)).logits * np.float32(scale)
    for own in (logits, np.stack((logits[0], logits[0]))):
        _, found = fit_blends(ExitOutputs(own, outputs((1, 1)).labels))
        assert np.isfinite([found.before, found.own]).all()


@pytest.mark.parametrize("knowledge", [(50, 50), (1e4, 0), (0, 1e4), (0, 0)])
def test_data_that_are_too_easy_or_too_hard_still_give_finite_weights(knowledge):
    for num_samples in (1, 2, 50):
        _, found = fit_blends(outputs(knowledge, num_samples=num_samples))
        assert np.isfinite([found.before, found.own]).all()
        assert abs(found.before) + abs(found.own) < 5
