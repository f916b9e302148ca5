"""A node and parents of all kinds, in the event loop of a test."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, closing
from http import client

import grpc
import grpc.aio
import numpy as np

from exitflow.routing.clock import RealClock
from exitflow.serving.node.node import Node
from exitflow.serving.node.node_settings import ServingSpec
from exitflow.serving.ports.grpc_server import Port, start_grpc
from exitflow.serving.wire.answers import Answers
from exitflow.serving.wire.messages import MESSAGES, SERVICE, ModelInferRequest, ModelInferResponse
from exitflow.serving.wire.security import Security
from tests.serving.small import chain

ALL_UP = chain(limits=(None, None))  # everything is forwarded
PATIENT = 30.0  # seconds: longer than a busy machine stands still
EAGER = ServingSpec(forward="feature", forward_timeout=PATIENT, audit_share=0.0)


@asynccontextmanager
async def running(bundle, name, parents=None, *, spec=None, token=None, clock=None, port=None):
    """(node, address)."""
    node = Node(bundle, name, spec or ServingSpec(), parents or {}, security=Security(token=token), clock=clock)
    node.start()
    server, number = await start_grpc(node, Port("127.0.0.1:0", token=token, **(port or {})))
    try:
        yield node, f"127.0.0.1:{number}"
    finally:
        await server.stop(0)
        await node.close()


async def ask(node, bundle, count=1, **options):
    """Its answers to the first samples of the bundle."""
    return await node.infer(node.current, bundle.samples().inputs[:count], **options)


async def until(condition):
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never happened")


GARBAGE = b"\xff" * 4  # is no message


class FakeParent:
    """Answers what it is told to; remembers what came."""

    def __init__(self, num_classes, *, behaviour="answer", delay=0.0, exit=2, clock=None, name="edge"):
        self.num_classes, self.behaviour, self.delay, self.exit = num_classes, behaviour, delay, exit
        self.clock, self.name = clock or RealClock(), name
        self.received = []  # (seconds, samples)
        self.requests = []
        self.probes = 0

    async def infer(self, request, context):
        count = request.inputs[0].shape[0]
        self.received.append((self.clock.now(), count))
        self.requests.append(request)
        if self.delay:
            await asyncio.sleep(self.delay)
        match self.behaviour:
            case "answer":
                scores = np.zeros((count, self.num_classes), dtype=np.float32)
                scores[:, 0] = 1
                answers = Answers(
                    scores, np.full(count, self.exit, np.int32), [self.name] * count, np.ones(count, np.float32)
                )
                return ModelInferResponse.FromString(
                    answers.to_bytes(request.model_name, request.model_version[:12], request.id)
                )
            case "nan":
                scores = np.full((count, self.num_classes), np.nan, dtype=np.float32)
                answers = Answers(
                    scores, np.full(count, self.exit, np.int32), [self.name] * count, np.ones(count, np.float32)
                )
                return ModelInferResponse.FromString(
                    answers.to_bytes(request.model_name, request.model_version[:12], request.id)
                )
            case "empty":
                return ModelInferResponse()
            case "garbage":
                return GARBAGE
            case code:
                return await context.abort(getattr(grpc.StatusCode, code), "told to")

    async def ready(self, request, context):
        self.probes += 1
        if self.behaviour == "garbage" and self.probes == 1:
            return GARBAGE
        return MESSAGES["ModelReadyResponse"](ready=True)


def _bytes(message):
    return message if isinstance(message, bytes) else message.SerializeToString()


@asynccontextmanager
async def fake_parent(parent: FakeParent, port: int = 0):
    """Its address."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    handlers = {
        "ModelInfer": grpc.unary_unary_rpc_method_handler(
            parent.infer,
            request_deserializer=ModelInferRequest.FromString,
            response_serializer=_bytes,
        ),
        "ModelReady": grpc.unary_unary_rpc_method_handler(
            parent.ready,
            request_deserializer=MESSAGES["ModelReadyRequest"].FromString,
            response_serializer=_bytes,
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@asynccontextmanager
async def far_away(address, delay, *, connecting=0.0):
    """An address behind which is that one, each way `delay` seconds off, and more at first."""

    async def copy(reader, writer):
        while data := await reader.read(65536):
            await asyncio.sleep(delay)
            writer.write(data)
        writer.close()

    async def connect(reader, writer):
        connections.append(asyncio.current_task())
        await asyncio.sleep(connecting)
        there, back = await asyncio.open_connection(*address.split(":"))
        await asyncio.gather(copy(reader, back), copy(there, writer))
        await asyncio.gather(back.wait_closed(), writer.wait_closed())

    connections = []
    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    yield "{}:{}".format(*server.sockets[0].getsockname())
    server.close()
    await asyncio.gather(*connections)


@asynccontextmanager
async def freezing(address):
    """(an address behind which is that one, an event): while the event is not set nothing moves, in either direction."""
    moves, connections = asyncio.Event(), []
    moves.set()

    async def copy(reader, writer):
        while data := await reader.read(65536):
            await moves.wait()
            writer.write(data)
        writer.close()

    async def connect(reader, writer):
        connections.append(asyncio.current_task())
        there, back = await asyncio.open_connection(*address.split(":"))
        await asyncio.gather(copy(reader, back), copy(there, writer), return_exceptions=True)

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    try:
        yield "{}:{}".format(*server.sockets[0].getsockname()), moves
    finally:
        moves.set()
        server.close()
        await asyncio.gather(*connections)


def http(place, method, path, body=None, headers=None, context=None):
    """(status, headers, text)."""
    connection = client.HTTPSConnection(place, context=context) if context else client.HTTPConnection(place)
    with closing(connection):
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read().decode("utf-8", "replace")
