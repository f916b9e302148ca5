"""The node over HTTP: the Open Inference Protocol v2 in JSON with binary tensors, health, metrics and status.

A plain ASGI application on uvicorn. Every answer but metrics is JSON; a refusal is {"error": one sentence}.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import unquote

import numpy as np

from exitflow.config import parse_json
from exitflow.serving.bundle.bundle import MAX_SAMPLES
from exitflow.serving.node.batching import OverloadedError
from exitflow.serving.node.node import Node
from exitflow.serving.ports.description import (
    Surroundings,
    model_config,
    model_metadata,
    problems,
    server_metadata,
    statistics,
    status,
)
from exitflow.serving.ports.gate import check_token
from exitflow.serving.ports.metrics import prometheus_text
from exitflow.serving.ports.openapi import description
from exitflow.serving.ports.refusals import Reason, RefusedError, as_refusal
from exitflow.serving.ports.requests import Tensor, check_model, check_output_parameters, understand
from exitflow.serving.wire.answers import INPUT, OUTPUTS, Answers, BadRequestError, output_shape

BINARY_HEADER = "inference-header-content-length"
_JSON = "application/json"
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
MAX_HELD = 256 * 2**20  # bytes of bodies that are still coming in
BODY_SECONDS = 60.0  # for a body to come in
MAX_JSON = 8 * 2**20  # bytes: reading it holds everything else up
MAX_DIMENSIONS = 16  # of a tensor: the product of endless ones would hold everything up too


@dataclass(frozen=True)
class Request:
    """What came."""

    headers: Mapping[str, str]
    body: bytes
    names: Sequence[str]  # from the path: the model and perhaps its version


@dataclass(frozen=True)
class Response:
    """What goes back."""

    body: bytes
    status: int = 200
    content_type: str = _JSON
    headers: tuple[tuple[str, str], ...] = ()


def _json(value: Any, status: int = 200) -> Response:
    return Response(json.dumps(value, allow_nan=False).encode(), status)


class RestApp:
    """Routes, as an ASGI application."""

    def __init__(self, node: Node, *, token: str | None, around: Surroundings) -> None:
        self._node, self._token, self._around = node, token, around
        self._held = 0  # bytes of bodies that are still coming in
        model = r"/v2/models/([^/]+)(?:/versions/([^/]+))?"
        routes: list[tuple[str, str, Callable[[Request], Any]]] = [
            ("GET", r"/healthz", lambda _: _json({"live": True})),
            ("GET", r"/readyz", self._readyz),
            ("GET", r"/metrics", self._metrics),
            ("GET", r"/status", lambda _: _json(status(node))),
            ("GET", r"/openapi.json", lambda _: _json(description(node))),
            ("GET", r"/v2", lambda _: _json(server_metadata())),
            ("GET", r"/v2/health/live", lambda _: _json({"live": True})),
            ("GET", r"/v2/health/ready", lambda _: self._ready({"ready": not node.draining})),
            ("GET", r"/v2/models/stats", lambda _: _json(_statistics(node))),
            ("GET", model, lambda request: self._about(request, model_metadata)),
            ("GET", model + "/ready", self._model_ready),
            ("GET", model + "/config", lambda request: self._about(request, partial(model_config, named=True))),
            ("GET", model + "/stats", lambda request: self._about(request, _statistics)),
            ("POST", model + "/infer", self._infer),
            ("POST", r"/v2/repository/index", self._index),
        ]
        self._routes = [(method, re.compile(pattern), handler) for method, pattern, handler in routes]
        self._open_paths = ("/healthz", "/readyz", "/v2/health/live", "/v2/health/ready", "/openapi.json")

    async def __call__(self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[..., Any]) -> None:
        """One request."""
        if scope["type"] != "http":
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            response = await self._respond(scope["method"], scope["raw_path"].decode("latin-1"), headers, receive)
        except asyncio.CancelledError:  # by uvicorn, when the node stops and this would take too long
            response = _json({"error": "the node stops"}, 503)
        except Exception as error:
            refusal = as_refusal(error, self._node, peer="{}:{}".format(*scope.get("client") or ("unknown", 0)))
            response = _json({"error": str(refusal)}, refusal.reason.http)
        response = _compressed(response, headers.get("accept-encoding", ""))
        sent = [("content-type", response.content_type), ("content-length", str(len(response.body)))]
        encoded = [(name.encode(), value.encode()) for name, value in (*sent, *response.headers)]
        await send({"type": "http.response.start", "status": response.status, "headers": encoded})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else response.body})

    async def _respond(self, method: str, path: str, headers: Mapping[str, str], receive: Any) -> Response:
        found = [
            (allowed, match, handler) for allowed, regex, handler in self._routes if (match := regex.fullmatch(path))
        ]
        if not found:
            return _json({"error": f"there is nothing at {path[:200]}"}, 404)
        for allowed, match, handler in found:
            if method == allowed or (method == "HEAD" and allowed == "GET"):
                if self._token is not None and path not in self._open_paths:
                    check_token(headers.get("authorization", ""), self._token)
                names = [unquote(name) for name in match.groups() if name is not None]
                body = await self._body(receive, headers) if method == "POST" else b""
                response = handler(Request(headers, body, names))
                return await response if asyncio.iscoroutine(response) else response  # type: ignore[no-any-return]
        allow = ", ".join(allowed for allowed, _, _ in found)
        return Response(json.dumps({"error": f"use {allow}"}).encode(), 405, headers=(("allow", allow),))

    @property
    def _most_json(self) -> int:
        shape = self._node.current.bundle.manifest.input_shape
        return min(MAX_JSON, 2**16 + 32 * MAX_SAMPLES * math.prod(shape))

    async def _body(self, receive: Any, headers: Mapping[str, str]) -> bytes:
        most = max(self._node.max_message, self._most_json)
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > most:
            raise _too_large(most)
        chunks, size = [], 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while True:
                    event = await receive()
                    if event["type"] == "http.disconnect":
                        raise BadRequestError("the connection ended before the request did")
                    chunks.append(event.get("body", b""))
                    size += len(chunks[-1])
                    self._held += len(chunks[-1])
                    if size > most:
                        raise _too_large(most)
                    if self._held > MAX_HELD:
                        self._node.counts.rejected += 1
                        raise OverloadedError
                    if not event.get("more_body"):
                        break
        except TimeoutError:
            raise BadRequestError(f"the body did not come within {BODY_SECONDS:g} s") from None
        finally:
            self._held -= size
        return _decompressed(b"".join(chunks), headers.get("content-encoding", "identity"), most)

    def _ready(self, detail: Mapping[str, Any]) -> Response:
        return _json(detail, 503 if self._node.draining else 200)

    def _model_ready(self, request: Request) -> Response:
        check_model(self._node, request.names[0], _version(request))
        return self._ready({"name": request.names[0], "ready": not self._node.draining})

    def _readyz(self, _: Request) -> Response:
        wrong = problems(self._node, self._around.certificate)
        ready = {"ready": not self._node.draining, "degraded": bool(wrong), "problems": wrong}
        return self._ready({**ready, "node": self._node.name})

    def _metrics(self, _: Request) -> Response:
        return Response(
            prometheus_text(self._node, self._around), content_type="text/plain; version=0.0.4; charset=utf-8"
        )

    def _about(self, request: Request, describe: Callable[[Node], Any]) -> Response:
        check_model(self._node, request.names[0], _version(request))
        return _json(describe(self._node))

    def _index(self, _: Request) -> Response:
        bundle = self._node.current.bundle
        return _json([{"name": bundle.manifest.name, "version": bundle.version, "state": "READY"}])

    async def _infer(self, request: Request) -> Response:
        document, binary = _split_body(request, most=self._most_json)
        tensor, outputs, parameters = _understand_json(document, binary)
        wanted = understand(
            self._node,
            (request.names[0], _version(request)),
            [tensor],
            [output["name"] for output in outputs],
            parameters,
            may_forward=False,
        )
        deadline = self._node.now + wanted.timeout
        answers = await self._node.infer(wanted.loaded, wanted.carry, deadline=deadline)
        bundle = wanted.loaded.bundle
        head = {"model_name": bundle.manifest.name, "model_version": bundle.version}
        if "id" in document:
            head["id"] = document["id"]
        return _write_answers(head, answers, outputs, all_binary=bool(parameters.get("binary_data_output", False)))


def _version(request: Request) -> str:
    return request.names[1] if len(request.names) > 1 else ""


def _statistics(node: Node) -> dict[str, Any]:
    return {"model_stats": [statistics(node)]}


def _too_large(most: int) -> RefusedError:
    return RefusedError(Reason.TOO_LARGE, f"a request has at most {most} bytes here")


def _decompressed(body: bytes, encoding: str, most: int) -> bytes:
    if encoding == "identity":
        return body
    if encoding not in ("gzip", "deflate"):
        raise BadRequestError(f"content-encoding must be gzip or deflate, got {encoding[:40]!r}")
    inflater = zlib.decompressobj(31 if encoding == "gzip" else 15)
    try:
        plain = inflater.decompress(body, most + 1)
    except zlib.error as error:
        raise BadRequestError(f"the body is not valid {encoding}: {error}") from None
    if len(plain) > most:
        raise _too_large(most)
    return plain


def _compressed(response: Response, accepted: str) -> Response:
    """Only for who asks for nothing else: small answers do not gain by it."""
    encoding = accepted.strip().lower()
    if encoding not in ("gzip", "deflate"):
        return response
    packer = zlib.compressobj(1, zlib.DEFLATED, 31 if encoding == "gzip" else 15)
    body = packer.compress(response.body) + packer.flush()
    return Response(body, response.status, response.content_type, (*response.headers, ("content-encoding", encoding)))


def _split_body(request: Request, most: int) -> tuple[dict[str, Any], bytes]:
    """(JSON, what follows it): the binary tensor extension says how long the JSON is."""
    body, length = request.body, request.headers.get(BINARY_HEADER)
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


def _understand_json(
    document: Mapping[str, Any], binary: bytes
) -> tuple[Tensor, list[dict[str, Any]], Mapping[str, Any]]:
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


def _write_answers(
    head: dict[str, Any], answers: Answers, outputs: Sequence[Mapping[str, Any]], *, all_binary: bool
) -> Response:
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
    if not raw:
        return Response(text)
    return Response(
        text + b"".join(raw),
        content_type="application/octet-stream",
        headers=(("Inference-Header-Content-Length", str(len(text))),),
    )


def _plain(answers: Answers, name: str) -> list[Any]:
    if name == "node":
        return answers.nodes
    values = {"scores": answers.scores, "exit": answers.exits, "confidence": answers.confidences}[name]
    found: list[Any] = np.asarray(values).reshape(-1).tolist()
    return found
