"""What goes up, inputs or features, in every codec: the parent's answer is the same."""

import asyncio
import re
from dataclasses import replace

import numpy as np
import pytest

from exitflow.routing import confidence
from exitflow.routing.clock import VirtualClock
from exitflow.serving.node.node_settings import serving_spec
from exitflow.serving.wire.answers import BadRequestError
from tests.serving.inprocess import ALL_UP, EAGER, PATIENT, FakeParent, ask, fake_parent, running
from tests.serving.small import INPUT_SHAPE, NUM_CLASSES, chain, make_bundle

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """Exits answer together with those before them."""
    return make_bundle(tmp_path_factory.mktemp("together") / "b", ALL_UP, blends_answers=True)


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
            assert [answers.nodes for answers in (found[0], found[2])] == [["edge"]] * 2
            assert isinstance(found[1], BadRequestError)
            assert sum(count for _, count in parent.received) == 2
            assert node.links["edge"].counts.failures == {}

    asyncio.run(scenario())


def test_every_link_has_its_own_payload(two_parents, caplog):
    """Also when the other parent is asked instead."""
    caplog.set_level("INFO")
    links = ("links.left.forward=input", "links.right.codec=u8", "links.right.link_megabits=0.001")
    spec = serving_spec([f"forward_timeout={PATIENT}", "audit_share=0.0", *links])

    async def scenario():
        left, right = (FakeParent(NUM_CLASSES, name=name) for name in ("left", "right"))
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
            assert [name == "edge" for name in answers.nodes] == (sure < cut).tolist()
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
    from exitflow.serving.bundle.engine import Engine

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


def test_what_does_not_fit_into_one_message_goes_in_several(eager, monkeypatch):
    monkeypatch.setattr("exitflow.serving.node.forwarding.MAX_MESSAGE", 1000)
    logits = eager.samples().outputs.logits

    async def scenario():
        async with (
            running(eager, "cloud") as (_, cloud),
            running(eager, "edge", {"cloud": cloud}, spec=replace(EAGER, forward="input")) as (_, middle),
            running(eager, "device", {"edge": middle}, spec=EAGER) as (device, _),
        ):
            sizes = []
            link = device.links["edge"]
            infer = link.infer
            monkeypatch.setattr(link, "infer", lambda request, *rest: sizes.append(request) or infer(request, *rest))
            answers = await ask(device, eager, 64)
            assert answers.nodes == ["cloud"] * 64
            assert (answers.scores.argmax(axis=1) == logits[2][:64].argmax(axis=1)).all()
            assert sum(request.inputs[0].shape[0] for request in sizes) == 64
            assert max(request.ByteSize() for request in sizes) <= 1000

    asyncio.run(scenario())


def test_a_device_that_asks_rarely_finds_the_tokens_of_the_time_between(tmp_path):
    """Of all but the moment in which the connection came about."""
    bundle, clock = make_bundle(tmp_path / "b", chain(limits=(10.0, 5.0))), VirtualClock()

    async def scenario():
        async with (
            fake_parent(FakeParent(NUM_CLASSES)) as address,
            running(bundle, "device", {"edge": address}, spec=EAGER, clock=clock) as (node, _),
        ):
            bucket = node.control._buckets["edge"]
            bucket._tokens = 1.0
            for _ in range(2):
                node.control.threshold = node.control._hard = float("inf")
                assert (await ask(node, bundle)).nodes == ["edge"]
                clock.advance(0.5)

    asyncio.run(scenario())
