"""The node over HTTP: the Open Inference Protocol v2 in JSON with binary tensors, health, metrics and status.

A Starlette application on uvicorn. Every answer but metrics is JSON; a refusal is {"error": one sentence}.
"""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from exitflow.config import encode
from exitflow.serving.bundle.bundle import MAX_SAMPLES
from exitflow.serving.node.batching import OverloadedError
from exitflow.serving.node.node import Node
from exitflow.serving.node.status import problems, status
from exitflow.serving.ports.description import (
    Surroundings,
    model_config,
    model_metadata,
    server_metadata,
    statistics,
)
from exitflow.serving.ports.gate import check_token
from exitflow.serving.ports.json_tensors import BINARY_HEADER, split_body, understand_json, write_answers
from exitflow.serving.ports.metrics import prometheus_text
from exitflow.serving.ports.openapi import description
from exitflow.serving.ports.refusals import Reason, RefusedError, as_refusal
from exitflow.serving.ports.requests import check_model, understand
from exitflow.serving.wire.answers import BadRequestError

MAX_HELD = 256 * 2**20  # bytes of bodies that are still coming in
BODY_SECONDS = 60.0  # for a body to come in
MAX_JSON = 8 * 2**20  # bytes: reading it holds everything else up
WORTH_PACKING = 4096  # bytes of an answer; smaller ones do not gain by it
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
_MODEL = "/v2/models/{model}"


def rest_app(node: Node, *, token: str | None, around: Surroundings) -> Starlette:
    """All routes of a node; those that say whether it is well want no token."""
    rest = _Rest(node, token, around)
    app = Starlette(
        routes=rest.routes(),
        middleware=[Middleware(GZipMiddleware, minimum_size=WORTH_PACKING, compresslevel=1)],
        exception_handlers={HTTPException: rest.not_routed},
    )
    app.router.redirect_slashes = False
    return app


class _Rest:
    def __init__(self, node: Node, token: str | None, around: Surroundings) -> None:
        self._node, self._token, self._around = node, token, around
        self._held = 0  # bytes of bodies that are still coming in

    def routes(self) -> list[Route]:
        """The function that answers each path."""
        node, route = self._node, self._route
        live = {"live": True}
        of_model = [
            each
            for model in (_MODEL, _MODEL + "/versions/{version}")
            for each in (
                route(model, lambda request: self._about(request, model_metadata)),
                route(model + "/ready", self._model_ready),
                route(model + "/config", lambda request: self._about(request, partial(model_config, named=True))),
                route(model + "/stats", lambda request: self._about(request, _statistics)),
                route(model + "/infer", self._infer, method="POST"),
            )
        ]
        return [
            route("/healthz", lambda _: live, open=True),
            route("/readyz", self._readyz, open=True),
            route("/metrics", self._metrics),
            route("/status", lambda _: encode(status(node))),
            route("/openapi.json", lambda _: description(node), open=True),
            route("/v2", lambda _: server_metadata()),
            route("/v2/health/live", lambda _: live, open=True),
            route("/v2/health/ready", lambda _: self._ready({"ready": not node.draining}), open=True),
            route("/v2/models/stats", lambda _: _statistics(node)),
            *of_model,
            route("/v2/repository/index", self._index, method="POST"),
        ]

    def _route(self, path: str, answer: Callable[[Request], Any], *, method: str = "GET", open: bool = False) -> Route:
        """`answer` gives a response, or what stands in its JSON, now or later; what it raises is a refusal."""

        async def endpoint(request: Request) -> Response:
            try:
                if not open:
                    check_token(request.headers.get("authorization", ""), self._token)
                found = answer(request)
                if asyncio.iscoroutine(found):
                    found = await found
            except asyncio.CancelledError:  # by uvicorn, when the node stops and this would take too long
                return self._refuse(RefusedError(Reason.STOPPING, "the node stops"), request)
            except Exception as error:
                return self._refuse(error, request)
            return found if isinstance(found, Response) else JSONResponse(found)

        return Route(path, endpoint, methods=[method])

    async def not_routed(self, request: Request, error: Exception) -> Response:
        """There is no such path, or it is asked in another way."""
        assert isinstance(error, HTTPException)
        if error.status_code == Reason.METHOD.http:
            allowed = ", ".join(sorted((error.headers or {})["Allow"].split(", ")))
            response = self._refuse(RefusedError(Reason.METHOD, f"use {allowed}"), request)
            response.headers["Allow"] = allowed
            return response
        return self._refuse(RefusedError(Reason.NOT_FOUND, f"there is nothing at {request.url.path[:200]}"), request)

    def _refuse(self, error: Exception, request: Request) -> Response:
        refusal = as_refusal(error, self._node, peer="{}:{}".format(*request.client or ("unknown", 0)))
        return JSONResponse({"error": str(refusal)}, refusal.reason.http)

    def _ready(self, detail: dict[str, Any]) -> Response:
        return JSONResponse(detail, 503 if self._node.draining else 200)

    def _model_ready(self, request: Request) -> Response:
        model, version = _model(request)
        check_model(self._node, model, version)
        return self._ready({"name": model, "ready": not self._node.draining})

    def _readyz(self, _: Request) -> Response:
        wrong = problems(self._node, self._around.certificate)
        ready = {"ready": not self._node.draining, "degraded": bool(wrong), "problems": wrong}
        return self._ready({**ready, "node": self._node.name})

    def _metrics(self, _: Request) -> Response:
        return Response(prometheus_text(self._node, self._around), media_type=_PROMETHEUS)

    def _about(self, request: Request, describe: Callable[[Node], Any]) -> Any:
        check_model(self._node, *_model(request))
        return describe(self._node)

    async def _index(self, request: Request) -> list[dict[str, str]]:
        await self._body(request)  # which may ask for less than all; there is one model
        bundle = self._node.current.bundle
        return [{"name": bundle.manifest.name, "version": bundle.version, "state": "READY"}]

    async def _infer(self, request: Request) -> Response:
        body = await self._body(request)
        document, binary = split_body(body, request.headers.get(BINARY_HEADER), most=self._most_json)
        tensor, outputs, parameters = understand_json(document, binary)
        names = [output["name"] for output in outputs]
        wanted = understand(self._node, _model(request), [tensor], names, parameters, may_forward=False)
        deadline = monotonic() + wanted.timeout
        answers = await self._node.infer(wanted.loaded, wanted.carry, deadline=deadline)
        bundle = wanted.loaded.bundle
        head = {"model_name": bundle.manifest.name, "model_version": bundle.version}
        if "id" in document:
            head["id"] = document["id"]
        all_binary = bool(parameters.get("binary_data_output", False))
        answer, length = write_answers(head, answers, outputs, all_binary=all_binary)
        if length is None:
            return Response(answer, media_type="application/json")
        return Response(answer, headers={BINARY_HEADER: str(length)}, media_type="application/octet-stream")

    @property
    def _most_json(self) -> int:
        shape = self._node.current.bundle.manifest.input_shape
        return min(MAX_JSON, 2**16 + 32 * MAX_SAMPLES * math.prod(shape))

    async def _body(self, request: Request) -> bytes:
        """Unpacked, and bounded in size, in time, and together with all others that are coming in."""
        most = max(self._node.max_message, self._most_json)
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > most:
            raise _too_large(most)
        chunks, size = [], 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for chunk in request.stream():
                    chunks.append(chunk)
                    size += len(chunk)
                    self._held += len(chunk)
                    if size > most:
                        raise _too_large(most)
                    if self._held > MAX_HELD:
                        self._node.counts.rejected += 1
                        raise OverloadedError
        except ClientDisconnect:
            raise BadRequestError("the connection ended before the request did") from None
        except TimeoutError:
            raise BadRequestError(f"the body did not come within {BODY_SECONDS:g} s") from None
        finally:
            self._held -= size
        return _unpacked(b"".join(chunks), request.headers.get("content-encoding", "identity"), most)


def _model(request: Request) -> tuple[str, str]:
    """(name, version) in the path; "": any version."""
    return request.path_params["model"], request.path_params.get("version", "")


def _statistics(node: Node) -> dict[str, Any]:
    return {"model_stats": [statistics(node)]}


def _too_large(most: int) -> RefusedError:
    return RefusedError(Reason.TOO_LARGE, f"a request has at most {most} bytes here")


def _unpacked(body: bytes, encoding: str, most: int) -> bytes:
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
