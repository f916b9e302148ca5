"""A network as ONNX segments. Needs PyTorch and onnx: the extra [export].

Segment e takes the features of exit e-1 (the raw input for e = 1, normalised inside) as `carry`, and gives
`features` and `logits`; the deepest gives logits only.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import torch
from onnx.utils import Extractor
from torch import Tensor, nn

from exitflow.data.dataset import Preparation
from exitflow.models.nested import NestedModel
from exitflow.serving.bundle.bundle import MAX_SAMPLES
from exitflow.serving.bundle.engine import Engine

OPSET = 20
_CALIBRATION_BATCH = 64

Array = npt.NDArray[Any]


class _AllSegments(nn.Module):
    """All segments side by side, each with an input of its own; exported once and cut apart.

    So nothing of one segment can hang on a tensor of another, even where features are the input itself.
    """

    def __init__(self, model: NestedModel, preparation: Preparation) -> None:
        super().__init__()
        self.model, self.preparation = model, preparation

    def forward(self, *carries: Tensor) -> tuple[Tensor, ...]:
        """features 1, logits 1, features 2, ..., logits E."""
        outputs = []
        for exit, carry in enumerate(carries, start=1):
            start = self.preparation(carry.to(torch.float32)) if exit == 1 else carry
            features = self.model.advance(start, exit - 1, exit)
            outputs += [features, self.model.classify(features, exit)]
        return (*outputs[:-2], outputs[-1])

    def examples(self, inputs: Tensor) -> tuple[Tensor, ...]:
        """What each segment is given when the first gets `inputs`."""
        carries, carry = [inputs], self.preparation(inputs.to(torch.float32))
        for exit in range(1, self.model.num_exits):
            carry = self.model.advance(carry, exit - 1, exit)
            carries.append(carry.clone())
        return tuple(carries)


@torch.inference_mode()
def export_segments(model: NestedModel, inputs: Tensor, preparation: Preparation) -> list[onnx.ModelProto]:
    """The segments of `model`; `inputs` (two or more) are raw examples."""
    model = model.float().eval().to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    last = model.num_exits
    names = [f"{kind}_{exit}" for exit in range(1, last + 1) for kind in ("features", "logits")]
    names.remove(f"features_{last}")
    network = _AllSegments(model, preparation)
    whole = _export(network, network.examples(inputs[:2]), names)
    return [_segment(whole, exit, last=exit == last) for exit in range(1, last + 1)]


def _segment(whole: onnx.ModelProto, exit: int, *, last: bool) -> onnx.ModelProto:
    given = f"carry_{exit}"
    wanted = {f"features_{exit}": "features"} if not last else {}
    wanted[f"logits_{exit}"] = "logits"
    segment = Extractor(whole).extract_model([given], list(wanted))
    batch_of_another = {
        name: "carry" for node in segment.graph.node for name in node.input if name.startswith("carry_")
    }
    _rename(segment.graph, batch_of_another | {given: "carry"} | wanted)  # the size of a batch may be asked of any
    return segment


def _rename(graph: onnx.GraphProto, names: dict[str, str]) -> None:
    for value in (*graph.input, *graph.output, *graph.value_info):
        value.name = names.get(value.name, value.name)
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]


def _export(network: nn.Module, carries: tuple[Tensor, ...], output_names: list[str]) -> onnx.ModelProto:
    batch = torch.export.Dim("batch", min=1, max=MAX_SAMPLES)
    with warnings.catch_warnings(), _quiet("torch.onnx"):
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            network,
            carries,
            dynamo=True,
            external_data=False,
            verbose=False,
            opset_version=OPSET,
            dynamic_shapes={"carries": tuple({0: batch} for _ in carries)},
            input_names=[f"carry_{exit}" for exit in range(1, len(carries) + 1)],
            output_names=output_names,
        )
    assert program is not None
    return _without_traces(program.model_proto)


def _without_traces(model: onnx.ModelProto) -> onnx.ModelProto:
    """The exporter notes the source files of the machine it ran on; those are nobody's business."""
    for holder in (model, model.graph, *model.graph.node, *model.graph.initializer, *model.graph.value_info):
        del holder.metadata_props[:]
        holder.doc_string = ""
    for value in (*model.graph.input, *model.graph.output):
        del value.metadata_props[:]
    for function in model.functions:
        for part in (function, *function.node):
            del part.metadata_props[:]
            part.doc_string = ""
    model.producer_name, model.producer_version = "exitflow", ""
    return model


def quantise_segments(segments: Sequence[onnx.ModelProto], inputs: Array) -> list[onnx.ModelProto]:
    """Static int8: ranges of all activations from `inputs`, each segment fed by the quantised one before it."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Batches(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self, values: Array) -> None:
            self.batches = iter(range(0, len(values), _CALIBRATION_BATCH))
            self.values = values

        def get_next(self) -> dict[str, Array] | None:
            start = next(self.batches, None)
            return None if start is None else {"carry": self.values[start : start + _CALIBRATION_BATCH]}

    quantised: list[onnx.ModelProto] = []
    carry: Array = inputs
    with tempfile.TemporaryDirectory() as folder, _quiet():
        for segment in segments:
            source, ready, target = (Path(folder) / f"{name}.onnx" for name in ("source", "ready", "target"))
            onnx.save(segment, str(source))
            quant_pre_process(str(source), str(ready), skip_symbolic_shape=True)
            quantize_static(
                str(ready),
                str(target),
                Batches(carry),
                quant_format=QuantFormat.QDQ,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                per_channel=True,
                nodes_to_exclude=_heads(ready),
                reduce_range=True,  # 7-bit weights: with 8, CPUs without VNNI overflow 16 bits on the way
            )
            quantised.append(_without_traces(onnx.load(str(target))))
            carry = _features(quantised[-1], carry)
    return quantised


def _heads(path: Path) -> list[str]:
    """The classifiers stay in floats: they cost next to nothing, and confidences are compared finely."""
    return [node.name for node in onnx.load(str(path)).graph.node if node.op_type in ("Gemm", "MatMul")]


@contextmanager
def _quiet(name: str = "") -> Iterator[None]:
    """No advice from a library that was followed already; "" is the root logger."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _features(segment: onnx.ModelProto, carry: Array) -> Array:
    engine = Engine([segment.SerializeToString()])
    parts = [engine.run({0: carry[start : start + 64]})[0] for start in range(0, len(carry), 64)]
    return np.concatenate([part for part in parts if part is not None]) if parts[0] is not None else carry
