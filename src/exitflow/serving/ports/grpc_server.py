"""The node over gRPC: the Open Inference Protocol v2, and `exitflow.Node` for status and samples."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from exitflow.config import encode
from exitflow.errors import ServingError
from exitflow.serving.bundle.bundle import MAX_MESSAGE, SAMPLES
from exitflow.serving.node.node import IN_FLIGHT, Node, UnknownVersionError
from exitflow.serving.node.node_settings import ServingSpec
from exitflow.serving.node.status import status
from exitflow.serving.ports.callers import Callers
from exitflow.serving.ports.description import model_config, model_metadata, server_metadata, statistics_message
from exitflow.serving.ports.gate import MAX_WAITING, Gate
from exitflow.serving.ports.introspection import enable_reflection, health_handlers
from exitflow.serving.ports.limits import max_connections
from exitflow.serving.ports.refusals import Reason, RefusedError, as_refusal
from exitflow.serving.ports.requests import FROM, UnknownModelError, check_model, understand_message
from exitflow.serving.wire.addresses import bound_socket
from exitflow.serving.wire.answers import BadRequestError
from exitflow.serving.wire.frames import frame, frames
from exitflow.serving.wire.messages import MESSAGES, METHODS, SERVICE, ModelInferRequest

OWN_SERVICE = "exitflow.Node"
MAX_PENDING = 16_384  # calls that gRPC holds for us; beyond its own limits it cancels them, at random and uncounted

LOOK_SECONDS = 0.2  # between looks whether the node stops
HANDSHAKE_MS = 5_000
KEEPALIVE_MS = 30_000
IDLE_MS = 60_000
AGE_MS = 600_000  # after which a client's connection is made anew, and with it ends whatever it did not take
Context = Any  # grpc.aio.ServicerContext, which is generic without need


@dataclass(frozen=True)
class Port:
    """One that a node listens at."""

    address: str  # HOST:PORT; port 0: any that is free
    key: str = "--listen"  # the option that gave it
    for_nodes: bool = True  # whether nodes may forward here, and who runs the tree may reload
    credentials: grpc.ServerCredentials | None = None
    certified: bool = False  # whether whoever calls has shown a certificate of our CA
    token: str | None = None  # that callers must send


class InferenceService:
    """The calls of one port."""

    def __init__(self, node: Node, callers: Callers) -> None:
        self._node, self._callers = node, callers

    async def infer(self, data: bytes, context: Context) -> Any:
        """Answer a call of ModelInfer with what the node says."""
        try:
            return await self._answer(data, context, context.time_remaining())
        except RefusedError as refusal:
            await context.abort(refusal.reason.code, str(refusal))

    async def link(self, messages: Any, context: Context) -> AsyncIterator[bytes]:
        """Answer the requests of a child, as they come, each when it is ready; see `wire.frames`."""
        if not self._callers.for_nodes:
            await context.abort(Reason.DENIED.code, "only nodes have links, and this port is for clients")
        answers: asyncio.Queue[bytes | None] = asyncio.Queue()
        reading = asyncio.create_task(self._read_link(messages, context, answers))
        stopping = asyncio.create_task(self._end_when_stopping(reading))
        try:
            while (answer := await answers.get()) is not None:
                together = [answer]
                while not answers.empty() and (more := answers.get_nowait()) is not None:
                    together.append(more)
                yield b"".join(together)
        finally:
            reading.cancel()
            stopping.cancel()

    async def _read_link(self, messages: Any, context: Context, answers: asyncio.Queue[bytes | None]) -> None:
        under_way: set[asyncio.Task[None]] = set()
        try:
            async for message in messages:
                for number, seconds, data in frames(message):
                    task = asyncio.create_task(self._answer_frame(number, seconds, data, context, answers))
                    under_way.add(task)
                    task.add_done_callback(under_way.discard)
        except ValueError as error:
            as_refusal(BadRequestError(str(error)), self._node, peer=context.peer())
        finally:
            while under_way:
                await asyncio.wait(under_way)
            answers.put_nowait(None)

    async def _answer_frame(
        self, number: int, seconds: float, data: bytes, context: Context, answers: asyncio.Queue[bytes | None]
    ) -> None:
        try:
            answers.put_nowait(frame(number, 0, await self._answer(data, context, seconds)))
        except RefusedError as refusal:
            answers.put_nowait(frame(number, refusal.reason.code.value[0], str(refusal).encode()))

    async def _end_when_stopping(self, reading: asyncio.Task[None]) -> None:
        while not self._node.stopping:
            await asyncio.sleep(LOOK_SECONDS)
        reading.cancel()

    async def _answer(self, data: bytes, context: Context, remaining: float | None) -> bytes:
        """The answer to a request whose caller has `remaining` seconds; or a RefusedError."""
        node = self._node
        request = ModelInferRequest()
        try:
            _parse(request, data)
            wanted = understand_message(node, request, may_forward=self._callers.for_nodes)
            self._callers.check_request(wanted, context)
            timeout = wanted.timeout if remaining is None else min(wanted.timeout, remaining)
            answers = await node.infer(
                wanted.loaded,
                wanted.carry,
                start=wanted.start,
                before=wanted.before,
                deadline=node.now + timeout,
                child=wanted.child,
            )
        except Exception as error:
            raise as_refusal(
                error, node, forwarded=FROM in request.parameters, request=request.id, peer=context.peer()
            ) from None
        bundle = wanted.loaded.bundle
        return answers.to_bytes(bundle.manifest.name, bundle.version, request.id, wanted.outputs)

    def handlers(self) -> grpc.GenericRpcHandler:
        """All calls of the protocol."""
        calls: dict[str, Callable[[Any], Any]] = {
            "ServerLive": lambda _: {"live": True},
            "ServerReady": lambda _: {"ready": not self._node.draining},
            "ModelReady": self._model_ready,
            "ServerMetadata": lambda _: server_metadata(),
            "ModelMetadata": lambda asked: self._about(asked, model_metadata),
            "ModelConfig": lambda asked: {"config": self._about(asked, model_config)},
            "ModelStatistics": self._statistics,
            "RepositoryIndex": self._index,
            "RepositoryModelLoad": self._reload,
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                self._guarded(
                    call,
                    MESSAGES[f"{name}Request"],
                    MESSAGES[f"{name}Response"],
                    for_operators=name == "RepositoryModelLoad",
                )
            )
            for name, call in calls.items()
        }
        handlers["ModelInfer"] = grpc.unary_unary_rpc_method_handler(self.infer)
        assert set(handlers) == set(METHODS)
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    def own_handlers(self) -> grpc.GenericRpcHandler:
        """Status as JSON, and the bundle's samples."""
        calls: dict[str, Callable[[Any], Any]] = {
            "Status": lambda _: json.dumps(encode(status(self._node))).encode(),
            "Samples": lambda _: asyncio.to_thread(self._node.current.bundle.read, SAMPLES),
            "System": lambda _: asyncio.to_thread(self._node.current.bundle.read, "system.toml"),
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                self._guarded(call, None, None, for_operators=name in ("Samples", "System"))
            )
            for name, call in calls.items()
        }
        handlers["Link"] = grpc.stream_stream_rpc_method_handler(self.link)
        return grpc.method_handlers_generic_handler(OWN_SERVICE, handlers)

    def _guarded(
        self, call: Callable[[Any], Any], asked: Any, answer: Any, *, for_operators: bool
    ) -> Callable[[Any, Context], Awaitable[Any]]:
        """From bytes to bytes; `asked` and `answer` are messages, None where the call itself speaks bytes."""

        async def guarded(data: bytes, context: Context) -> Any:
            try:
                if for_operators:
                    self._callers.check_operator(context)
                found = call(_parse(asked(), data) if asked else data)
                if asyncio.iscoroutine(found):
                    found = await found
            except Exception as error:
                refusal = as_refusal(error, self._node, peer=context.peer())
                await context.abort(refusal.reason.code, str(refusal))
            if isinstance(found, bytes):
                return found
            return (answer(**found) if isinstance(found, dict) else found).SerializeToString()

        return guarded

    def _about(self, asked: Any, describe: Callable[[Node], Any]) -> Any:
        check_model(self._node, asked.name, asked.version)
        return describe(self._node)

    def _model_ready(self, asked: Any) -> dict[str, bool]:
        try:
            check_model(self._node, asked.name, asked.version)
        except (UnknownModelError, UnknownVersionError):
            return {"ready": False}
        return {"ready": not self._node.draining}

    def _statistics(self, asked: Any) -> Any:
        if asked.name:
            check_model(self._node, asked.name, asked.version)
        return statistics_message(self._node)

    def _index(self, _: Any) -> dict[str, Any]:
        bundle = self._node.current.bundle
        return {"models": [{"name": bundle.manifest.name, "version": bundle.version, "state": "READY"}]}

    async def _reload(self, asked: Any) -> dict[str, Any]:
        check_model(self._node, asked.model_name, "")
        await self._node.reload()
        return {}


def _parse(message: Any, data: bytes) -> Any:
    """Here and not in gRPC, which would call it an internal error."""
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise BadRequestError(f"the body is no {message.DESCRIPTOR.name}") from None
    return message


def max_calls(spec: ServingSpec) -> int:
    """Well beyond what the queue takes and what may wait, so that it is these that refuse, with a sentence."""
    return 2 * IN_FLIGHT * spec.queue_size + 4 * MAX_WAITING


def _says_more_than_that_a_caller_has_gone(record: logging.LogRecord) -> bool:
    """gRPC logs a traceback when nobody is there any more to take an answer, which happens every day."""
    return not (record.exc_info and record.exc_info[0] and record.exc_info[0].__name__ == "ExecuteBatchError")


async def start_grpc(node: Node, port: Port) -> tuple[grpc.aio.Server, int]:
    """The server, which listens already, and the number of its port."""
    address, key = port.address, port.key
    logging.getLogger("grpc._cython.cygrpc").addFilter(_says_more_than_that_a_caller_has_gone)
    most = max_calls(node.spec)
    bound_socket(address, key).close()  # gRPC would say why not in lines of its own
    options = [
        ("grpc.max_send_message_length", MAX_MESSAGE),
        ("grpc.max_receive_message_length", node.max_message),
        ("grpc.server.max_pending_requests", MAX_PENDING),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING),
        ("grpc.so_reuseport", 0),
        ("grpc.http2.max_ping_strikes", 0),  # children make sure that the connection is alive
        ("grpc.max_concurrent_streams", most),  # of one connection; it resets what comes beyond, so not fewer
        ("grpc.max_allowed_incoming_connections", max_connections()),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),  # so that callers who vanished do not stay
        *(() if port.certified else (("grpc.max_connection_idle_ms", IDLE_MS),)),  # children keep theirs busy
        *(
            ()
            if port.for_nodes
            else (("grpc.max_connection_age_ms", AGE_MS), ("grpc.max_connection_age_grace_ms", IDLE_MS))
        ),
    ]
    server = grpc.aio.server(options=options, interceptors=[Gate(node, port.token)], maximum_concurrent_rpcs=most)
    service = InferenceService(node, Callers(node, for_nodes=port.for_nodes, certified=port.certified))
    server.add_generic_rpc_handlers((service.handlers(), service.own_handlers(), health_handlers(node)))
    enable_reflection(server)
    try:
        if port.credentials:
            number = server.add_secure_port(address, port.credentials)
        else:
            number = server.add_insecure_port(address)
    except RuntimeError:
        await server.stop(None)
        raise ServingError(f"{key}: cannot listen on {address}; is the port taken?") from None
    await server.start()
    return server, number
