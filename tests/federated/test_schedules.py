import math

import pytest

from exitflow.errors import ConfigError
from exitflow.federated.schedules import make_schedule, theorem
from tests.small import training


def test_cosine_steps_once_a_round_from_start_to_end():
    schedule = make_schedule(training(schedule="cosine", rounds=100, learning_rate=0.1, final_learning_rate=0.001), 10)
    assert schedule(1, 0) == schedule(1, 9) == pytest.approx(0.1)
    assert schedule(51, 0) == pytest.approx((0.1 + 0.001) / 2)
    assert schedule(100, 0) == pytest.approx(0.001 + 0.099 * (1 + math.cos(math.pi * 0.99)) / 2)


def test_constant_stays():
    schedule = make_schedule(training(learning_rate=0.3), 10)
    assert schedule(1, 0) == schedule(99, 7) == 0.3


def test_a_warm_up_rises_in_equal_parts_to_the_schedule():
    plain = make_schedule(training(schedule="cosine", rounds=100), 10)
    warmed = make_schedule(training(schedule="cosine", rounds=100, warmup_rounds=3), 10)
    assert [warmed(round, 5) / plain(round, 5) for round in (1, 2, 3, 4, 5, 100)] == [0.25, 0.5, 0.75, 1, 1, 1]


@pytest.mark.parametrize("warmup_rounds", [-1, 5, 500])
def test_a_warm_up_ends_before_the_training(warmup_rounds):
    with pytest.raises(
        ConfigError, match=f"warmup_rounds: must be .* below the number of rounds, 5; got {warmup_rounds}"
    ):
        training(rounds=5, warmup_rounds=warmup_rounds)


@pytest.mark.parametrize(("smoothness", "gamma"), [(0.5, 8 * 5 - 1), (0.1, 10 - 1)])
def test_the_theorems_schedule_falls_with_every_step(smoothness, gamma):
    mu, num_steps = 0.1, 10
    schedule = theorem(mu, smoothness, num_steps)
    assert schedule(1, 0) == pytest.approx(2 / (mu * (gamma + 1)))
    assert schedule(3, 4) == pytest.approx(2 / (mu * (gamma + 2 * 10 + 4 + 1)))
