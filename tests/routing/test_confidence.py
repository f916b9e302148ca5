import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from exitflow.errors import ConfigError
from exitflow.routing import CONFIDENCES, confidence, served_rates, surest_first


def test_confidences_by_hand():
    logits = [[math.log(0.7), math.log(0.2), math.log(0.1)]]
    entropy = -(0.7 * math.log(0.7) + 0.2 * math.log(0.2) + 0.1 * math.log(0.1)) / math.log(3)
    assert confidence(logits, "entropy")[0] == pytest.approx(1 - entropy)
    assert confidence(logits, "max-softmax")[0] == pytest.approx(0.7)
    assert confidence(logits, "margin")[0] == pytest.approx(math.log(0.7 / 0.2))


@pytest.mark.parametrize("kind", CONFIDENCES)
def test_a_clearer_answer_is_surer_even_where_softmax_is_huge(kind):
    clear, clearer = confidence([[10.0, 0, 0], [12.0, 0, 0]], kind)
    assert clearer > clear
    assert np.isfinite(confidence([[1e4, -1e4, 0.0]], kind)).all()


def test_among_equals_the_first_sample_goes_first():
    assert surest_first(np.array([1.0, 2.0, 1.0, 2.0])).tolist() == [1, 3, 0, 2]


@given(arrays(np.float64, 20, elements=st.floats(0.1, 10)), st.floats(0, 1), st.integers(0, 100))
def test_the_surest_are_served_until_the_rate_is_filled(received, share, seed):
    order = np.random.default_rng(seed).permutation(20)
    rate = share * received.sum()
    served = served_rates(received, order, rate)
    assert served.sum() == pytest.approx(rate, abs=1e-9)
    assert (served >= 0).all()
    assert (served <= received + 1e-12).all()
    full = served[order] >= received[order] - 1e-12
    assert (np.diff(full.astype(int)) <= 0).all()


def test_a_confidence_that_nobody_knows_is_named():
    with pytest.raises(ConfigError, match="confidence: there is no confidence 'entropie'; did you mean 'entropy'"):
        confidence(np.zeros((1, 2)), "entropie")
