"""A node with parents of all kinds: every request has exactly one answer, whatever they do."""

import asyncio
import gc
import json
import re
import shutil
from collections import Counter
from dataclasses import replace

import grpc
import numpy as np
import pytest

from exitflow.errors import BundleError
from exitflow.routing import confidence
from exitflow.serving.answers import BadRequestError
from exitflow.serving.batching import OverloadedError
from exitflow.serving.links import MAX_FAILURES
from exitflow.serving.messages import SERVICE, ModelInferRequest, ModelInferResponse
from exitflow.serving.node import ExpiredError, Node
from exitflow.serving.requests import check_model
from exitflow.serving.rest import start_rest
from exitflow.serving.security import Security
from exitflow.serving.spec import ServingSpec, serving_spec
from exitflow.topology.graph import Link, Topology
from exitflow.topology.graph import Node as Place
from tests.serving.inprocess import FakeParent, fake_parent, far_away, http, running
from tests.serving.small import INPUT_SHAPE, NUM_CLASSES, chain, make_bundle

ALL_UP = chain(limits=(None, None))  # everything is forwarded
PATIENT = 30.0  # seconds: longer than a busy machine stands still
EAGER = ServingSpec(forward="feature", forward_timeout=PATIENT, audit_share=0.0)


@pytest.fixture(scope="module")
def eager(tmp_path_factory):
    return make_bundle(tmp_path_factory.mktemp("eager") / "b", ALL_UP)


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """Exits answer together with those before them."""
    return make_bundle(tmp_path_factory.mktemp("together") / "b", ALL_UP, blends_answers=True)


@pytest.fixture(scope="module")
def two_parents(tmp_path_factory):
    nodes = (Place("device", 1, 10.0, (Link("left"), Link("right"))), Place("left", 2), Place("right", 2))
    return make_bundle(tmp_path_factory.mktemp("two") / "b", Topology(nodes))


async def ask(node, bundle, count=1, **options):
    inputs = bundle.samples().inputs[:count]
    return await node.infer(node.current, inputs, **options)


async def until(condition):
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never happened")


def test_the_parents_answer_is_given(eager):
    async def scenario():
        parent = FakeParent(NUM_CLASSES)
        async with fake_parent(parent) as address, running(eager, "device", {"edge": address}, spec=EAGER) as (node, _):
            answers = await ask(node, eager, 3)
            assert answers.nodes == ["parent"] * 3
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


def test_a_crowd_that_comes_at_once_is_answered_or_refused_and_never_cancelled(eager):
    async def scenario():
        async with running(eager, "cloud") as (node, address), grpc.aio.insecure_channel(address) as channel:
            request = ModelInferRequest(model_name=eager.manifest.name)
            request.inputs.add(name="input", datatype="UINT8", shape=[1, *INPUT_SHAPE])
            request.raw_input_contents.append(bytes(16))
            data, call = request.SerializeToString(), channel.unary_unary(f"/{SERVICE}/ModelInfer")

            async def code():
                try:
                    await call(data)
                except grpc.aio.AioRpcError as error:
                    return error.code().name
                return "OK"

            codes = Counter(await asyncio.gather(*(code() for _ in range(6000))))
            assert set(codes) <= {"OK", "RESOURCE_EXHAUSTED"}
            assert codes["OK"] >= node.spec.queue_size

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
                assert node.links["edge"].open
                await ask(node, eager)
            assert not node.links["edge"].open
            await ask(node, eager)
            assert len(parent.requests) == MAX_FAILURES
            assert node.counts.fallbacks["parent-down"] == 1
            parent.behaviour = "answer"
            await until(lambda: node.links["edge"].open)
            assert (await ask(node, eager)).nodes == ["parent"]
            assert parent.probes >= 1

    asyncio.run(scenario())


def test_a_parent_that_is_ready_but_talks_nonsense_is_cut_again_after_one_try(eager):
    async def scenario():
        parent = FakeParent(NUM_CLASSES, behaviour="nan")
        async with fake_parent(parent) as address, running(eager, "device", {"edge": address}, spec=EAGER) as (node, _):
            for _ in range(MAX_FAILURES):
                await ask(node, eager)
            await until(lambda: node.links["edge"].open)
            await ask(node, eager)
            assert not node.links["edge"].open
            assert node.links["edge"].counts.opened == 2

    asyncio.run(scenario())


def test_a_parent_that_starts_later_is_found(eager):
    async def scenario():
        parent = FakeParent(NUM_CLASSES)
        async with fake_parent(parent) as address:
            pass  # now nobody listens there
        async with running(eager, "device", {"edge": address}, spec=EAGER) as (node, _):
            assert (await ask(node, eager)).nodes == ["device"]
            async with fake_parent(parent, int(address.rpartition(":")[2])):
                await until(lambda: node.links["edge"].open)
                assert (await ask(node, eager)).nodes == ["parent"]

    asyncio.run(scenario())


def test_a_parent_whose_readiness_cannot_be_read_is_asked_again(eager):
    async def scenario():
        parent = FakeParent(NUM_CLASSES, behaviour="garbage")
        async with fake_parent(parent) as address, running(eager, "device", {"edge": address}, spec=EAGER) as (node, _):
            for _ in range(MAX_FAILURES):
                await ask(node, eager)
            assert not node.links["edge"].open
            await until(lambda: node.links["edge"].open)
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
            assert node.links["edge"].open
            parent.delay = 0
            assert (await ask(node, eager)).nodes == ["parent"]

    asyncio.run(scenario())


def test_callers_all_in_a_hurry_and_no_answer_to_any_cut_a_link_in_the_end(eager):
    async def scenario():
        parent = FakeParent(NUM_CLASSES, delay=PATIENT)
        async with fake_parent(parent) as address, running(eager, "device", {"edge": address}, spec=EAGER) as (node, _):
            for _ in range(4 * MAX_FAILURES):
                assert node.links["edge"].open
                await ask(node, eager, deadline=node.now + 0.1)
            await until(lambda: not node.links["edge"].open)

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
            assert edge.links["cloud"].counts.opened >= 1

    asyncio.run(scenario())


def test_a_parent_that_finds_a_request_invalid_is_not_cut(eager):
    async def scenario():
        parent = FakeParent(NUM_CLASSES, behaviour="INVALID_ARGUMENT")
        async with fake_parent(parent) as address, running(eager, "device", {"edge": address}, spec=EAGER) as (node, _):
            for _ in range(MAX_FAILURES + 1):
                assert (await ask(node, eager)).nodes == ["device"]
            assert node.links["edge"].open

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


def test_numbers_too_large_for_the_network_are_refused_alone(tmp_path):
    bundle = make_bundle(tmp_path / "b", ALL_UP, floats=True)

    async def scenario():
        parent = FakeParent(NUM_CLASSES)
        async with (
            fake_parent(parent) as address,
            running(bundle, "device", {"edge": address}, spec=EAGER) as (node, _),
        ):
            fine = bundle.samples().inputs[:1]
            huge = np.full_like(fine, 3e38)
            found = await asyncio.gather(
                *(node.infer(node.current, inputs) for inputs in (fine, huge, fine)), return_exceptions=True
            )
            assert [answers.nodes for answers in (found[0], found[2])] == [["parent"]] * 2
            assert isinstance(found[1], BadRequestError)
            assert sum(count for _, count in parent.received) == 2
            assert node.links["edge"].counts.failures == {}

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
            assert (await ask(node, eager)).nodes == ["parent"]
            assert node.links["edge"].counts.opened == 0

    asyncio.run(scenario())


def test_the_other_parent_takes_over(two_parents, monkeypatch):
    monkeypatch.setattr("exitflow.serving.links.FIRST_PAUSE", 60)  # or the cut parent is tried again on a slow machine

    async def scenario():
        left, right = FakeParent(NUM_CLASSES, behaviour="UNAVAILABLE"), FakeParent(NUM_CLASSES)
        async with fake_parent(left) as first, fake_parent(right) as second:
            places = {"left": first, "right": second}
            async with running(two_parents, "device", places, spec=EAGER) as (node, _):
                for _ in range(10):
                    assert (await ask(node, two_parents)).nodes == ["parent"]
                assert len(right.requests) == 10
                assert node.counts.fallbacks == {}
                assert len(left.requests) == 1

    asyncio.run(scenario())


def test_every_link_has_its_own_payload(two_parents, caplog):
    """Also when the other parent is asked instead."""
    caplog.set_level("INFO")
    links = ("links.left.forward=input", "links.right.codec=u8", "links.right.link_megabits=0.001")
    spec = serving_spec([f"forward_timeout={PATIENT}", "audit_share=0.0", *links])

    async def scenario():
        left, right = FakeParent(NUM_CLASSES), FakeParent(NUM_CLASSES)
        async with fake_parent(left) as first, fake_parent(right) as second:
            places = {"left": first, "right": second}
            async with running(two_parents, "device", places, spec=spec) as (node, _):
                while not (left.requests and right.requests):
                    await ask(node, two_parents)
                left.behaviour = "RESOURCE_EXHAUSTED"
                while len(node.links["left"].counts.failures) == 0:
                    await ask(node, two_parents)
                assert node.counts.fallbacks == {}
        for request in left.requests:
            assert request.inputs[0].name == "input"
        for request in right.requests:
            assert request.inputs[0].name == "features"
            assert request.parameters["codec"].string_param == "u8"

    asyncio.run(scenario())
    assert "node device sends left input: as it was told" in caplog.text
    assert re.search(r"node device sends right features: .* u8 features take .* at 0.001 Mbit/s", caplog.text)


def test_a_request_of_many_samples_is_split_and_put_together_again(tmp_path):
    bundle = make_bundle(tmp_path / "b", chain())
    spec = replace(EAGER, control="threshold")

    async def scenario():
        parent = FakeParent(NUM_CLASSES)
        async with fake_parent(parent) as address, running(bundle, "device", {"edge": address}, spec=spec) as (node, _):
            answers = await ask(node, bundle, 100)
            sure = confidence(bundle.samples().outputs.logits[0][:100])
            cut = bundle.manifest.nodes["device"].cut
            assert [name == "parent" for name in answers.nodes] == (sure < cut).tolist()
            kept = np.array(answers.nodes) == "device"
            expected = bundle.samples().outputs.logits[0][:100].argmax(axis=1)
            assert (answers.scores.argmax(axis=1)[kept] == expected[kept]).all()
            assert (answers.scores.argmax(axis=1)[~kept] == 0).all()
            assert np.allclose(answers.confidences[kept], sure[kept], atol=1e-5)

    asyncio.run(scenario())


@pytest.mark.parametrize("codec", ["fp32", "fp16", "u8", "u4"])
@pytest.mark.parametrize("compress", [False, True])
def test_features_arrive_at_a_real_parent_in_every_codec(eager, codec, compress):
    spec = replace(EAGER, codec=codec, compress=compress)
    logits = eager.samples().outputs.logits

    async def scenario():
        async with (
            running(eager, "cloud") as (_, cloud),
            running(eager, "edge", {"cloud": cloud}, spec=spec) as (edge, middle),
            running(eager, "device", {"edge": middle}, spec=spec) as (device, _),
        ):
            answers = await ask(device, eager, 64)
            assert answers.nodes == ["cloud"] * 64
            assert answers.exits.tolist() == [3] * 64
            same = answers.scores.argmax(axis=1) == logits[2][:64].argmax(axis=1)
            assert same.mean() >= {"fp32": 1.0, "fp16": 1.0, "u8": 0.95, "u4": 0.7}[codec]
            assert device.counts.fallbacks == edge.counts.fallbacks == {}

    asyncio.run(scenario())


def test_the_input_can_go_all_the_way_up(eager):
    spec = replace(EAGER, forward="input")

    async def scenario():
        async with (
            running(eager, "cloud") as (cloud, address),
            running(eager, "edge", {"cloud": address}, spec=spec) as (_, middle),
            running(eager, "device", {"edge": middle}, spec=spec) as (device, _),
        ):
            answers = await ask(device, eager, 20)
            assert answers.nodes == ["cloud"] * 20
            assert np.allclose(
                np.log(answers.scores).argmax(axis=1), eager.samples().outputs.logits[2][:20].argmax(axis=1)
            )
            assert cloud.counts.from_children == {"edge": 20}

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", ["eager", "together"])
def test_inputs_and_features_of_all_depths_are_computed_together(kind, request):
    bundle = request.getfixturevalue(kind)
    samples = bundle.samples()

    async def scenario():
        async with running(bundle, "cloud") as (node, _):
            features, _ = node.current.engine.run({0: samples.inputs[:1]})
            assert features is None  # the deepest gives none
            found = await asyncio.gather(
                node.infer(node.current, samples.inputs[:4]),
                node.infer(node.current, **behind(bundle, 1, samples.inputs[4:6]), child="device"),
                node.infer(node.current, **behind(bundle, 2, samples.inputs[6:9]), child="edge"),
            )
            scores = np.concatenate([answers.scores for answers in found])
            assert np.allclose(scores, softmax(samples.outputs.logits[2][:9]), atol=1e-5)

    asyncio.run(scenario())


def behind(bundle, exit, inputs):
    """What a node of that exit sends to its parent."""
    from exitflow.serving.engine import Engine

    features, logits = Engine(bundle.segments[:exit], blends=bundle.manifest.blends).run({0: inputs})
    return {"carry": features, "start": exit, "before": logits if bundle.manifest.blends else None}


def softmax(logits):
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("forward", ["feature", "input"])
def test_exits_answer_together_whatever_is_forwarded(together, forward):
    spec = replace(EAGER, forward=forward)
    samples = together.samples()
    own = samples.outputs.logits[2] - together.manifest.blends[2].before * samples.outputs.logits[1]

    async def scenario():
        async with (
            running(together, "cloud") as (_, cloud),
            running(together, "edge", {"cloud": cloud}, spec=spec) as (edge, middle),
            running(together, "device", {"edge": middle}, spec=spec) as (device, _),
        ):
            answers = await ask(device, together, 64)
            assert answers.nodes == ["cloud"] * 64
            assert np.allclose(answers.scores, softmax(samples.outputs.logits[2][:64]), atol=1e-5)
            assert not np.allclose(answers.scores, softmax(own[:64]), atol=1e-2)
            assert device.counts.fallbacks == edge.counts.fallbacks == {}

    asyncio.run(scenario())


def test_a_refused_neighbour_does_not_mix_up_what_is_forwarded(tmp_path):
    bundle = make_bundle(tmp_path / "b", ALL_UP, blends_answers=True, floats=True)
    samples = bundle.samples()
    huge = np.full((1, *INPUT_SHAPE), 3e38, dtype=np.float32)

    async def scenario():
        async with (
            running(bundle, "cloud") as (_, cloud),
            running(bundle, "edge", {"cloud": cloud}, spec=EAGER) as (_, middle),
            running(bundle, "device", {"edge": middle}, spec=EAGER) as (device, _),
        ):
            asked = [samples.inputs[:2], huge, samples.inputs[2:5]]
            answers = (device.infer(device.current, inputs) for inputs in asked)
            first, refused, last = await asyncio.gather(*answers, return_exceptions=True)
            assert isinstance(refused, BadRequestError)
            assert device.counts.batches == {6: 1}
            scores = np.concatenate((first.scores, last.scores))
            assert np.allclose(scores, softmax(samples.outputs.logits[2][:5]), atol=1e-5)

    asyncio.run(scenario())


def test_the_deadline_is_passed_on_and_the_local_answer_comes_before_it(eager):
    async def scenario():
        parent = FakeParent(NUM_CLASSES, delay=PATIENT)
        async with (
            fake_parent(parent) as address,
            running(eager, "device", {"edge": address}, spec=EAGER) as (_, place),
            grpc.aio.insecure_channel(place) as channel,
        ):
            request = message(eager)
            raw = await channel.unary_unary(f"/{SERVICE}/ModelInfer")(request.SerializeToString(), timeout=3)
            response = ModelInferResponse.FromString(raw)
            assert b"device" in response.raw_output_contents[2]

    asyncio.run(scenario())


def message(bundle, row=0, **changes):
    request = ModelInferRequest(model_name=bundle.manifest.name, **changes)
    request.inputs.add(name="input", datatype="UINT8", shape=[1, *bundle.manifest.input_shape])
    request.raw_input_contents.append(bundle.samples().inputs[row].tobytes())
    return request


def test_a_request_that_waited_too_long_in_the_queue_is_not_computed(eager):
    async def scenario():
        node = Node(eager, "cloud", ServingSpec(), {})
        with pytest.raises(ExpiredError):
            await ask(node, eager, deadline=asyncio.get_running_loop().time() - 1)
        assert node.counts.expired == 1
        await node.close()

    asyncio.run(scenario())


def test_beyond_the_queue_requests_are_refused_at_once_and_it_recovers(eager):
    async def scenario():
        node = Node(eager, "cloud", ServingSpec(queue_size=4), {})
        asked = [asyncio.ensure_future(ask(node, eager)) for _ in range(40)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        refused = [each for each in found if isinstance(each, OverloadedError)]
        assert refused
        assert len(refused) == node.counts.rejected
        assert len(found) - len(refused) == node.counts.requests >= 4
        assert node.counts.arrived == 40  # or who plans for what was observed would plan for too little
        assert (await ask(node, eager)).nodes == ["cloud"]
        assert node.in_flight == 0
        await node.close()

    asyncio.run(scenario())


def test_over_http_a_full_queue_is_429_and_a_cut_link_is_told(eager, monkeypatch):
    async def scenario():
        async with (
            fake_parent(FakeParent(NUM_CLASSES, behaviour="UNAVAILABLE")) as address,
            running(eager, "device", {"edge": address}, spec=EAGER) as (node, _),
        ):
            server = await start_rest(node, "127.0.0.1:0", Security())
            place = f"127.0.0.1:{server.port}"
            tensor = {"name": "input", "datatype": "UINT8", "shape": [1, *INPUT_SHAPE], "data": [0] * 16}
            body = json.dumps({"inputs": [tensor]})
            path = f"/v2/models/{eager.manifest.name}/infer"
            assert (await asyncio.to_thread(http, place, "POST", path, body))[0] == 200
            status, _, text = await asyncio.to_thread(http, place, "GET", "/readyz")
            assert status == 200
            assert json.loads(text)["degraded"]
            assert "edge" in json.loads(text)["problems"][0]
            metrics = (await asyncio.to_thread(http, place, "GET", "/metrics"))[2]
            assert re.search(r'^exitflow_fallbacks_total\{.*reason="unreachable".*\} 1', metrics, re.MULTILINE)

            def full(job):
                raise OverloadedError

            monkeypatch.setattr(node._batcher, "submit", full)
            status, _, text = await asyncio.to_thread(http, place, "POST", path, body)
            assert status == 429
            assert "full queue" in json.loads(text)["error"]
            node.draining = True
            for ready in ("/v2/health/ready", f"/v2/models/{eager.manifest.name}/ready"):
                status, _, text = await asyncio.to_thread(http, place, "GET", ready)
                assert (status, json.loads(text)["ready"]) == (503, False)
            await server.close()

    asyncio.run(scenario())


def test_bodies_that_are_too_large_too_many_or_never_end_hold_no_memory(eager, monkeypatch):
    path, opened = f"/v2/models/{eager.manifest.name}/infer", []

    async def post(port, length, body=b""):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        opened.append(writer)
        writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode() + body)
        return reader

    async def status(reader):
        return int((await reader.readline()).split()[1])

    async def scenario():
        async with running(eager, "cloud") as (node, _):
            server = await start_rest(node, "127.0.0.1:0", Security())
            reader = await post(server.port, 5 * 2**20)  # refused by its head, before any of it comes
            assert await status(reader) == 413
            monkeypatch.setattr("exitflow.serving.rest.MAX_HELD", 2**20)
            for _ in range(2):
                await post(server.port, 2**20, bytes(2**19 - 1))
            await asyncio.sleep(0.2)
            reader = await post(server.port, 1000, bytes(1000))
            assert await status(reader) == 429
            assert node.counts.rejected == 1
            monkeypatch.setattr("exitflow.serving.rest.BODY_SECONDS", 0.1)
            for writer in opened:
                writer.close()
            await asyncio.sleep(0.2)
            reader = await post(server.port, 1000, bytes(999))
            assert await status(reader) == 400
            assert b"did not come within 0.1 s" in await reader.read(1000)
            opened[-1].close()
            await server.close()

    asyncio.run(scenario())


def test_confident_answers_are_audited_when_the_link_has_room_and_agreement_is_counted(tmp_path):
    bundle = make_bundle(tmp_path / "b", chain(rate=1000.0, limits=(200.0, 50.0)))
    spec = replace(EAGER, audit_share=1.0)

    async def scenario():
        async with (
            running(bundle, "edge", {}) as (_, edge),
            running(bundle, "device", {"edge": edge}, spec=spec) as (
                device,
                _,
            ),
        ):
            await asyncio.sleep(0.9)  # tokens
            device.control.threshold = -1.0
            answers = await ask(device, bundle, 1)
            assert answers.nodes == ["device"]
            await until(lambda: device.counts.audited == 1)
            logits = bundle.samples().outputs.logits
            assert device.counts.agreed == int(logits[0][0].argmax() == logits[1][0].argmax())
            assert device.links["edge"].counts.audited == 1

    asyncio.run(scenario())


def test_a_new_bundle_is_loaded_and_the_old_one_still_answers_who_names_it(tmp_path):
    old = make_bundle(tmp_path / "b", ALL_UP, seed=0)
    new = make_bundle(tmp_path / "new", ALL_UP, seed=1, name="renamed")

    async def scenario():
        async with running(old, "cloud") as (node, _):
            inputs = old.samples().inputs[:1]
            before = (await node.infer(node.current, inputs)).scores
            shutil.rmtree(tmp_path / "b")
            shutil.copytree(tmp_path / "new", tmp_path / "b")
            loaded = await node.reload()
            assert loaded.hash == new.hash != old.hash
            assert node._forwarder.control is node.control
            after = (await node.infer(node.current, inputs)).scores
            assert np.allclose(after[0].argmax(), new.samples().outputs.logits[2][0].argmax())
            again = await node.infer(node.version(old.hash), inputs)
            assert np.allclose(again.scores, before)
            assert not np.allclose(after, before)
            assert check_model(node, "small", old.hash).bundle.hash == old.hash
            assert check_model(node, "renamed", "").bundle.hash == new.hash
            assert check_model(node, "small", "").bundle.hash == old.hash  # the old name is not answered by the new

    asyncio.run(scenario())


def test_a_damaged_bundle_is_not_loaded_and_the_node_goes_on(tmp_path):
    bundle = make_bundle(tmp_path / "b", ALL_UP)

    async def scenario():
        async with running(bundle, "cloud") as (node, _):
            (tmp_path / "b" / "segment-2.onnx").write_bytes(b"junk")
            manifest = tmp_path / "b" / "manifest.json"
            manifest.write_text(manifest.read_text() + " ")
            with pytest.raises(BundleError, match=r"segment-2.onnx: has SHA-256"):
                await node.reload()
            assert node.current.bundle.hash == bundle.hash
            assert (await ask(node, bundle)).nodes == ["cloud"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda m: m["nodes"].pop("cloud"), "has no threshold or no segment for node 'cloud'"),
        (lambda m: m.update(codecs=[]), "codecs: every codec is needed"),
        (lambda m: m.update(input_shape=[1, 5, 5]), "its segments do not take what the manifest says"),
        (lambda m: m.update(input_shape=[1] * 70), "its segments do not take what the manifest says"),
        (lambda m: m.update(num_classes=7), "segment-1.onnx gives other shapes than the manifest says"),
        (lambda m: m["segments"][1].update(feature_shape=[7]), "segment-2.onnx gives other shapes"),
        (lambda m: m.update(input_shape=[1, 4000, 4000]), "the new bundle takes larger requests; restart the node"),
    ],
)
def test_a_bundle_that_cannot_be_served_is_refused_before_anything_changes(tmp_path, spoil, sentence):
    bundle = make_bundle(tmp_path / "b", ALL_UP)
    path = tmp_path / "b" / "manifest.json"
    good = path.read_text()
    spoilt = json.loads(good)
    spoil(spoilt)

    async def scenario():
        async with running(bundle, "cloud") as (node, _):
            control = node.control
            path.write_text(json.dumps(spoilt))
            with pytest.raises(BundleError, match=sentence):
                await node.reload()
            assert (node.current.bundle.hash, node.previous, node.control) == (bundle.hash, None, control)
            assert (await ask(node, bundle)).nodes == ["cloud"]
            path.write_text(good + " ")
            assert (await node.reload()).hash != bundle.hash

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
            assert f"serves bundle {other.version}, not {eager.version}" in node.links["edge"].problem

    asyncio.run(scenario())


def test_a_batch_that_the_engine_cannot_compute_is_an_error_and_not_silence(eager):
    async def scenario():
        async with running(eager, "cloud") as (node, _):
            with pytest.raises(RuntimeError):
                await node.infer(node.current, np.zeros((1, 2, 2), dtype=np.uint8))
            assert node.counts.failed == 1
            assert (await ask(node, eager)).nodes == ["cloud"]

    asyncio.run(scenario())
