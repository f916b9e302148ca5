"""Requests and answers in the JSON of the Open Inference Protocol v2, with tensors in binary behind it, if asked."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from exitflow.config import parse_json
from exitflow.serving.ports.refusals import Reason, RefusedError
from exitflow.serving.ports.requests import Tensor, check_output_parameters
from exitflow.serving.wire.answers import INPUT, OUTPUTS, Answers, BadRequestError, output_shape

BINARY_HEADER = "inference-header-content-length"
MAX_DIMENSIONS = 16  # of a tensor: the product of endless ones would hold everything up


def split_body(body: bytes, length: str | None, *, most: int) -> tuple[dict[str, Any], bytes]:
    """(JSON, what follows it): the binary tensor extension says how long the JSON is."""
    binary = b""
    if length is not None:
        if not length.isdecimal() or len(length) > 20 or int(length) > len(body):
            raise BadRequestError(
                f"{BINARY_HEADER} must be at most the {len(body)} bytes of the body, got {length[:40]!r}"
            )
        body, binary = body[: int(length)], body[int(length) :]
    if len(body) > most:
        sentence = f"the JSON of a request has at most {most} bytes here; larger tensors may come in binary"
        raise RefusedError(Reason.TOO_LARGE, sentence)
    try:
        document = parse_json(body)
    except ValueError:
        raise BadRequestError("the body is not valid JSON") from None
    if not isinstance(document, dict):
        raise BadRequestError("the body must be a JSON object with 'inputs'")
    return document, binary


def understand_json(
    document: Mapping[str, Any], binary: bytes
) -> tuple[Tensor, list[dict[str, Any]], Mapping[str, Any]]:
    """(input, outputs that are wanted, parameters), if the document is a request of the protocol."""
    inputs = document.get("inputs")
    if not isinstance(inputs, list) or len(inputs) != 1 or not isinstance(inputs[0], dict):
        raise BadRequestError(f"'inputs' must be a list of one tensor, named {INPUT!r}")
    if not isinstance(document.get("id", ""), str):
        raise BadRequestError("'id' must be a string")
    given = inputs[0]
    name, datatype, shape = given.get("name"), given.get("datatype"), given.get("shape")
    if not isinstance(name, str) or not isinstance(datatype, str):
        raise BadRequestError("a tensor needs a 'name' and a 'datatype'")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(map(_is_size, shape)):
        raise BadRequestError(f"'shape' must be a list of whole numbers, {MAX_DIMENSIONS} at most")
    parameters = _object(given, "parameters")
    if "binary_data_size" in parameters:
        size = parameters["binary_data_size"]
        if size != len(binary) or type(size) is not int:
            raise BadRequestError(f"binary_data_size is {size!r}, but {len(binary)} bytes follow the JSON")
        data: Any = binary
    else:
        data = list(_flat(given.get("data"), shape))
    outputs = document.get("outputs", [])
    named = isinstance(outputs, list) and all(
        isinstance(output, dict) and isinstance(output.get("name"), str) for output in outputs
    )
    if not named:
        raise BadRequestError("'outputs' must be a list of tensors with a 'name'")
    for output in outputs:
        check_output_parameters(_object(output, "parameters"))
        _flag(_object(output, "parameters"), "binary_data")
    _flag(_object(document, "parameters"), "binary_data_output")
    return Tensor(name, datatype, shape, data), outputs, _object(document, "parameters")


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _object(holder: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = holder.get(key, {})
    if not isinstance(value, dict):
        raise BadRequestError(f"{key!r} must be a JSON object")
    return value


def _flag(holder: Mapping[str, Any], key: str) -> None:
    if not isinstance(holder.get(key, False), bool):
        raise BadRequestError(f"{key!r} must be true or false")


def _flat(data: Any, shape: Sequence[int]) -> Iterator[float]:
    """Numbers of a list, nested or not, without recursion."""
    if not isinstance(data, list):
        raise BadRequestError("'data' must be a list of numbers")
    most = math.prod(shape)
    stack, count, lists = [iter(data)], 0, 0
    while stack:
        for item in stack[-1]:
            if isinstance(item, list):
                stack.append(iter(item))
                lists += 1
                if lists > most * len(shape):
                    raise BadRequestError(f"'data' holds more lists than the shape {list(shape)[:10]} has")
                break
            if type(item) not in (int, float):
                raise BadRequestError("'data' must be a list of numbers")
            count += 1
            if count > most:
                raise BadRequestError(f"'data' holds more than the {most} numbers of its shape")
            yield item
        else:
            stack.pop()


def write_answers(
    head: dict[str, Any], answers: Answers, outputs: Sequence[Mapping[str, Any]], *, all_binary: bool
) -> tuple[bytes, int | None]:
    """(body, how long its JSON is where binary tensors follow)."""
    binary = dict.fromkeys(OUTPUTS, all_binary)
    for output in outputs:
        binary[output["name"]] = bool(output.get("parameters", {}).get("binary_data", all_binary))
    written, raw = [], []
    for name in [output["name"] for output in outputs] or OUTPUTS:
        shape = output_shape(name, *answers.scores.shape)
        tensor: dict[str, Any] = {"name": name, "datatype": OUTPUTS[name], "shape": shape}
        if binary[name]:
            data = answers.raw(name)
            tensor["parameters"] = {"binary_data_size": len(data)}
            raw.append(data)
        else:
            tensor["data"] = _plain(answers, name)
        written.append(tensor)
    text = json.dumps({**head, "outputs": written}, allow_nan=False).encode()
    return (text + b"".join(raw), len(text)) if raw else (text, None)


def _plain(answers: Answers, name: str) -> list[Any]:
    if name == "node":
        return answers.nodes
    values = {"scores": answers.scores, "exit": answers.exits, "confidence": answers.confidences}[name]
    found: list[Any] = np.asarray(values).reshape(-1).tolist()
    return found
