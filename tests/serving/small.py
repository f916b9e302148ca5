"""Small bundles to serve: hand-made ONNX segments, no PyTorch, made in milliseconds."""

from __future__ import annotations

import numpy as np
import onnx
import tomli_w
from onnx import TensorProto, helper, numpy_helper

from exitflow.config import encode
from exitflow.serving.bundle.assembling import LabelledInputs, Parts, assemble
from exitflow.serving.bundle.bundle import Bundle, load_bundle
from exitflow.serving.bundle.engine import Engine
from exitflow.topology.graph import Link, Node, Topology
from exitflow.topology.paper_trees import paper_tree

NUM_CLASSES = 4
INPUT_SHAPE = (1, 4, 4)
FEATURES = 6


def segment(exit: int, *, last: bool, seed: int, floats: bool = False, shape=INPUT_SHAPE) -> bytes:
    """carry -> relu(linear) = features, linear = logits."""
    rng = np.random.default_rng((seed, exit))
    width = int(np.prod(shape)) if exit == 1 else FEATURES
    weights = {
        "hidden": rng.normal(size=(width, FEATURES)) / (100 if exit == 1 and not floats else 2),
        "head": rng.normal(size=(FEATURES, NUM_CLASSES)),
        "shape": np.array([-1, width]),
    }
    initializers = [
        numpy_helper.from_array(value.astype(np.int64 if name == "shape" else np.float32), name)
        for name, value in weights.items()
    ]
    nodes = [
        helper.make_node("Cast", ["carry"], ["cast"], to=TensorProto.FLOAT),
        helper.make_node("Reshape", ["cast", "shape"], ["flat"]),
        helper.make_node("MatMul", ["flat", "hidden"], ["mixed"]),
        helper.make_node("Relu", ["mixed"], ["features"]),
        helper.make_node("MatMul", ["features", "head"], ["logits"]),
    ]
    if exit == 1:
        kind = TensorProto.FLOAT if floats else TensorProto.UINT8
        carry = helper.make_tensor_value_info("carry", kind, ["batch", *shape])
    else:
        carry = helper.make_tensor_value_info("carry", TensorProto.FLOAT, ["batch", FEATURES])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", NUM_CLASSES])
    features = helper.make_tensor_value_info("features", TensorProto.FLOAT, ["batch", FEATURES])
    graph = helper.make_graph(nodes, "segment", [carry], [logits] if last else [features, logits], initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.checker.check_model(model)
    return model.SerializeToString()


def make_bundle(path, topology: Topology | None = None, *, seed: int = 0, num_test: int = 400, **changes) -> Bundle:
    """Labels are what all exits say together, so all of them know something."""
    topology = topology or paper_tree(7, "80-15-5")
    floats, shape, name = (changes.pop(*key) for key in (("floats", False), ("shape", INPUT_SHAPE), ("name", "small")))
    last = topology.num_exits
    segments = [segment(exit, last=exit == last, seed=seed, floats=floats, shape=shape) for exit in range(1, last + 1)]
    rng = np.random.default_rng(7)

    def data(count: int) -> LabelledInputs:
        inputs = rng.integers(0, 256, size=(count, *shape))
        inputs = (inputs / 255).astype(np.float32) if floats else inputs.astype(np.uint8)
        return LabelledInputs(inputs, _together(segments, inputs))

    system = tomli_w.dumps({"name": name, "nodes": [encode(node) for node in topology.nodes]})
    parts = Parts(name, topology, system, segments, [100] * last, data(400), data(num_test), **changes)
    assemble(parts, path)
    return load_bundle(path)


def _together(segments: list[bytes], inputs: np.ndarray) -> np.ndarray:
    """(N,) the class with the largest sum of logits over the exits."""
    carry, total = inputs, np.zeros((len(inputs), NUM_CLASSES))
    for data in segments:
        carry, logits = Engine([data]).run({0: carry})
        total += logits
    return total.argmax(axis=1)


def chain(*, rate: float = 100.0, limits: tuple[float | None, ...] = (20.0, 5.0)) -> Topology:
    """device -> edge -> cloud."""
    return Topology(
        (
            Node("device", 1, rate, (Link("edge", limits[0]),)),
            Node("edge", 2, 0.0, (Link("cloud", limits[1]),)),
            Node("cloud", 3),
        )
    )
