"""What a load says beside its verdicts."""

import pytest
from scipy.stats import binomtest

from exitflow.serving.traffic.load_report import wilson_interval


@pytest.mark.parametrize(("right", "count"), [(0, 1), (1, 1), (0, 50), (50, 50), (465, 500), (3, 7), (1, 100_000)])
def test_the_interval_is_the_one_of_scipy(right, count):
    expected = binomtest(right, count).proportion_ci(0.95, method="wilson")
    assert wilson_interval(right / count, count) == pytest.approx((expected.low, expected.high), abs=1e-12)
