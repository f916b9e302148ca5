"""What stands before every call of a gRPC port, so that no client can hold it for itself.

gRPC hands a call to its handler when the message is there, and waits for it without end: a caller that sends nothing
but the head of a call would hold a place for ever. So all calls are taken as streams, whose handlers begin at once.
The token is checked before the message is waited for. A caller has a bounded time to send its message, and to take the
answer. Beyond a number of calls that wait for their callers, the one that has waited longest is given up: whoever
opens thousands of them drives out the own ones, and no place is missing to those who send what they promised.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from exitflow.serving.node.node import Node
from exitflow.serving.ports.introspection import HEALTH
from exitflow.serving.ports.limits import ANSWER_SECONDS, Patience
from exitflow.serving.ports.refusals import Reason, RefusedError

MESSAGE_SECONDS = 10.0  # for a message to come in, from its first byte to its last
STREAM_SECONDS = 60.0  # that a call of many messages may last: only reflection has those
MAX_WAITING = 1024  # calls that wait for their callers

Context = Any  # grpc.aio.ServicerContext, which is generic without need


class Gate(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Lets calls into one port; `token` is what callers must show, None where they need none or have a certificate."""

    def __init__(self, node: Node, token: str | None) -> None:
        self._node, self._token = node, token
        self._messages, self._answers = Patience(MAX_WAITING), Patience(MAX_WAITING)
        self._guarded = functools.lru_cache(maxsize=64)(self._guard)  # there are fewer methods

    async def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """The handler of a call, made patient but not too patient; or one that refuses it."""
        handler = await continuation(details)
        if handler is None:
            return None
        # probes cannot send a token
        if self._token is not None and not details.method.startswith(f"/{HEALTH}/"):
            try:
                check_token(str(dict(details.invocation_metadata or ()).get("authorization", "")), self._token)
            except RefusedError as error:
                self._node.counts.refused[error.reason.value] += 1
                return _refusing(error)
        return self._guarded(handler)

    def _guard(self, handler: Any) -> Any:
        formats = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if handler.unary_unary:
            call = functools.partial(self._unary, handler.unary_unary)
            return grpc.stream_unary_rpc_method_handler(call, **formats)
        assert handler.stream_stream, "no other kinds of calls are served"
        return grpc.stream_stream_rpc_method_handler(functools.partial(self._stream, handler.stream_stream), **formats)

    async def _unary(self, call: Callable[[Any, Context], Any], _: Any, context: Context) -> Any:
        try:
            async with self._messages.at_most(MESSAGE_SECONDS):
                message = await context.read()
        except TimeoutError:
            await self._give_up(context)
        except Exception:  # protobuf's, and gRPC's own around it
            await context.abort(Reason.INVALID.code, "the message cannot be read")
        if message is grpc.aio.EOF:
            await context.abort(Reason.INVALID.code, "the call ended without a message")
        answer = await call(message, context)
        self._bound_answer()
        return answer

    async def _stream(self, call: Callable[[Any, Context], Any], messages: Any, context: Context) -> Any:
        try:
            async with self._messages.at_most(STREAM_SECONDS):
                async for answer in call(messages, context):
                    yield answer
        except TimeoutError:
            await self._give_up(context)

    async def _give_up(self, context: Context) -> None:
        self._node.counts.abandoned += 1
        await context.abort(Reason.LATE.code, "the message did not come in time")

    def _bound_answer(self) -> None:
        """gRPC writes the answer when the handler has returned; the task ends when all of it is on its way."""
        task = asyncio.current_task()
        assert task is not None

        def give_up() -> None:
            self._node.counts.abandoned += 1
            task.cancel()

        timer = asyncio.get_running_loop().call_later(ANSWER_SECONDS, give_up)

        def taken(_: object) -> None:
            timer.cancel()
            self._answers.end(task)

        self._answers.begin(task, give_up)
        task.add_done_callback(taken)


def check_token(given: str, token: str | None) -> None:
    """`Bearer TOKEN`, compared in constant time."""
    if token is not None and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
        raise RefusedError(Reason.UNAUTHENTICATED, "this node wants a bearer token: authorization: Bearer TOKEN")


def _refusing(refusal: RefusedError) -> Any:
    async def refuse(_: Any, context: Context) -> None:
        await context.abort(refusal.reason.code, str(refusal))

    return grpc.stream_unary_rpc_method_handler(refuse)
