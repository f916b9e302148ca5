"""A running node gets another bundle."""

import asyncio
import json
import shutil

import numpy as np
import pytest

from exitflow.errors import BundleError
from exitflow.serving.ports.requests import check_model
from exitflow.topology.graph import Link, Node, Topology
from tests.serving.inprocess import ALL_UP, EAGER, ask, running
from tests.serving.small import make_bundle

pytestmark = pytest.mark.heavy


def test_a_new_bundle_is_loaded_and_the_old_one_still_answers_who_names_it(tmp_path):
    old = make_bundle(tmp_path / "b", ALL_UP, seed=0)
    new = make_bundle(tmp_path / "new", ALL_UP, seed=1, name="renamed")

    async def scenario():
        async with running(old, "cloud") as (node, _):
            inputs = old.samples().inputs[:1]
            before, control = (await node.infer(node.current, inputs)).scores, node.control
            shutil.rmtree(tmp_path / "b")
            shutil.copytree(tmp_path / "new", tmp_path / "b")
            loaded = await node.reload()
            assert loaded.hash == new.hash != old.hash
            assert node.control is not control  # by its own thresholds
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


def _tree(*devices):
    children = (Node(name, 1, 100.0, (Link("edge"),)) for name in devices)
    return Topology((*children, Node("edge", 2, 0.0, (Link("cloud"),)), Node("cloud", 3)))


def test_a_child_that_the_new_bundle_has_no_more_is_still_answered_with_the_old_one(tmp_path):
    old = make_bundle(tmp_path / "b", _tree("camera", "door"))
    make_bundle(tmp_path / "new", _tree("camera"), seed=1)

    async def scenario():
        async with (
            running(old, "edge") as (edge, place),
            running(old, "door", {"edge": place}, spec=EAGER) as (door, _),
        ):
            inputs = old.samples().inputs[:1]
            shutil.rmtree(tmp_path / "b")
            shutil.copytree(tmp_path / "new", tmp_path / "b")
            await edge.reload()
            assert (await door.infer(door.current, inputs)).nodes == ["edge"]
            assert door.links["edge"].counts.failures == {}

    asyncio.run(scenario())


@pytest.mark.parametrize(("device", "name"), [("camera", "small"), ("sensor", "small"), ("camera", "renamed")])
def test_the_link_to_a_parent_with_another_bundle_is_cut_at_once_whatever_it_holds(tmp_path, device, name):
    bundle = make_bundle(tmp_path / "b", _tree("camera"))
    other = make_bundle(tmp_path / "other", _tree(device), seed=1, name=name)

    async def scenario():
        async with (
            running(other, "edge") as (_, place),
            running(bundle, "camera", {"edge": place}, spec=EAGER) as (node, _),
        ):
            for _ in range(3):
                assert (await ask(node, bundle)).nodes == ["camera"]
            link = node.links["edge"]
            assert (dict(link.counts.failures), link.state.times_cut) == ({"version": 1}, 1)

    asyncio.run(scenario())
