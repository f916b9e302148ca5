"""A bundle of networks that were never trained together: from a small one that asks to a large one that knows.

Each is an ONNX model of one input and of the scores of the same classes, with whatever preprocessing it needs inside.
It becomes a segment whose features are the input itself, so that the input travels from node to node, and everything
else is as with the exits of one network: thresholds, answers that exits give together, rates, audits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, compose, helper, numpy_helper

from exitflow.errors import BundleError, ConfigError
from exitflow.files import LARGE_FILE, open_regular, read_file
from exitflow.npz import open_npz
from exitflow.serving.bundle.assembling import BATCH_SIZE, LabelledInputs, Parts, assemble, check_place
from exitflow.serving.bundle.bundle import Manifest
from exitflow.serving.bundle.engine import Engine
from exitflow.system.system import System

Array = npt.NDArray[Any]

LEAST_SAMPLES = 20
OPSET = 17  # where a model names none of the standard operators
TINY = 1e-12  # the least probability: its logarithm is a number
FLOATS = {TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16}
_TYPES = {"uint8": TensorProto.UINT8, "float32": TensorProto.FLOAT}


@dataclass(frozen=True)
class Stranger:
    """A model as its file has it."""

    source: str
    proto: Any  # onnx.ModelProto
    input: str
    input_type: int
    shape: tuple[int, ...]  # of one sample, as the model wants it
    output: str


def cascade_bundle(
    models: Sequence[str | Path],
    system: System,
    data: str | Path,
    out: str | Path,
    *,
    confidence: str = "entropy",
    replace: bool = False,
) -> Manifest:
    """Write a bundle of `models`, one for each exit of the system, from the first exit to the last.

    `data` is an .npz file of `inputs` as clients send them, and `labels`. Every second sample calibrates, the others
    say how good the answers are.
    """
    check_place(Path(out), replace=replace)
    exits = system.topology.num_exits
    if len(models) != exits:
        raise ConfigError(f"the system has {exits} exits, so it takes {exits} models, got {len(models)}", key="--plan")
    samples = _read_samples(Path(data))
    segments, classes = [], 0
    for number, path in enumerate(models, start=1):
        stranger = _read_model(Path(path), samples.inputs.shape[1:])
        kind = samples.inputs.dtype.name if number == 1 else "float32"
        segment, found = _as_segment(stranger, samples, kind, last=number == exits)
        if classes and found != classes:
            raise BundleError(f"{path}: tells {found} classes apart, {models[0]} tells {classes}")
        classes = found
        segments.append(segment)
    if samples.labels.max() >= classes:
        problem = f"{data}: the labels go up to {samples.labels.max()}, and the models tell {classes} classes apart"
        raise ConfigError(problem, key="--calibrate")
    parts = Parts(
        name=system.name,
        topology=system.topology,
        system_toml=system.to_toml(),
        segments=segments,
        multiply_adds=[0] * exits,  # of a stranger they are not known
        validation=LabelledInputs(samples.inputs[::2], samples.labels[::2]),
        test=LabelledInputs(samples.inputs[1::2], samples.labels[1::2]),
        confidence=confidence,
        blends_answers=system.training.blends_answers,
    )
    return assemble(parts, Path(out))


def _read_samples(path: Path) -> LabelledInputs:
    try:
        with open_regular(path) as file, open_npz(file) as arrays:
            inputs, labels = arrays.read("inputs"), arrays.read("labels")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}", key="--calibrate") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}", key="--calibrate") from None
    if inputs.dtype.kind == "f":
        inputs = inputs.astype(np.float32)
    problem = ""
    if inputs.dtype.name not in _TYPES or inputs.ndim < 2:
        problem = f"inputs must be bytes or floats with a sample in each row, got {inputs.dtype} {list(inputs.shape)}"
    elif labels.shape != inputs.shape[:1] or labels.dtype.kind not in "iu" or len(labels) < LEAST_SAMPLES:
        problem = f"labels must be at least {LEAST_SAMPLES} whole numbers, one for each of {len(inputs)} inputs"
    elif labels.min() < 0 or not np.isfinite(inputs).all():
        problem = "labels must not be negative, nor inputs infinite or no numbers"
    if problem:
        raise ConfigError(f"{path}: {problem}", key="--calibrate")
    return LabelledInputs(inputs, labels.astype(np.int64))


def _read_model(path: Path, sample_shape: tuple[int, ...]) -> Stranger:
    """Read a model of which exactly one input and one output can be what is needed."""
    try:
        proto = onnx.load_model_from_string(read_file(path, LARGE_FILE))
        onnx.checker.check_model(proto)
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror}") from None
    except Exception as error:  # of protobuf's, and of ONNX's own
        raise BundleError(f"{path}: is no ONNX model: {str(error).splitlines()[0]}") from None
    constants = {each.name for each in proto.graph.initializer}
    inputs = [each for each in proto.graph.input if each.name not in constants]
    if len(inputs) != 1:
        raise BundleError(f"{path}: a model of a cascade has one input, this one has {_names(inputs)}")
    scores = [each for each in proto.graph.output if _is_scores(each)]
    if len(scores) != 1:
        raise BundleError(f"{path}: one output must be the classes' scores, floats (N, C), got {_names(scores)}")
    (batch, *dims), kind = _dims(inputs[0]) or [None], inputs[0].type.tensor_type.elem_type
    if batch is not None:
        raise BundleError(f"{path}: takes batches of {batch} only; export it with a first dimension that is free")
    shape = tuple(sample_shape) if None in dims else tuple(dim for dim in dims if dim is not None)
    if math.prod(shape) != math.prod(sample_shape) or kind not in FLOATS | {TensorProto.UINT8}:
        kind_name = TensorProto.DataType.Name(kind).lower()
        raise BundleError(f"{path}: takes {kind_name} of shape {list(shape)}, the inputs are {list(sample_shape)}")
    return Stranger(str(path), proto, inputs[0].name, kind, shape, scores[0].name)


def _dims(value: Any) -> list[int | None]:
    """None where a dimension is free."""
    return [dim.dim_value if dim.HasField("dim_value") else None for dim in value.type.tensor_type.shape.dim]


def _is_scores(value: Any) -> bool:
    kind = value.type.tensor_type
    return kind.elem_type in FLOATS and (not kind.HasField("shape") or len(kind.shape.dim) == 2)


def _names(values: Sequence[Any]) -> str:
    return ", ".join(repr(value.name) for value in values) or "none"


def _as_segment(stranger: Stranger, samples: LabelledInputs, kind: str, *, last: bool) -> tuple[bytes, int]:
    """(ONNX, number of classes)."""
    plain = _wrapped(stranger, samples.inputs.shape[1:], kind, last=last, logarithm=False)
    inputs = samples.inputs.astype(kind)
    try:
        engine = Engine([plain])
        scores = np.concatenate(
            [engine.run({0: inputs[first : first + BATCH_SIZE]})[1] for first in range(0, len(inputs), BATCH_SIZE)]
        )
    except Exception as error:  # ONNX Runtime raises types of its own, all bare
        raise BundleError(f"{stranger.source}: cannot be run: {str(error).splitlines()[0]}") from None
    if scores.ndim != 2 or len(scores) != len(inputs) or scores.shape[1] < 2 or not np.isfinite(scores).all():
        problem = f"must give finite scores of at least two classes for each input, gave {list(scores.shape)}"
        raise BundleError(f"{stranger.source}: {problem}")
    if (scores >= 0).all() and np.allclose(scores.sum(axis=1), 1, atol=1e-3):  # probabilities
        plain = _wrapped(stranger, samples.inputs.shape[1:], kind, last=last, logarithm=True)
    return plain, scores.shape[1]


def _wrapped(stranger: Stranger, shape: tuple[int, ...], kind: str, *, last: bool, logarithm: bool) -> bytes:
    """carry -> the carry itself in floats = features, the model's scores = logits."""
    model = compose.add_prefix(stranger.proto, "model/")
    graph = model.graph
    constants = {"shape": np.array([-1, *stranger.shape]), "least": np.array(TINY, np.float32)}
    before = [
        helper.make_node("Cast", ["carry"], ["cast"], to=stranger.input_type),
        helper.make_node("Reshape", ["cast", "shape"], [f"model/{stranger.input}"]),
    ]
    after = [helper.make_node("Cast", [f"model/{stranger.output}"], ["scores"], to=TensorProto.FLOAT)]
    if logarithm:
        after += [helper.make_node("Max", ["scores", "least"], ["some"]), helper.make_node("Log", ["some"], ["logits"])]
    else:
        after += [helper.make_node("Identity", ["scores"], ["logits"])]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", None])]
    if not last:
        after.append(helper.make_node("Cast", ["carry"], ["features"], to=TensorProto.FLOAT))
        outputs.insert(0, helper.make_tensor_value_info("features", TensorProto.FLOAT, ["batch", *shape]))
    nodes = [*before, *graph.node, *after]
    for field, values in (
        (graph.node, nodes),
        (graph.input, [helper.make_tensor_value_info("carry", _TYPES[kind], ["batch", *shape])]),
        (graph.output, outputs),
    ):
        del field[:]
        field.extend(values)
    graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    if all(each.domain not in ("", "ai.onnx") for each in model.opset_import):
        model.opset_import.append(helper.make_opsetid("", OPSET))
    data: bytes = model.SerializeToString()
    return data
