"""A node with parents of all kinds: every request has exactly one answer, whatever they do."""

import asyncio
import gc
from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest

from exitflow.routing import confidence
from exitflow.routing.clock import VirtualClock
from exitflow.routing.link_state import FIRST_PAUSE, IDLE_PAUSE, MAX_FAILURES
from exitflow.serving.node.status import problems
from exitflow.serving.wire.answers import BadRequestError
from tests.serving.inprocess import (
    ALL_UP,
    EAGER,
    PATIENT,
    FakeParent,
    ask,
    fake_parent,
    far_away,
    freezing,
    running,
    until,
)
from tests.serving.small import NUM_CLASSES, chain, make_bundle

pytestmark = pytest.mark.heavy


def test_the_parents_answer_is_given(eager):
    async def scenario():
        parent = FakeParent(NUM_CLASSES)
        async with fake_parent(parent) as address, running(eager, "device", {"edge": address}, spec=EAGER) as (node, _):
            answers = await ask(node, eager, 3)
            assert answers.nodes == ["edge"] * 3
            assert answers.exits.tolist() == [2, 2, 2]
            assert node.current.bundle.segments == ()  # the engine has them; twice would be waste
            assert node.counts.served == 0
            assert node.links["edge"].counts.answered == 3
            (request,) = parent.requests
            assert request.model_version == eager.hash
            assert request.parameters["exitflow_from"].string_param == "device"

    asyncio.run(scenario())


FAILING = {
    "UNAVAILABLE": "unreachable",
    "RESOURCE_EXHAUSTED": "overloaded",
    "FAILED_PRECONDITION": "version",
    "INTERNAL": "refused",
    "INVALID_ARGUMENT": "invalid",
    "nan": "nonsense",
    "empty": "nonsense",
    "garbage": "nonsense",
}


@pytest.mark.parametrize(("behaviour", "reason"), FAILING.items())
def test_a_parent_that_fails_costs_depth_but_no_answer(eager, behaviour, reason):
    async def scenario():
        parent = FakeParent(NUM_CLASSES, behaviour=behaviour)
        async with fake_parent(parent) as address, running(eager, "device", {"edge": address}, spec=EAGER) as (node, _):
            answers = await ask(node, eager, 2)
            assert answers.nodes == ["device"] * 2
            expected = eager.samples().outputs.logits[0][:2].argmax(axis=1)
            assert answers.scores.argmax(axis=1).tolist() == expected.tolist()
            assert node.counts.fallbacks == {reason: 2}
            assert node.links["edge"].counts.failures == {reason: 2}
            assert node.counts.served == 2

    asyncio.run(scenario())


@pytest.mark.parametrize("exit", [0, 1, 4, 99])
def test_a_parent_cannot_answer_with_an_exit_that_is_not_above_the_childs(eager, exit):
    async def scenario():
        parent = FakeParent(NUM_CLASSES, exit=exit)
        async with fake_parent(parent) as address, running(eager, "device", {"edge": address}, spec=EAGER) as (node, _):
            assert (await ask(node, eager)).exits.tolist() == [1]
            assert node.counts.fallbacks == {"nonsense": 1}

    asyncio.run(scenario())


def test_a_slow_parent_is_not_waited_for_and_its_late_answer_is_dropped(eager):
    async def scenario():
        parent, hasty = FakeParent(NUM_CLASSES, delay=0.6), replace(EAGER, forward_timeout=0.3)
        async with fake_parent(parent) as address, running(eager, "device", {"edge": address}, spec=hasty) as (node, _):
            answers = await ask(node, eager)
            assert answers.nodes == ["device"]
            await asyncio.sleep(0.5)  # the late answer would come now
            assert answers.nodes == ["device"]
            assert node.counts.fallbacks == {"timeout": 1}
            assert node.links["edge"].counts.answered == 0

    asyncio.run(scenario())


def test_an_answer_for_a_caller_who_has_gone_is_dropped_quietly(eager):
    async def scenario():
        problems = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        parent = FakeParent(NUM_CLASSES, delay=0.1)
        async with fake_parent(parent) as address, running(eager, "device", {"edge": address}, spec=EAGER) as (node, _):
            asking = asyncio.create_task(ask(node, eager))
            await until(lambda: parent.requests)
            asking.cancel()
            await until(lambda: node._forwarder.idle)
            assert node.in_flight == 0
        gc.collect()
        assert problems == []

    asyncio.run(scenario())


def test_the_breaker_opens_then_nothing_is_sent_and_it_closes_by_itself(eager):
    async def scenario():
        parent = FakeParent(NUM_CLASSES, behaviour="INTERNAL")
        async with fake_parent(parent) as address, running(eager, "device", {"edge": address}, spec=EAGER) as (node, _):
            for _ in range(MAX_FAILURES):
                assert node.links["edge"].state.open
                await ask(node, eager)
            assert not node.links["edge"].state.open
            await ask(node, eager)
            assert len(parent.requests) == MAX_FAILURES
            assert node.counts.fallbacks["parent-down"] == 1
            parent.behaviour = "answer"
            await until(lambda: node.links["edge"].state.open)
            assert (await ask(node, eager)).nodes == ["edge"]
            assert parent.probes >= 1

    asyncio.run(scenario())


def test_a_parent_that_is_ready_but_talks_nonsense_is_cut_again_after_one_try(eager):
    async def scenario():
        parent, clock = FakeParent(NUM_CLASSES, behaviour="nan"), VirtualClock()
        async with (
            fake_parent(parent) as address,
            running(eager, "device", {"edge": address}, spec=EAGER, clock=clock) as (node, _),
        ):
            for _ in range(MAX_FAILURES):
                await ask(node, eager)
            assert parent.probes == 0
            await asyncio.sleep(0)  # the watch begins
            clock.advance(FIRST_PAUSE)
            await until(lambda: node.links["edge"].state.open)
            await ask(node, eager)
            assert not node.links["edge"].state.open
            assert node.links["edge"].state.times_cut == 2

    asyncio.run(scenario())


def test_a_parent_that_starts_later_is_found(eager):
    async def scenario():
        parent = FakeParent(NUM_CLASSES)
        async with fake_parent(parent) as address:
            pass  # now nobody listens there
        async with running(eager, "device", {"edge": address}, spec=EAGER) as (node, _):
            assert (await ask(node, eager)).nodes == ["device"]
            async with fake_parent(parent, int(address.rpartition(":")[2])):
                await until(lambda: node.links["edge"].state.open)
                assert (await ask(node, eager)).nodes == ["edge"]

    asyncio.run(scenario())


def test_that_an_idle_parent_is_gone_is_noticed_before_somebody_asks(eager):
    async def scenario():
        parent, clock = FakeParent(NUM_CLASSES), VirtualClock()
        async with fake_parent(parent) as address:
            device = running(eager, "device", {"edge": address}, spec=EAGER, clock=clock)
            node, _ = await device.__aenter__()
            await ask(node, eager)
            clock.advance(IDLE_PAUSE)
            await until(lambda: parent.probes == 1)
            assert problems(node) == []
        await asyncio.sleep(0)
        await until(lambda: clock.advance(IDLE_PAUSE) or problems(node))
        assert "link to edge is cut: unreachable" in problems(node)[0]
        assert node.counts.fallbacks == {}
        await device.__aexit__(None, None, None)

    asyncio.run(scenario())


def test_a_parent_that_answers_is_not_asked_whether_it_is_there(eager):
    async def scenario():
        parent, clock = FakeParent(NUM_CLASSES), VirtualClock()
        async with (
            fake_parent(parent) as address,
            running(eager, "device", {"edge": address}, spec=EAGER, clock=clock) as (node, _),
        ):
            for _ in range(5):
                clock.advance(IDLE_PAUSE / 2)
                await ask(node, eager)
            assert parent.probes == 0

    asyncio.run(scenario())


def test_a_parent_whose_readiness_cannot_be_read_is_asked_again(eager):
    async def scenario():
        parent = FakeParent(NUM_CLASSES, behaviour="garbage")
        async with fake_parent(parent) as address, running(eager, "device", {"edge": address}, spec=EAGER) as (node, _):
            for _ in range(MAX_FAILURES):
                await ask(node, eager)
            assert not node.links["edge"].state.open
            await until(lambda: node.links["edge"].state.open)
            assert parent.probes == 2

    asyncio.run(scenario())


def test_callers_in_a_hurry_do_not_cut_a_link(eager):
    async def scenario():
        parent = FakeParent(NUM_CLASSES, delay=PATIENT)
        async with fake_parent(parent) as address, running(eager, "device", {"edge": address}, spec=EAGER) as (node, _):
            for _ in range(MAX_FAILURES + 1):
                answers = await ask(node, eager, deadline=node.now + 0.5)
                assert answers.nodes == ["device"]
            await until(lambda: node.links["edge"].counts.failures["deadline"] == MAX_FAILURES + 1)
            assert node.links["edge"].state.open
            parent.delay = 0
            assert (await ask(node, eager)).nodes == ["edge"]

    asyncio.run(scenario())


def test_callers_all_in_a_hurry_and_no_answer_to_any_cut_a_link_in_the_end(eager):
    async def scenario():
        parent = FakeParent(NUM_CLASSES, delay=PATIENT)
        async with fake_parent(parent) as address, running(eager, "device", {"edge": address}, spec=EAGER) as (node, _):
            for _ in range(4 * MAX_FAILURES):
                assert node.links["edge"].state.open
                await ask(node, eager, deadline=node.now + 0.1)
            await until(lambda: not node.links["edge"].state.open)

    asyncio.run(scenario())


def test_a_frozen_parent_of_a_node_in_the_middle_is_cut(eager):
    """What comes from a child always has a little less time left than this node may take."""

    async def scenario():
        hasty = replace(EAGER, forward_timeout=0.4)
        cloud = FakeParent(NUM_CLASSES, delay=PATIENT)
        async with (
            fake_parent(cloud) as above,
            running(eager, "edge", {"cloud": above}, spec=hasty) as (edge, address),
            running(eager, "device", {"edge": address}, spec=replace(EAGER, forward_timeout=0.4)) as (device, _),
        ):
            for _ in range(2 * MAX_FAILURES):
                await ask(device, eager)
            await until(lambda: edge.links["cloud"].counts.failures["timeout"] >= MAX_FAILURES)
            assert edge.links["cloud"].state.times_cut >= 1

    asyncio.run(scenario())


def test_a_parent_that_finds_a_request_invalid_is_not_cut(eager):
    async def scenario():
        parent = FakeParent(NUM_CLASSES, behaviour="INVALID_ARGUMENT")
        async with fake_parent(parent) as address, running(eager, "device", {"edge": address}, spec=EAGER) as (node, _):
            for _ in range(MAX_FAILURES + 1):
                assert (await ask(node, eager)).nodes == ["device"]
            assert node.links["edge"].state.open

    asyncio.run(scenario())


def test_whatever_goes_wrong_in_asking_the_request_is_answered(eager, monkeypatch):
    async def scenario():
        async with (
            fake_parent(FakeParent(NUM_CLASSES)) as address,
            running(eager, "device", {"edge": address}, spec=EAGER) as (node, _),
        ):

            async def broken(*_):
                raise KeyError("a fault of ours")

            monkeypatch.setattr(node.links["edge"], "infer", broken)
            assert (await asyncio.wait_for(ask(node, eager), PATIENT)).nodes == ["device"]
            assert node.counts.fallbacks == {"failed": 1}

    asyncio.run(scenario())


def test_a_confidence_that_is_no_number_is_refused_and_not_remembered(eager):
    async def scenario():
        async with (
            fake_parent(FakeParent(NUM_CLASSES)) as address,
            running(eager, "device", {"edge": address}, spec=EAGER) as (node, _),
        ):
            logits = np.full((1, NUM_CLASSES), -np.inf, dtype=np.float32)
            logits[0, 0] = 0.0  # scores 1, 0, ..., but an entropy of NaN
            node.current.engine.run = lambda *_: (None, logits)
            with pytest.raises(BadRequestError, match="too large"):
                await ask(node, eager)
            assert not np.isnan(node.control._recent._ring).any()

    asyncio.run(scenario())


def test_what_waits_for_a_connection_is_no_more_than_limit_and_burst_when_it_arrives(tmp_path):
    limit = 50.0
    bundle = make_bundle(tmp_path / "b", chain(rate=500.0, limits=(limit, None)))
    hardest = confidence(bundle.samples().outputs.logits[0]).argsort()[:40]

    async def scenario():
        parent = FakeParent(NUM_CLASSES)
        async with (
            fake_parent(parent) as address,
            far_away(address, 0.0, connecting=0.8) as place,
            running(bundle, "device", {"edge": place}, spec=EAGER) as (node, _),
        ):
            await asyncio.sleep(1.2)  # the bucket fills
            asked = []
            for turn in range(500):
                row = hardest[turn % len(hardest)]
                asked.append(asyncio.create_task(node.infer(node.current, bundle.samples().inputs[row : row + 1])))
                await asyncio.sleep(0.004)
            await asyncio.gather(*asked)
        times = [seconds for seconds, count in parent.received for _ in range(count)]
        assert max(sum(first <= other < first + 1 for other in times) for first in times) <= 2 * limit
        assert len(times) > limit  # else nothing was seen

    asyncio.run(scenario())


def test_a_network_that_stood_still_delivers_no_more_than_limit_and_burst_afterwards(tmp_path):
    """The connection stays, requests time out, and then everything arrives at once."""
    limit, clock = 30.0, VirtualClock()
    bundle = make_bundle(tmp_path / "b", chain(rate=500.0, limits=(limit, None)))
    hardest = confidence(bundle.samples().outputs.logits[0]).argsort()[:40]
    samples = cycle(np.split(bundle.samples().inputs[hardest], 40))

    async def scenario():
        parent = FakeParent(NUM_CLASSES, clock=clock)
        async with (
            fake_parent(parent) as address,
            freezing(address) as (place, moves),
            running(bundle, "device", {"edge": place}, spec=replace(EAGER, forward_timeout=0.3), clock=clock) as (
                node,
                _,
            ),
        ):
            link = node.links["edge"]

            async def ask_for(seconds, at_once=5):
                for _ in range(round(seconds / 0.1)):
                    clock.advance(0.1)
                    link.state.mended()  # however short it was cut
                    await asyncio.gather(*(node.infer(node.current, next(samples)) for _ in range(at_once)))

            await ask_for(2.0)
            moves.clear()
            await ask_for(2.0, at_once=20)
            frozen = len(parent.received)
            assert 0 < link.state.in_air.count <= limit
            moves.set()
            await until(lambda: clock.advance(0.01) or parent.probes)  # whatever was sent before has arrived
            await ask_for(2.0, at_once=20)
            times = [seconds for seconds, count in parent.received for _ in range(count)]
            assert max(sum(first <= other < first + 1 for other in times) for first in times) <= 2 * limit
            assert len(parent.received) > frozen  # and the link is used again

    asyncio.run(scenario())


def test_a_parent_far_away_is_reached_at_the_first_request(eager):
    """A connection takes several ways there and back."""

    async def scenario():
        parent = FakeParent(NUM_CLASSES)
        async with (
            fake_parent(parent) as address,
            far_away(address, 0.2) as place,
            running(eager, "device", {"edge": place}, spec=EAGER) as (node, _),
        ):
            assert (await ask(node, eager)).nodes == ["edge"]
            assert node.links["edge"].state.times_cut == 0

    asyncio.run(scenario())


def test_the_other_parent_takes_over(two_parents, monkeypatch):
    monkeypatch.setattr(
        "exitflow.routing.link_state.FIRST_PAUSE", 60
    )  # or the cut parent is tried again on a slow machine

    async def scenario():
        left = FakeParent(NUM_CLASSES, behaviour="UNAVAILABLE", name="left")
        right = FakeParent(NUM_CLASSES, name="right")
        async with fake_parent(left) as first, fake_parent(right) as second:
            places = {"left": first, "right": second}
            async with running(two_parents, "device", places, spec=EAGER) as (node, _):
                for _ in range(10):
                    assert (await ask(node, two_parents)).nodes == ["right"]
                assert len(right.requests) == 10
                assert node.counts.fallbacks == {}
                assert len(left.requests) == 1

    asyncio.run(scenario())


def test_confident_answers_are_audited_when_the_link_has_room_and_agreement_is_counted(tmp_path):
    bundle = make_bundle(tmp_path / "b", chain(rate=1000.0, limits=(200.0, 50.0)))
    spec, clock = replace(EAGER, audit_share=1.0), VirtualClock()

    async def scenario():
        async with (
            running(bundle, "edge", {}) as (_, edge),
            running(bundle, "device", {"edge": edge}, spec=spec, clock=clock) as (device, _),
        ):
            clock.advance(0.9)  # tokens
            device.control.threshold = -1.0
            answers = await ask(device, bundle, 1)
            assert answers.nodes == ["device"]
            await until(lambda: device.counts.audited == 1)
            logits = bundle.samples().outputs.logits
            assert device.counts.agreed == int(logits[0][0].argmax() == logits[1][0].argmax())
            assert device.links["edge"].counts.audited == 1

    asyncio.run(scenario())


def test_nodes_of_different_bundles_do_not_mix(tmp_path, eager):
    other = make_bundle(tmp_path / "b", ALL_UP, seed=5)

    async def scenario():
        async with (
            running(other, "edge") as (_, edge),
            running(eager, "device", {"edge": edge}, spec=EAGER) as (
                node,
                _,
            ),
        ):
            assert (await ask(node, eager)).nodes == ["device"]
            assert node.counts.fallbacks == {"version": 1}
            assert f"serves bundle {other.version}, not {eager.version}" in node.links["edge"].state.problem

    asyncio.run(scenario())


def test_a_batch_that_the_engine_cannot_compute_is_an_error_and_not_silence(eager):
    async def scenario():
        async with running(eager, "cloud") as (node, _):
            with pytest.raises(RuntimeError):
                await node.infer(node.current, np.zeros((1, 2, 2), dtype=np.uint8))
            assert node.counts.failed == 1
            assert (await ask(node, eager)).nodes == ["cloud"]

    asyncio.run(scenario())


def test_in_a_rehearsal_a_node_takes_its_time_for_each_request_and_an_answer_for_its_way(eager):
    async def scenario():
        parent, clock = FakeParent(NUM_CLASSES), VirtualClock()
        spec = replace(EAGER, service_ms=20.0, round_trip_ms=500.0)
        async with (
            fake_parent(parent) as address,
            running(eager, "device", {"edge": address}, spec=spec, clock=clock) as (node, _),
        ):
            asking = asyncio.create_task(ask(node, eager))
            await asyncio.sleep(0.1)  # the way up has not been gone
            assert not parent.requests
            clock.advance(0.25)
            await until(lambda: parent.requests)
            await asyncio.sleep(0.05)
            assert not asking.done()
            clock.advance(0.25)
            assert (await asking).nodes == ["edge"]
            assert node.counts.compute_seconds >= 0.02

    asyncio.run(scenario())
