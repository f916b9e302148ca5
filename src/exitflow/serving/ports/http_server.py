"""The HTTP port of a node: uvicorn with its limits, in the node's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from exitflow.logs import about
from exitflow.serving.node.node import Node
from exitflow.serving.ports.description import Surroundings
from exitflow.serving.ports.limits import ANSWER_SECONDS, Patience, max_connections
from exitflow.serving.ports.rest import rest_app
from exitflow.serving.wire.addresses import bound_socket

log = logging.getLogger("exitflow.serving")

BACKLOG = 1024  # connections that the kernel holds until they are accepted
HEADER_SECONDS = 10.0  # for the head of a request to come in


class _WithPeer(logging.LoggerAdapter[logging.Logger]):
    """Adds who is at the other end to what uvicorn says of a connection."""

    level = logging.WARNING  # uvicorn looks there whether it should say more


class _Connection(H11Protocol):
    """One that does not wait for its client without end, as uvicorn would.

    The head of a request must come in time, and the answer be taken. Beyond a number of connections that wait for a
    request, the one that has waited longest is closed, so that no place is missing to those who ask.
    """

    _patience: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, waits: Patience, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._waits = waits

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        peer = "{}:{}".format(*self.client or ("unknown", 0))
        self.logger = _WithPeer(logging.getLogger("exitflow.serving.http"), about(peer=peer))  # type: ignore[assignment]
        self._wait_for_head()

    def handle_events(self) -> None:
        super().handle_events()
        if self.conn.their_state is h11.IDLE:  # whoever sends a byte now and then wins no time
            self._wait_for_head()
        else:
            self._head_came()
        if self.conn.their_state in (h11.DONE, h11.MUST_CLOSE, h11.CLOSED):
            self._waits.end(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self.loop.call_later(ANSWER_SECONDS, self._give_up_unread)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_came()
        self._waits.end(self)
        super().connection_lost(exc)

    def _wait_for_head(self) -> None:
        if self._patience is None:
            self._patience = self.loop.call_later(HEADER_SECONDS, self.transport.abort)
            self._waits.begin(self, self.transport.abort)

    def _head_came(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _give_up_unread(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()


class RestServer:
    """uvicorn inside the node's event loop; signals are the node's business."""

    def __init__(self, server: uvicorn.Server, port: int) -> None:
        self.port = port
        self._server = server
        self._task = asyncio.create_task(server.serve())

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return len(self._server.server_state.connections)

    async def close(self) -> None:
        """After what is under way."""
        self._server.should_exit = True
        await self._task


class _Server(uvicorn.Server):
    """One that accepts connections itself, so that they are bounded from their first moment on, before TLS too."""

    def __init__(self, config: uvicorn.Config, listening: socket.socket, context: ssl.SSLContext | None) -> None:
        super().__init__(config)
        self._listening, self._context = listening, context
        self._waits = Patience(max_connections())
        self._greetings: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        self.servers = []
        self._accepting = asyncio.create_task(self._accept())
        self.started = True

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(self._listening)
            except OSError as error:  # of the connection, or because too many files are open
                log.warning("a connection was not accepted: %s", error.strerror)
                await asyncio.sleep(0.1)
                continue
            greeting = loop.create_task(self._greet(accepted))
            self._greetings.add(greeting)
            self._waits.begin(greeting, greeting.cancel)
            greeting.add_done_callback(self._greetings.discard)
            greeting.add_done_callback(self._waits.end)

    async def _greet(self, accepted: socket.socket) -> None:
        connection = _Connection(self.config, self.server_state, self.lifespan.state, waits=self._waits)
        seconds = HEADER_SECONDS if self._context else None
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection, accepted, ssl=self._context, ssl_handshake_timeout=seconds
            )
        except OSError as error:  # also what TLS itself finds wrong
            log.debug("a TLS handshake failed: %s", error)
            accepted.close()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in (self._accepting, *self._greetings):
            task.cancel()
        await asyncio.wait((self._accepting, *self._greetings))
        self._listening.close()
        await super().shutdown()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The node has handlers of its own."""
        yield


async def start_rest(
    node: Node, address: str, *, token: str | None = None, around: Surroundings | None = None
) -> RestServer:
    """Listening when it returns; with TLS where the node has a certificate."""
    listening = bound_socket(address, "--http")
    around = around or Surroundings()
    around = replace(around, ports={**around.ports, "http": listening.getsockname()[1]})
    context = around.certificate.tls if around.certificate else None
    listening.listen(BACKLOG)
    listening.setblocking(False)
    config = uvicorn.Config(
        rest_app(node, token=token, around=around),
        http=H11Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=5,
        log_level="warning",
    )
    return RestServer(_Server(config, listening, context), around.ports["http"])
