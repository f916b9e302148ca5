"""From a trained run to a bundle whose answers are PyTorch's."""

import json
import warnings

import numpy as np
import onnx
import pytest

from exitflow.runs.runs import Run
from exitflow.serving.bundle.bundle import load_bundle
from exitflow.serving.bundle.engine import Engine
from tests import command
from tests.small import TINY

pytestmark = pytest.mark.heavy


def call(*args, code=0):
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # those of the exporter are its own
        return command.call(*args, code=code)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "run"
    options = [part for override in (*TINY, "training.weighting=auto") for part in ("--set", override)]
    call("train", "paper-7:80-15-5", "--out", path, "--backend", "serial", *options)
    return path


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    path = tmp_path_factory.mktemp("bundle") / "b"
    return path, json.loads(call("export", run, "--out", path, "--json").stdout)


def test_answers_are_pytorchs_from_raw_inputs_at_every_exit(run, exported):
    path, found = exported
    bundle = load_bundle(path)
    reference = Run(run).outputs()
    samples = bundle.samples()
    assert samples.inputs.dtype == np.uint8
    for exit in (1, 2, 3):
        _, logits = Engine(bundle.segments[:exit], blends=bundle.manifest.blends).run({0: samples.inputs})
        assert np.allclose(logits, reference.logits[exit - 1][: len(logits)], atol=1e-4)
        assert np.allclose(logits, samples.outputs.logits[exit - 1], atol=1e-4)
    assert found["report"]["changed"] == [0.0, 0.0, 0.0]
    assert found["report"]["largest_difference"] < 1e-5
    assert found["report"]["accuracy"] == found["report"]["torch_accuracy"]


def test_any_batch_gives_the_same_rows(exported):
    bundle = load_bundle(exported[0])
    engine, inputs = Engine(bundle.segments), bundle.samples().inputs
    _, together = engine.run({0: inputs[:37]})
    for row in (0, 17, 36):
        assert np.allclose(engine.run({0: inputs[row : row + 1]})[1][0], together[row], atol=1e-5)


def test_the_bundle_says_nothing_of_the_machine_it_was_made_on(exported):
    for path in exported[0].glob("*.onnx"):
        model = onnx.load(path)
        assert not any(node.metadata_props or node.doc_string for node in model.graph.node)
        assert b"site-packages" not in path.read_bytes()


def test_int8_reports_what_it_costs(run, exported, tmp_path):
    found = json.loads(call("export", run, "--out", tmp_path / "b", "--quantize", "int8", "--json").stdout)["report"]
    assert found["precision"] == "int8"
    assert 0 < found["largest_difference"] < 0.5
    assert len(found["changed"]) == 3
    kinds = {node.op_type for node in onnx.load(tmp_path / "b" / "segment-1.onnx").graph.node}
    assert "QuantizeLinear" in kinds
    assert load_bundle(tmp_path / "b").hash != load_bundle(exported[0]).hash


def test_a_bundle_is_replaced_only_when_asked(run, exported):
    result = call("export", run, "--out", exported[0], code=2)
    assert "is already there; replace it with --replace" in result.stderr
    before = load_bundle(exported[0]).hash
    text = call("export", run, "--out", exported[0], "--replace", "--confidence", "margin").stdout
    assert "What sending features to the next exit costs" in text
    after = load_bundle(exported[0])
    assert after.manifest.confidence == "margin"
    assert after.hash != before
