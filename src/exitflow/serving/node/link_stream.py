"""One stream to a parent: requests that wait travel together, and answers come back in any order.

Alone, nothing waits: a request is written at once. While one message is being written, others gather for the next.
"""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any

import grpc
import grpc.aio

from exitflow.serving.node.link_errors import LinkError, link_error, reason_of
from exitflow.serving.wire.frames import LINK_METHOD, frame, frames

TOGETHER = 2**20  # bytes of requests that travel in one message


class NoStreamError(Exception):
    """The parent knows no streams."""


class LinkStream:
    """Made in the event loop that uses it; when it has ended, another is needed."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Any, now: float) -> None:
        self.opened, self.ended = now, False
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[tuple[int, bytes]]] = {}
        self._outbox: dict[int, bytes] = {}  # in the order of their numbers
        self._more, self._finishing = asyncio.Event(), False
        self._call: Any = channel.stream_stream(LINK_METHOD)(metadata=metadata)
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._write()), loop.create_task(self._read())]

    @property
    def idle(self) -> bool:
        """Whether nobody waits for an answer."""
        return not self._waiting

    async def ask(self, data: bytes, timeout: float) -> bytes:
        """The answer to a request; a LinkError, or a NoStreamError."""
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._waiting[number], self._outbox[number] = answer, frame(number, timeout, data)
        self._more.set()
        try:
            async with asyncio.timeout(timeout):
                status, found = await answer
        except TimeoutError:
            raise LinkError("timeout", "no answer came in time") from None
        finally:
            del self._waiting[number]
            self._outbox.pop(number, None)  # nobody waits: it need not be sent
        if status:
            raise LinkError(reason_of(status), found.decode("utf-8", "replace"))
        return bytes(found)

    def finish(self) -> None:
        """Send no more; what was sent is answered."""
        self._finishing = True
        self._more.set()

    def cancel(self) -> None:
        """End it at once."""
        if self._call:
            self._call.cancel()
        for task in self._tasks:
            task.cancel()

    async def _write(self) -> None:
        try:
            while not self.ended and not (self._finishing and not self._outbox):
                await self._more.wait()
                self._more.clear()
                while self._outbox:
                    await self._call.write(self._next_message())
            if not self.ended:
                await self._call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            self.ended = True  # `_read` is told why

    def _next_message(self) -> bytes:
        found: list[bytes] = []
        size = 0
        for number, data in list(self._outbox.items()):
            if found and size + len(data) > TOGETHER:
                break
            found.append(self._outbox.pop(number))
            size += len(data)
        return b"".join(found)

    async def _read(self) -> None:
        failure: Exception = LinkError("unreachable", "the parent ended the stream")
        try:
            async for message in self._call:
                for number, status, data in frames(message):
                    answer = self._waiting.get(number)
                    if answer and not answer.done():
                        answer.set_result((int(status), data))
        except grpc.aio.AioRpcError as error:
            failure = NoStreamError() if error.code() is grpc.StatusCode.UNIMPLEMENTED else link_error(error)
        except ValueError as error:
            failure = LinkError("nonsense", f"its answers cannot be read: {error}")
            self._call.cancel()
        finally:
            self.ended, self._call = True, None  # as long as anybody holds a call, gRPC holds its connection
            self._more.set()
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(failure)
