"""Who answers, who is asked, and why not: every rule, by hand, without a network and without waiting."""

import math

import numpy as np
import pytest

from exitflow.routing.decisions import FAIR_TIME, LEAST_TIME, Router, Rules
from exitflow.routing.link_state import FIRST_PAUSE, IDLE_PAUSE, LAST_PAUSE, MAX_FAILURES, LinkState
from exitflow.routing.rate_control import ForwardControl
from exitflow.topology.graph import Link
from tests.routing.test_rate_control import Calibration

NEVER = math.inf


def router(*limits, audit_share=0.0, limited=True, cut=0.5):
    parents = [Link(f"p{index}", limit) for index, limit in enumerate(limits)]
    calibration = Calibration(cut, (0.0, 0.5, 1.0))
    control = ForwardControl(parents, calibration, planned_rate=10.0, burst_seconds=1.0, now=0.0, limited=limited)
    states = {link.name: LinkState() for link in parents}
    return Router("device", Rules(1.0, audit_share), control, states, cut), states


def decide(router, confidences, now=1.0, deadlines=None):
    return router.decide(np.array(confidences), deadlines or [NEVER] * len(confidences), now)


def cut(state):
    state.failed("unreachable", "gone")


def test_what_is_sure_is_answered_here_and_the_rest_goes_up():
    decision = decide(router(None, limited=False)[0], [0.4, 0.5, 0.9, 0.1])
    assert decision.parents == ["p0", None, None, "p0"]
    assert (decision.out_of_tokens, decision.no_time, decision.cut_off) == (0, 0, 0)


def test_without_parents_everything_is_answered_here_and_nothing_is_counted_as_missed():
    decision = decide(router()[0], [0.1, 0.2])
    assert decision.parents == [None, None]
    assert (decision.out_of_tokens, decision.no_time, decision.cut_off, list(decision.audits)) == (0, 0, 0, [])


def test_a_link_out_of_tokens_takes_the_hardest_and_the_others_are_counted():
    decision = decide(router(3.0)[0], [0.4, 0.1, 0.3, 0.2, 0.9], now=0.7)
    assert decision.parents == [None, "p0", None, "p0", None]
    assert decision.out_of_tokens == 2


def test_when_every_link_is_cut_what_the_calibration_would_have_forwarded_is_counted():
    current, states = router(None, 5.0)
    for state in states.values():
        cut(state)
    decision = decide(current, [0.1, 0.4, 0.6])
    assert decision.parents == [None, None, None]
    assert (decision.cut_off, decision.out_of_tokens) == (2, 0)


def test_a_cut_link_is_passed_over():
    current, states = router(None, None, limited=False)
    cut(states["p0"])
    assert decide(current, [0.1] * 4).parents == ["p1"] * 4
    assert current.open_parents == ["p1"]


def test_whose_deadline_is_near_is_answered_here_and_costs_no_token():
    current, _ = router(2.0)
    decision = decide(current, [0.1, 0.2, 0.3], now=0.5, deadlines=[0.5 + LEAST_TIME / 2, NEVER, NEVER])
    assert decision.parents == [None, "p0", None]
    assert (decision.no_time, decision.out_of_tokens) == (1, 1)


def test_only_sure_answers_are_audited_and_only_where_there_is_room_to_spare():
    current, _ = router(10.0, audit_share=1.0)
    assert list(decide(current, [0.9, 0.1], now=1.0).audits) == [(0, "p0")]
    current, _ = router(10.0, audit_share=1.0)
    assert list(decide(current, [0.9, 0.1], now=0.4).audits) == []


def test_a_parent_is_given_less_than_the_caller_has_left():
    current, _ = router(None)
    assert current.timeout(NEVER, 5.0) == 1.0
    assert current.timeout(5.5, 5.0) == pytest.approx(0.449)
    assert current.timeout(4.0, 5.0) == 0.001


def test_a_parent_is_not_blamed_for_a_caller_in_a_hurry():
    current, _ = router(None)
    assert current.blame("timeout", FAIR_TIME - 0.01) == "deadline"
    assert current.blame("timeout", FAIR_TIME) == "timeout"
    assert current.blame("unreachable", 0.01) == "unreachable"
    assert current.is_in_a_hurry(5.4, 5.0)
    assert not current.is_in_a_hurry(5.6, 5.0)


def test_after_a_failure_another_parent_is_asked_within_its_limit():
    current, states = router(5.0, 3.0)
    assert current.another({"p0"}, 2, NEVER, 1.0) == "p1"
    assert current.another({"p0"}, 2, NEVER, 1.0) is None  # its tokens are gone
    assert current.another({"p0", "p1"}, 1, NEVER, 9.0) is None
    assert current.another({"p0"}, 1, 9.0 + LEAST_TIME / 2, 9.0) is None
    cut(states["p1"])
    assert current.another({"p0"}, 1, NEVER, 9.0) is None


def test_another_bundle_brings_its_own_threshold():
    current, _ = router(None, limited=False)
    control = ForwardControl(
        [Link("p0")], Calibration(0.2), planned_rate=1.0, burst_seconds=1.0, now=0.0, limited=False
    )
    current.adopt(control, 0.2)
    assert decide(current, [0.4, 0.1]).parents == [None, "p0"]


def test_a_link_is_cut_after_failures_in_a_row_and_one_more_cuts_it_again():
    state = LinkState()
    for _ in range(MAX_FAILURES - 1):
        assert not state.failed("timeout", "slow")
    state.succeeded()
    for _ in range(MAX_FAILURES - 1):
        assert not state.failed("timeout", "slow")
    assert state.failed("timeout", "slow")
    assert not state.failed("timeout", "slow")  # it is cut already
    assert (state.open, state.problem, state.times_cut) == (False, "timeout: slow", 1)
    state.mended()
    assert state.open
    assert state.failed("nonsense", "what?")
    assert state.times_cut == 2


def test_a_busy_parent_is_not_cut_and_one_that_cannot_be_reached_is_at_once():
    state = LinkState()
    for _ in range(100):
        assert not state.failed("overloaded", "later")
        assert not state.failed("invalid", "too large")
    assert state.failed("unreachable", "gone")


def test_a_parent_that_is_down_is_asked_ever_more_rarely_until_it_has_answered():
    state = LinkState()
    assert state.next_pause() == IDLE_PAUSE
    cut(state)
    pauses = [state.next_pause() for _ in range(10)]
    assert pauses[:3] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
    assert pauses[-1] == LAST_PAUSE
    state.mended()
    assert state.next_pause() == IDLE_PAUSE
    cut(state)
    assert state.next_pause() == LAST_PAUSE  # it said that it was ready, and failed again
    state.mended()
    state.succeeded()
    cut(state)
    assert state.next_pause() == FIRST_PAUSE
