"""What tools ask every gRPC server: whether it is well (Kubernetes, load balancers), and what it serves (grpcurl)."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection

from exitflow.serving.node.node import Node
from exitflow.serving.wire.messages import POOL, SERVICE

HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


def health_handlers(node: Node) -> grpc.GenericRpcHandler:
    """`Check` of grpc.health.v1: whether the node takes requests, as a whole ("") or for its inference service."""

    async def check(asked: Any, context: Any) -> Any:
        if asked.service not in ("", SERVICE):
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service")
        states = health_pb2.HealthCheckResponse
        return states(status=states.NOT_SERVING if node.draining else states.SERVING)

    handler = grpc.unary_unary_rpc_method_handler(
        check,
        request_deserializer=health_pb2.HealthCheckRequest.FromString,
        response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(HEALTH, {"Check": handler})


def enable_reflection(server: grpc.aio.Server) -> None:
    """Let callers ask for the protocol's declarations."""
    for module in (health_pb2, reflection._reflection_pb2):
        POOL.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
    reflection.enable_server_reflection((SERVICE, HEALTH, reflection.SERVICE_NAME), server, POOL)
