"""What a node says to a request, and how it is written in the Open Inference Protocol.

A request has an input tensor, `input`: raw samples. Between nodes it may be `features` instead: what the child has
computed, coded as its parameters say, and with it, where answers are blended, `logits`: what it would have answered.
The answer has four outputs, a row for each sample.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

INPUT, FEATURES, LOGITS = "input", "features", "logits"
OUTPUTS = {"scores": "FP32", "exit": "INT32", "node": "BYTES", "confidence": "FP32"}


class BadRequestError(Exception):
    """The caller sent something that cannot be answered; one sentence says what."""


class BadAnswerError(Exception):
    """A parent has answered what makes no sense."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What a parent's answer must say to be believed."""

    model: str
    version: str
    num_classes: int
    exits: Mapping[str, int]  # of each node that may have answered: the parent and those above it


@dataclass(slots=True)
class Answers:
    """To the samples of one request: first this node's own, in places overwritten by a parent's."""

    scores: npt.NDArray[np.float32]  # (N, C), sum to 1
    exits: npt.NDArray[np.int32]  # (N,) that answered
    nodes: list[str]  # that answered
    confidences: npt.NDArray[np.float32]  # (N,) of the exit that answered

    def overwrite(self, row: int, other: Answers, other_row: int) -> None:
        """Put one row of `other` into `row`."""
        self.scores[row] = other.scores[other_row]
        self.exits[row] = other.exits[other_row]
        self.nodes[row] = other.nodes[other_row]
        self.confidences[row] = other.confidences[other_row]

    def raw(self, name: str) -> bytes:
        """The contents of an output."""
        match name:
            case "scores":
                return self.scores.astype("<f4", copy=False).tobytes()
            case "exit":
                return self.exits.astype("<i4", copy=False).tobytes()
            case "node":
                return b"".join(map(_length_prefixed, self.nodes))
            case _:
                return self.confidences.astype("<f4", copy=False).tobytes()

    def to_bytes(self, model: str, version: str, id: str, wanted: Sequence[str] = ()) -> bytes:
        """A ModelInferResponse with the outputs `wanted`, or all.

        The part that is the same for all answers of a shape is written once: protobuf messages, put one after the
        other, are one message.
        """
        from exitflow.serving.wire.messages import ModelInferResponse  # protobuf, which only those need who send

        names = tuple(wanted) or tuple(OUTPUTS)
        head = _response_head(model, version, names, *self.scores.shape)
        raw = [self.raw(name) for name in names]
        rest: bytes = ModelInferResponse(id=id, raw_output_contents=raw).SerializeToString()
        return head + rest

    @staticmethod
    def from_message(response: Any, count: int, expected: Expected) -> Answers:
        """What a parent sent to `count` samples, if it is sound."""
        if (response.model_name, response.model_version) != (expected.model, expected.version):
            raise BadAnswerError(f"it answers for {response.model_name[:100]!r} {response.model_version[:100]!r}")
        try:
            raw = {
                output.name: data for output, data in zip(response.outputs, response.raw_output_contents, strict=True)
            }
            scores = np.frombuffer(raw["scores"], dtype="<f4").reshape(count, expected.num_classes)
            exits = np.frombuffer(raw["exit"], dtype="<i4").reshape(count)
            confidences = np.frombuffer(raw["confidence"], dtype="<f4").reshape(count)
            nodes = _strings(raw["node"], count)
        except (ValueError, KeyError, struct.error, UnicodeDecodeError) as error:
            raise BadAnswerError(f"its answer cannot be read: {error}") from None
        if not ((scores >= 0).all() and (np.abs(scores.sum(axis=1) - 1) < 1e-2).all()):  # nor is NaN
            raise BadAnswerError("its scores are no probabilities")
        if any(expected.exits.get(node) != exit for node, exit in zip(nodes, exits.tolist(), strict=True)):
            raise BadAnswerError("its nodes and exits are none that can answer")
        if not np.isfinite(confidences).all():
            raise BadAnswerError("its confidences are none")
        return Answers(scores, exits, nodes, confidences)


def output_shape(name: str, count: int, num_classes: int) -> list[int]:
    """The shape of an output for `count` samples."""
    return [count, num_classes] if name == "scores" else [count]


@functools.lru_cache(maxsize=256)
def _response_head(model: str, version: str, names: tuple[str, ...], count: int, num_classes: int) -> bytes:
    from exitflow.serving.wire.messages import ModelInferResponse

    response = ModelInferResponse(model_name=model, model_version=version)
    for name in names:
        response.outputs.add(name=name, datatype=OUTPUTS[name], shape=output_shape(name, count, num_classes))
    head: bytes = response.SerializeToString()
    return head


@functools.lru_cache(maxsize=1024)
def _length_prefixed(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<I", len(data)) + data


def _strings(data: bytes, count: int) -> list[str]:
    found, offset = [], 0
    for _ in range(count):
        (length,) = struct.unpack_from("<I", data, offset)
        found.append(data[offset + 4 : offset + 4 + length].decode())
        offset += 4 + length
    if offset != len(data):
        raise ValueError("the names of nodes take another number of bytes")
    return found
