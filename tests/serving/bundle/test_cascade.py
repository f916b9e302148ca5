"""Networks of strangers behind one another: what each says alone is what the tree says together."""

import asyncio
import json
import re
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from exitflow.serving.bundle.bundle import load_bundle
from tests.command import call
from tests.serving.asking import expected
from tests.serving.inprocess import EAGER, ask, running

CLASSES, SHAPE = 3, (2, 4)
SYSTEM = """
name = "strangers"
training.answers = "own"
[[nodes]]
name = "device"
exit = 1
arrival_rate = 50.0
parents = [{ name = "edge", max_transfer_rate = 20.0 }]
[[nodes]]
name = "edge"
exit = 2
parents = [{ name = "cloud", max_transfer_rate = 8.0 }]
[[nodes]]
name = "cloud"
exit = 3
"""


def stranger(path, seed, *, width=8, classes=CLASSES, ends="logits", batch="N", scale=1.0, kind=TensorProto.FLOAT):
    """A linear classifier of (N, width) floats, which subtracts a mean of its own first."""
    rng = np.random.default_rng(seed)
    weights = rng.normal(size=(width, classes)).astype(np.float32)
    nodes = [
        helper.make_node("Cast", ["x"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Sub", ["floats", "mean"], ["centred"]),
        helper.make_node("MatMul", ["centred", "weights"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1),
        helper.make_node("ArgMax", ["logits"], ["label"], axis=1, keepdims=0),
    ]
    outputs = [
        helper.make_tensor_value_info("label", TensorProto.INT64, [batch]),
        *(helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch, classes]) for name in ends.split()),
    ]
    constants = {"mean": np.array(seed * scale, np.float32), "weights": weights * np.float32(scale)}
    graph = helper.make_graph(
        nodes,
        "stranger",
        [helper.make_tensor_value_info("x", kind, [batch, width])],
        outputs,
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    path.write_bytes(model.SerializeToString())
    return path


@pytest.fixture(scope="module", params=["uint8", "float32"])
def place(request, tmp_path_factory):
    """A directory with three models, a system and data; the labels are what the last model says."""
    folder = tmp_path_factory.mktemp("strangers")
    rng = np.random.default_rng(0)
    scale = 0.05 if request.param == "uint8" else 1.0
    stranger(folder / "small.onnx", 1, scale=scale)
    stranger(folder / "medium.onnx", 2, ends="probabilities", scale=scale)
    stranger(folder / "large.onnx", 3, scale=scale)
    inputs = rng.integers(0, 256, (400, *SHAPE)) if request.param == "uint8" else rng.normal(size=(400, *SHAPE))
    inputs = inputs.astype(request.param)
    np.savez(folder / "data.npz", inputs=inputs, labels=alone(folder / "large.onnx", inputs)["logits"].argmax(axis=1))
    (folder / "system.toml").write_text(SYSTEM)
    cascade(folder, "--out", folder / "bundle")
    return folder


def alone(path, inputs):
    """What the model itself says."""
    session = onnxruntime.InferenceSession(path.read_bytes())
    found = session.run(None, {"x": inputs.reshape(len(inputs), -1).astype(np.float32)})
    return dict(zip([each.name for each in session.get_outputs()], found, strict=True))


def cascade(folder, *more, models=("small", "medium", "large"), code=0):
    paths = [folder / f"{name}.onnx" for name in models]
    options = ["--plan", folder / "system.toml", "--calibrate", folder / "data.npz"]
    return call("cascade", *paths, *options, *more, code=code)


def test_every_exit_says_what_its_model_says(place):
    samples = load_bundle(place / "bundle").samples()
    for exit, (name, end) in enumerate((("small", "logits"), ("medium", "probabilities"), ("large", "logits"))):
        says = alone(place / f"{name}.onnx", samples.inputs)[end]
        if end == "probabilities":
            says = np.log(np.maximum(says, 1e-12))
        assert np.allclose(samples.outputs.logits[exit], says, atol=1e-3)
    assert json.loads((place / "bundle" / "manifest.json").read_text())["report"]["exit_accuracy"][2] == 1.0


def test_the_data_are_halved_for_thresholds_and_for_figures(place):
    bundle = load_bundle(place / "bundle")
    with np.load(place / "data.npz") as data:
        assert (bundle.samples().inputs == data["inputs"][1::2]).all()
    assert 0 < bundle.manifest.nodes["device"].serve_fraction < 1
    assert bundle.manifest.nodes["device"].threshold is not None


@pytest.mark.heavy
@pytest.mark.parametrize("forward", ["auto", "feature", "input"])
def test_served_by_a_tree_it_answers_as_the_evaluation_says(place, forward):
    bundle = load_bundle(place / "bundle")
    spec = replace(EAGER, control="threshold", forward=forward)

    async def scenario():
        async with (
            running(bundle, "cloud", spec=spec) as (_, cloud),
            running(bundle, "edge", {"cloud": cloud}, spec=spec) as (_, edge),
            running(bundle, "device", {"edge": edge}, spec=spec) as (device, _),
        ):
            answers = await ask(device, bundle, 100)
            return list(zip(answers.scores.argmax(axis=1).tolist(), answers.exits.tolist(), answers.nodes, strict=True))

    found = asyncio.run(scenario())
    assert found == expected(bundle, "device", bundle.samples())[:100]
    assert {node for _, _, node in found} == {"device", "edge", "cloud"}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"width": 9}, r"takes float of shape \[9\], the inputs are \[2, 4\]"),
        ({"classes": 4}, "tells 4 classes apart, .*small.onnx tells 3"),
        ({"ends": "logits probabilities"}, "must be the classes' scores, .* got 'logits', 'probabilities'"),
        ({"ends": ""}, "must be the classes' scores, .* got none"),
        ({"batch": 1}, "takes batches of 1 only"),
        ({"kind": TensorProto.INT64}, "takes int64 of shape"),
        ({"scale": np.inf}, "must give finite scores"),
    ],
)
def test_a_model_that_does_not_fit_is_named_with_the_reason(place, changes, problem):
    stranger(place / "odd.onnx", 2, **changes)
    result = cascade(place, "--out", place / "none", models=("small", "odd", "large"), code=2)
    assert re.search(rf"odd.onnx: .*{problem}", result.stderr)
    assert not (place / "none").exists()


def test_what_else_does_not_fit_is_one_sentence(place):
    (place / "text.onnx").write_text("no model")
    cases = [
        ({"models": ("small", "large")}, "the system has 3 exits, so it takes 3 models, got 2"),
        ({"models": ("small", "text", "large")}, "text.onnx: is no ONNX model"),
        ({"models": ("small", "absent", "large")}, "absent.onnx: cannot be read"),
    ]
    for options, sentence in cases:
        assert sentence in cascade(place, "--out", place / "none", code=2, **options).stderr
    assert "is already there; replace it with --replace" in cascade(place, "--out", place / "bundle", code=2).stderr


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"inputs": np.zeros((30, 8), np.int64), "labels": np.zeros(30, int)}, "inputs must be bytes or floats"),
        ({"inputs": np.zeros((30, 2, 4), np.uint8), "labels": np.zeros(29, int)}, "labels must be at least 20"),
        ({"inputs": np.zeros((30, 2, 4), np.uint8), "labels": np.full(30, -1)}, "labels must not be negative"),
        ({"inputs": np.zeros((30, 2, 4), np.uint8), "labels": np.full(30, 3)}, "the labels go up to 3"),
        ({"inputs": np.zeros((30, 2, 4), np.uint8)}, "it holds no 'labels'"),
    ],
)
def test_data_that_do_not_fit_are_one_sentence(place, tmp_path, data, sentence):
    np.savez(tmp_path / "data.npz", **data)
    paths = [place / f"{name}.onnx" for name in ("small", "medium", "large")]
    options = ["--plan", place / "system.toml", "--calibrate", tmp_path / "data.npz", "--out", tmp_path / "b"]
    assert sentence in call("cascade", *paths, *options, code=2).stderr


def test_the_segments_are_sound_onnx(place):
    for segment in load_bundle(place / "bundle").segments:
        onnx.checker.check_model(onnx.load_model_from_string(segment))
