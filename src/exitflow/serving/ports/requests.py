"""From a request of the Open Inference Protocol to samples that a node can compute, or one sentence why not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from exitflow.errors import suggestion
from exitflow.serving.bundle.bundle import DATATYPES, MAX_SAMPLES
from exitflow.serving.node.jobs import Loaded
from exitflow.serving.node.node import Node
from exitflow.serving.wire import codecs
from exitflow.serving.wire.answers import FEATURES, INPUT, LOGITS, OUTPUTS, BadRequestError

MAX_OUTPUTS = 16  # the same may come twice
_CONTENTS = {"UINT8": "uint_contents", "FP32": "fp32_contents"}
FROM = "exitflow_from"


class UnknownModelError(Exception):
    """A request names a model that is not here."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input as it came: raw bytes, or a flat list of numbers."""

    name: str
    datatype: str
    shape: Sequence[int]
    data: Any


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request that makes sense."""

    loaded: Loaded
    carry: npt.NDArray[Any]
    start: int
    before: npt.NDArray[Any] | None  # logits of exit `start`, where answers are blended
    child: str | None
    outputs: Sequence[str]  # (): all
    timeout: float  # seconds; infinite where none was given


def check_model(node: Node, name: str, version: str) -> Loaded:
    """The loaded bundle that is meant."""
    named = [loaded for loaded in node.loaded if loaded.bundle.manifest.name == name]
    if not named:
        here = node.current.bundle.manifest.name
        raise UnknownModelError(f"there is no model {name[:100]!r}; this node serves {here!r}")
    return node.version(version, named)


def understand_message(node: Node, request: Any, *, may_forward: bool) -> Wanted:
    """The request that a ModelInferRequest holds."""
    parameters = {name: _parameter(value) for name, value in request.parameters.items()} if request.parameters else {}
    count = 1 + (FROM in parameters and len(request.inputs) == 2)  # a node may send logits with its features
    if len(request.inputs) != count:
        raise BadRequestError(f"a request has one input tensor, named {INPUT!r}; got {len(request.inputs)}")
    raw = request.raw_input_contents
    if raw and len(raw) != count:
        raise BadRequestError(f"every input tensor needs one raw content, got {len(raw)} for {count}")
    tensors = [
        Tensor(tensor.name, tensor.datatype, tensor.shape, raw[index] if raw else _numbers(tensor))
        for index, tensor in enumerate(request.inputs)
    ]
    for output in request.outputs:
        check_output_parameters(output.parameters)
    outputs = [output.name for output in request.outputs] if request.outputs else ()
    return understand(
        node,
        (request.model_name, request.model_version),
        tensors,
        outputs,
        parameters,
        may_forward=may_forward,
    )


def check_output_parameters(parameters: Mapping[str, Any]) -> None:
    """Those of Triton that would change the answer, and that we do not have, are not passed over."""
    for name in ("classification", "shared_memory_region"):
        if name in parameters:
            raise BadRequestError(f"an output cannot have the parameter {name!r} here; 'scores' holds all classes")


def understand(
    node: Node,
    model: tuple[str, str],
    tensors: Sequence[Tensor],
    outputs: Sequence[str],
    parameters: Mapping[str, Any],
    *,
    may_forward: bool,
) -> Wanted:
    """Check everything; `may_forward` says whether the caller may be a node."""
    tensor, *others = tensors
    child = parameters.get(FROM)
    if child is not None:
        if not may_forward:
            raise BadRequestError("only nodes may forward, and this port is for clients")
    elif tensor.name == FEATURES:
        raise BadRequestError(f"{FEATURES!r} come from nodes; clients send {INPUT!r}")
    loaded = check_model(node, *model)
    if child is not None and child not in loaded.bundle.topology.by_name:
        raise BadRequestError(f"{FROM}: there is no node {str(child)[:100]!r}")
    for output in outputs:
        if output not in OUTPUTS:
            raise BadRequestError(f"there is no output {output[:100]!r}{suggestion(output[:100], OUTPUTS)}")
    if len(outputs) > MAX_OUTPUTS:
        raise BadRequestError(f"a request names at most {MAX_OUTPUTS} outputs, got {len(outputs)}")
    before = None
    if tensor.name == FEATURES:
        carry, start = _features(node, loaded, tensor, parameters)
        before = _logits(loaded, others, len(carry))
    elif others:
        raise BadRequestError(f"beside {INPUT!r} there is no other input tensor, got {others[0].name[:100]!r}")
    else:
        carry, start = _input(loaded, tensor), 0
    return Wanted(loaded, carry, start, before, child, outputs, _timeout(parameters))


def _timeout(parameters: Mapping[str, Any]) -> float:
    """The seconds that Triton's parameter gives in microseconds."""
    value = parameters.get("timeout")
    if value is None:
        return math.inf
    if type(value) is float and value.is_integer():  # JSON does not tell 5.0 from 5
        value = int(value)
    if type(value) is not int or not 0 <= value < 2**63:
        raise BadRequestError(f"timeout must be a whole number of microseconds below 2^63, got {str(value)[:100]!r}")
    return value / 1e6 if value else math.inf


def _input(loaded: Loaded, tensor: Tensor) -> npt.NDArray[Any]:
    manifest = loaded.bundle.manifest
    if tensor.name != INPUT:
        raise BadRequestError(f"the input tensor is named {INPUT!r}, got {tensor.name[:100]!r}")
    if tensor.datatype != manifest.input_datatype:
        raise BadRequestError(f"the datatype of {INPUT!r} is {manifest.input_datatype}, got {tensor.datatype[:100]!r}")
    shape = _shape(tensor, manifest.input_shape)
    dtype = np.dtype(DATATYPES[manifest.input_datatype]).newbyteorder("<")
    count = math.prod(shape)
    if isinstance(tensor.data, bytes):
        if len(tensor.data) != count * dtype.itemsize:
            given, needed = len(tensor.data), count * dtype.itemsize
            raise BadRequestError(f"{INPUT!r} of shape {list(shape)} takes {needed} bytes, got {given}")
        values = np.frombuffer(tensor.data, dtype=dtype)
    else:
        values = _from_numbers(tensor.data, dtype, count)
    return _finite(values.reshape(shape), INPUT)


def _from_numbers(data: Any, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
    try:
        wide = np.asarray(data, dtype=np.float64).reshape(-1)
    except (ValueError, TypeError, OverflowError):
        raise BadRequestError(f"the data of {INPUT!r} must be numbers") from None
    if len(wide) != count:
        raise BadRequestError(f"{INPUT!r} needs {count} numbers for its shape, got {len(wide)}")
    if dtype == np.uint8 and not ((wide >= 0) & (wide <= 255) & (wide == np.floor(wide))).all():
        raise BadRequestError(f"the data of {INPUT!r} must be whole numbers from 0 to 255")
    with np.errstate(over="ignore"):
        return wide.astype(dtype)


def _features(
    node: Node, loaded: Loaded, tensor: Tensor, parameters: Mapping[str, Any]
) -> tuple[npt.NDArray[Any], int]:
    exit = parameters.get("exit")
    if type(exit) is not int or not 1 <= exit < node.exit:
        raise BadRequestError(f"exit: node {node.name!r} takes features of exits 1 to {node.exit - 1}, got {exit!r}")
    shape = _shape(tensor, loaded.bundle.manifest.segments[exit - 1].feature_shape)
    if not isinstance(tensor.data, bytes):
        raise BadRequestError(f"{FEATURES!r} must come as raw contents")
    codec, compress = parameters.get("codec", "fp32"), parameters.get("compress", False)
    try:
        carry = codecs.decode(tensor.data, shape, str(codec), compress=bool(compress))
    except ValueError as error:
        raise BadRequestError(str(error)) from None
    return _finite(carry, FEATURES), exit


def _logits(loaded: Loaded, tensors: Sequence[Tensor], count: int) -> npt.NDArray[Any] | None:
    """What the child would have answered; where answers are not blended it need not be there."""
    manifest = loaded.bundle.manifest
    if not manifest.blends and not tensors:
        return None
    shape = (count, manifest.num_classes)
    if [(each.name, each.datatype, tuple(each.shape)) for each in tensors] != [(LOGITS, "FP32", shape)]:
        raise BadRequestError(f"{FEATURES!r} come with {LOGITS!r}: raw FP32 of shape {list(shape)}")
    if not isinstance(tensors[0].data, bytes) or len(tensors[0].data) != 4 * math.prod(shape):
        raise BadRequestError(f"{FEATURES!r} come with {LOGITS!r}: raw FP32 of shape {list(shape)}")
    return _finite(np.frombuffer(tensors[0].data, dtype="<f4").reshape(shape), LOGITS)


def _shape(tensor: Tensor, sample_shape: tuple[int, ...]) -> tuple[int, ...]:
    shape = tuple(tensor.shape)
    if shape[1:] != sample_shape or not shape or shape[0] < 1:
        expected = ", ".join(map(str, ("N", *sample_shape)))
        raise BadRequestError(f"the shape of {tensor.name!r} is [{expected}] with N from 1, got {list(shape)[:10]}")
    if shape[0] > MAX_SAMPLES:
        raise BadRequestError(f"a request has at most {MAX_SAMPLES} samples, got {shape[0]}")
    return shape


def _finite(values: npt.NDArray[Any], name: str) -> npt.NDArray[Any]:
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise BadRequestError(f"{name!r} holds NaN or infinity")
    return values


def _numbers(tensor: Any) -> Any:
    return getattr(tensor.contents, _CONTENTS.get(tensor.datatype, "fp32_contents"))


def _parameter(value: Any) -> Any:
    which = value.WhichOneof("choice")
    return getattr(value, which) if which else None
