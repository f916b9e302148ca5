"""The limit is kept whatever arrives; within it, the hardest go up at the planned rate."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exitflow.routing.link_state import InAir
from exitflow.routing.rate_control import ArrivalRate, ForwardControl, Recent, TokenBucket
from exitflow.topology.graph import Link


@dataclass(frozen=True)
class Calibration:
    cut: float
    confidences: tuple[float, ...] = ()


UNIFORM = Calibration(0.2, tuple(np.linspace(0, 1, 201).tolist()))


def control(*limits, rate=100.0, limited=True, calibration=UNIFORM):
    links = [Link(f"p{index}", limit) for index, limit in enumerate(limits)]
    return ForwardControl(links, calibration, planned_rate=rate, burst_seconds=1.0, now=0.0, limited=limited)


def names(limits):
    return [f"p{index}" for index in range(len(limits))]


def route(control, confidences, open_parents, now):
    """Of each sample, the parent that it goes to."""
    parents = [None] * len(confidences)
    for row in control.hardest_first(confidences, open_parents, now):
        parents[row] = control.take_for(confidences[row], open_parents, now) if open_parents else None
    return parents


def most_in_a_window(times, seconds=1.0):
    times = np.sort(np.asarray(times))
    return max((np.searchsorted(times, time + seconds, "left") - index for index, time in enumerate(times)), default=0)


@given(
    st.floats(1, 50),
    st.lists(st.tuples(st.floats(0, 0.5), st.integers(1, 30)), min_size=1, max_size=60),
    st.integers(0, 60),
)
def test_no_second_carries_more_than_limit_and_burst_even_across_a_restart(limit, gaps, restart_at):
    rng = np.random.default_rng(0)
    current, now, sent = control(limit), 0.0, []
    for index, (gap, count) in enumerate(gaps):
        now += gap
        if index == restart_at:
            current = ForwardControl([Link("p0", limit)], UNIFORM, planned_rate=100, burst_seconds=1.0, now=now)
        parents = route(current, rng.random(count), ["p0"], now)
        sent += [now] * sum(parent is not None for parent in parents)
    assert most_in_a_window(sent) <= limit + max(limit, 1.0) + 1e-6


def test_a_full_bucket_holds_its_burst_and_a_new_one_nothing():
    bucket = TokenBucket(10.0, 10.0, 0.0)
    assert not bucket.take(0.0)
    assert bucket.tokens(0.35) == pytest.approx(3.5)
    assert bucket.tokens(100.0) == pytest.approx(9.5)  # the jitter allowance of 50 ms is kept back
    assert sum(bucket.take(100.0) for _ in range(20)) == 9


def test_time_that_stands_still_or_runs_backwards_makes_no_tokens():
    bucket = TokenBucket(10.0, 10.0, 5.0)
    assert bucket.tokens(1.0) == 0.0
    assert bucket.tokens(5.1) == pytest.approx(1.0)


@pytest.mark.parametrize("drift", [0.0, 0.3])
def test_the_planned_share_goes_up_and_it_is_the_hardest(drift):
    rng = np.random.default_rng(1)
    current, now = control(20.0), 0.0
    forwarded, kept = [], []
    for step in range(6000):
        now += 0.01
        value = rng.random() ** (1 + drift * step / 1000)
        (parent,) = route(current, np.array([value]), ["p0"], now)
        (kept if parent is None else forwarded).append(value)
    assert len(forwarded) / now == pytest.approx(20.0, rel=0.05)
    if not drift:
        assert np.mean(np.array(forwarded) < 0.25) > 0.97


@pytest.mark.parametrize("hard", ["one batch", "a minute"])
def test_after_hard_requests_the_link_is_soon_used_again(hard):
    rng = np.random.default_rng(3)
    current, now, sent = control(5.0, rate=25.0), 0.0, []
    if hard == "one batch":
        route(current, rng.random(1000) * 0.01, ["p0"], now)
    for step in range(2000):
        now += rng.exponential(0.04)
        value = rng.random(1) * (0.01 if hard == "a minute" and now < 60 else 1.0)
        if route(current, value, ["p0"], now)[0]:
            sent.append(now)
    after = 60 if hard == "a minute" else 0
    assert sum(after + 10 <= time < after + 20 for time in sent) == pytest.approx(50, rel=0.25)


def test_an_idle_hour_does_not_make_everything_go_up():
    rng = np.random.default_rng(4)
    current, now, forwarded = control(5.0, rate=25.0), 3600.0, []
    for _ in range(250):
        now += 0.04
        value = rng.random(1)
        if route(current, value, ["p0"], now)[0]:
            forwarded.append(float(value[0]))
    assert np.mean(np.array(forwarded) < 0.5) > 0.8


def test_where_most_are_equally_sure_the_hard_ones_still_go_first():
    rng = np.random.default_rng(5)
    current, now, hard, easy = control(5.0, rate=25.0), 0.0, [], 0
    for _ in range(5000):
        now += rng.exponential(0.04)
        is_hard = rng.random() < 0.05
        went = route(current, np.array([rng.random() / 2 if is_hard else 0.9]), ["p0"], now)[0] is not None
        if is_hard:
            hard.append(went)
        else:
            easy += went
    assert np.mean(hard) > 0.97
    assert easy > 0  # and the rest of the link is not wasted


def test_what_a_cut_link_would_have_carried_was_not_missed():
    rng = np.random.default_rng(6)
    current, now = control(5.0, rate=25.0), 0.0
    for _ in range(500):
        now += 0.04
        route(current, rng.random(1), ["p0"], now)
    before = current._urge
    for _ in range(500):
        now += 0.04
        route(current, rng.random(1), [], now)
    route(current, rng.random(8), ["p0"], now + 0.01)
    assert current._urge <= before + 0.2


def test_when_tokens_run_out_the_hardest_of_the_batch_go_first():
    current = control(3.0, rate=3.0, calibration=Calibration(math.inf))  # all are to go
    parents = route(current, np.array([0.4, 0.1, 0.3, 0.2, 0.9]), ["p0"], 0.9)
    assert parents == [None, "p0", None, "p0", None]


def test_less_traffic_than_the_limit_is_all_forwarded():
    current, now, sent = control(20.0, rate=10.0), 1.0, 0
    for _ in range(500):
        now += 0.1
        sent += route(current, np.array([0.99]), ["p0"], now)[0] is not None
    assert sent >= 492  # the first eight go by the calibrated threshold


def test_a_link_without_limit_takes_everything_and_a_limit_of_zero_nothing():
    assert route(control(None), np.array([0.5] * 9), ["p0"], 1.0) != [None] * 9
    current = control(None)
    for _ in range(3):
        parents = route(current, np.array([0.99] * 9), ["p0"], 1.0)
    assert parents == ["p0"] * 9
    assert route(control(0.0), np.zeros(9), ["p0"], 100.0) == [None] * 9


@pytest.mark.parametrize(
    ("limits", "off"),
    [((30.0, 10.0), 0.06), ((10.0, 0.5), 0.1)],  # a slow link does not block a fast one; its single token often waits
)
def test_several_parents_share_in_proportion_to_their_limits(limits, off):
    current, now, sent = control(*limits), 0.0, {"p0": 0, "p1": 0, None: 0}
    rng = np.random.default_rng(2)
    for _ in range(10000):
        now += 0.01
        sent[route(current, rng.random(1), ["p0", "p1"], now)[0]] += 1
    assert sent["p0"] / now == pytest.approx(limits[0], rel=off)
    assert sent["p1"] / now == pytest.approx(limits[1], rel=off)


def test_a_parent_that_is_cut_off_gets_nothing_and_the_other_keeps_its_limit():
    current, now, sent = control(30.0, 10.0), 0.0, []
    rng = np.random.default_rng(2)
    for _ in range(4000):
        now += 0.01
        sent.append(route(current, rng.random(1), ["p1"], now)[0])
    assert "p0" not in sent
    assert sent.count("p1") / now == pytest.approx(10, rel=0.06)


def test_no_parent_no_forwarding():
    assert route(control(), np.zeros(3), [], 1.0) == [None] * 3
    assert route(control(5.0), np.zeros(3), [], 1.0) == [None] * 3


def test_the_threshold_alone_decides_when_limits_are_off():
    current = control(1.0, limited=False)
    parents = route(current, np.array([0.1, 0.2, 0.3, 0.19]), ["p0"], 0.0)
    assert parents == ["p0", None, None, "p0"]


def test_an_audit_leaves_the_spare_part_of_the_burst():
    current = control(10.0)
    assert current.reserve(["p0"], 0.5, spare=0.6) is None  # 5 of 9.5 tokens
    assert current.reserve(["p0"], 0.9, spare=0.6) == "p0"


def test_room_for_many_is_taken_whole_or_not_at_all():
    current = control(10.0)
    assert current.reserve(["p0"], 0.5, count=6) is None
    assert current.tokens(0.5) == {"p0": 5.0}
    assert current.reserve(["p0"], 0.5, count=5) == "p0"
    assert current.tokens(0.5) == {"p0": 0.0}


def test_quantiles_of_what_came_last():
    recent = Recent([])
    assert recent.quantile(0.5) == math.inf
    recent.add(np.arange(3000.0))
    assert recent.quantile(0.25) == pytest.approx(2250, abs=1)
    assert (recent.quantile(0.0), recent.quantile(1.0)) == (-math.inf, math.inf)


def test_the_arrival_rate_follows():
    rate = ArrivalRate(100.0, 0.0)
    for step in range(1, 3001):
        rate.add(1, step * 0.1)
    assert rate.value(300.0) == pytest.approx(10, rel=0.05)
    assert rate.value(305.0) == pytest.approx(10 / math.e, rel=0.05)  # and nothing came since


def test_looking_at_a_bucket_does_not_fill_it():
    bucket = TokenBucket(10.0, 10.0, now=0.0)
    assert bucket.look(0.5) == 5.0
    assert bucket.tokens(0.3) == 3.0


def test_what_is_in_the_air_takes_the_place_of_tokens_until_an_answer_comes():
    in_air = InAir()
    current = ForwardControl(
        [Link("p0", 10.0)], UNIFORM, planned_rate=10.0, burst_seconds=1.0, now=0.0, in_air={"p0": in_air}
    )
    assert current.reserve(["p0"], 100.0, count=6) == "p0"
    assert current.tokens(200.0) == {"p0": 3.5}  # of 9.5
    first, second = in_air.next_turn(), in_air.next_turn()
    in_air.lost(first, 4)  # its timeout: it may still arrive
    assert current.tokens(300.0) == {"p0": 3.5}
    in_air.answered(second, 2)  # so what was sent before has arrived as well
    assert in_air.count == 0
    assert current.tokens(300.0) == {"p0": 9.5}


def test_an_answer_says_nothing_of_what_was_sent_after_the_question():
    in_air = InAir()
    in_air.count = 5
    first, second = in_air.next_turn(), in_air.next_turn()
    in_air.lost(second, 3)
    in_air.answered(first, 2)
    assert in_air.count == 3
    in_air.answered(in_air.next_turn())
    assert in_air.count == 0


@given(st.lists(st.tuples(st.floats(0, 0.4), st.integers(1, 20), st.booleans()), min_size=1, max_size=80))
def test_whenever_the_network_stands_still_the_receiver_sees_no_more_than_limit_and_burst(steps):
    """What was sent arrives when the network moves, all at once, and only then is there an answer."""
    limit, in_air, now, waiting, received = 20.0, InAir(), 0.0, [], []
    bucket = TokenBucket(limit, limit, now, in_air)
    for gap, count, moves in steps:
        now += gap
        while count and bucket.take(now):
            in_air.count += 1
            waiting.append(in_air.next_turn())
            count -= 1
        if moves:
            received += [now] * len(waiting)
            for turn in waiting:
                in_air.answered(turn, 1)
            waiting.clear()
    assert most_in_a_window(received) <= 2 * limit + 1e-6
