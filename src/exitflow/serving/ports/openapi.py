"""The description of the REST interface, in OpenAPI 3.1, for clients, editors and the fuzzer."""

from __future__ import annotations

import math
from typing import Any

from exitflow import __version__
from exitflow.serving.node.node import Node
from exitflow.serving.ports.requests import MAX_OUTPUTS
from exitflow.serving.wire.answers import INPUT, OUTPUTS

_ERROR = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
_REFUSALS = {
    "400": "the request makes no sense",
    "401": "the token is missing or wrong",
    "404": "there is no such model or version",
    "409": "the bundle cannot be used",
    "413": "the body is too large",
    "429": "the queue is full",
    "504": "the deadline passed",
}


def _responses(schema: dict[str, Any], *refusals: str) -> dict[str, Any]:
    found = {"200": {"description": "the answer", "content": {"application/json": {"schema": schema}}}}
    for code in ("401", *refusals):
        found[code] = {"description": _REFUSALS[code], "content": {"application/json": {"schema": _ERROR}}}
    return found


def _get(summary: str, schema: dict[str, Any], *refusals: str) -> dict[str, Any]:
    return {"get": {"summary": summary, "responses": _responses(schema, *refusals)}}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def description(node: Node) -> dict[str, Any]:
    """The OpenAPI description of this node, with its model's name and shapes."""
    manifest = node.current.bundle.manifest
    text, flag, things = {"type": "string"}, {"type": "boolean"}, {"type": "array"}
    model = f"/v2/models/{manifest.name}"
    paths: dict[str, Any] = {
        "/healthz": _get("Whether the process lives.", _object(live=flag)),
        "/readyz": _get("Whether it takes requests, and what is wrong.", _object(ready=flag, problems=things)),
        "/status": _get("All counts.", _object(node=text, served={"type": "integer"})),
        "/v2": _get("The server.", _object(name=text, version=text, extensions=things)),
        "/v2/health/live": _get("Whether the process lives.", _object(live=flag)),
        "/v2/health/ready": _get("Whether it takes requests.", _object(ready=flag)),
        "/v2/models/stats": _get("Triton's statistics.", _object(model_stats=things)),
        model: _get("Inputs and outputs.", _object(name=text, versions=things, inputs=things, outputs=things), "404"),
        f"{model}/ready": _get("Whether the model is here.", _object(name=text), "404"),
        f"{model}/config": _get("Triton's configuration.", _object(name=text, max_batch_size={"type": "integer"})),
        f"{model}/stats": _get("Triton's statistics.", _object(model_stats=things)),
        f"{model}/infer": {"post": _infer(manifest.input_datatype, list(manifest.input_shape))},
        "/v2/repository/index": {
            "post": {"summary": "The models here.", "responses": _responses(things, "400", "413")}
        },
    }
    paths["/metrics"] = {
        "get": {
            "summary": "For Prometheus.",
            "responses": {"200": {"description": "text", "content": {"text/plain": {"schema": text}}}},
        }
    }
    for path in paths.values():
        for call in path.values():
            call["responses"]["405"] = {"description": "another method", "content": {"application/json": {}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": f"exitflow node {node.name}", "version": __version__},
        "paths": paths,
    }


def _infer(datatype: str, shape: list[int]) -> dict[str, Any]:
    number = {"type": "integer", "minimum": 0, "maximum": 255} if datatype == "UINT8" else {"type": "number"}
    tensor = _object(
        name={"const": INPUT},
        datatype={"const": datatype},
        shape={"const": [1, *shape]},
        data={"type": "array", "items": number, "minItems": math.prod(shape), "maxItems": math.prod(shape)},
    )
    output = {
        "type": "object",
        "properties": {
            "name": {"enum": list(OUTPUTS)},
            "parameters": {"type": "object", "properties": {"binary_data": {"type": "boolean"}}},
        },
        "required": ["name"],
    }
    body = {
        "type": "object",
        "properties": {
            "id": {"type": "string"},
            "inputs": {"type": "array", "items": tensor, "minItems": 1, "maxItems": 1},
            "outputs": {"type": "array", "items": output, "maxItems": MAX_OUTPUTS},
            "parameters": {
                "type": "object",
                "properties": {
                    "timeout": {
                        "type": "integer",
                        "minimum": 0,
                        "maximum": 2**63 - 1,
                        "description": "microseconds; 0: none",
                    },
                    "binary_data_output": {"type": "boolean"},
                    "exitflow_from": False,
                },
            },
        },
        "required": ["inputs"],
    }
    text = {"type": "string"}
    answer = _object(model_name=text, model_version=text, outputs={"type": "array"})
    responses = _responses(answer, "400", "404", "413", "429", "504")
    responses["200"]["content"]["application/octet-stream"] = {"schema": {}}
    return {
        "summary": "Class scores, the exit and node that answered, and the confidence, for each sample.",
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": responses,
    }
