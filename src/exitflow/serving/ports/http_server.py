"""The HTTP port of a node: uvicorn with its limits, in the node's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Iterator, Mapping
from typing import Any, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from exitflow.logs import about
from exitflow.serving.node.node import Node
from exitflow.serving.ports.limits import ANSWER_SECONDS, Patience, max_connections
from exitflow.serving.ports.rest import RestApp
from exitflow.serving.wire.addresses import bound_socket
from exitflow.serving.wire.certificate_files import CERTIFICATE, KEY
from exitflow.serving.wire.security import Security

log = logging.getLogger("exitflow.serving")

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
    _made = False
    _early = b""  # what came before the connection was known, behind a TLS handshake

    def __init__(self, *arguments: Any, waits: Patience, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._waits = waits

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._made = True
        peer = "{}:{}".format(*self.client or ("unknown", 0))
        self.logger = _WithPeer(logging.getLogger("exitflow.serving.http"), about(peer=peer))  # type: ignore[assignment]
        self._wait_for_head()
        if self._early:
            self.data_received(self._early)

    def data_received(self, data: bytes) -> None:
        if self._made:
            super().data_received(data)
        else:
            self._early += data

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
        if self._made:
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


class _TlsDoor(asyncio.Protocol):
    """TLS in front of a connection, which waits for its client from its first moment on."""

    def __init__(self, connection: _Connection, context: ssl.SSLContext, waits: Patience) -> None:
        self._connection, self._context, self._waits = connection, context, waits

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.pause_reading()  # what comes is for TLS
        self._waits.begin(self, transport.abort)
        self._greeting = asyncio.get_running_loop().create_task(self._greet(transport))

    async def _greet(self, transport: asyncio.Transport) -> None:
        try:
            secured = await asyncio.get_running_loop().start_tls(
                transport,
                self._connection,
                self._context,
                server_side=True,
                ssl_handshake_timeout=HEADER_SECONDS,
            )
        except OSError as error:  # also what TLS itself finds wrong
            log.debug("a TLS handshake failed: %s", error)
            transport.abort()
            return
        finally:
            self._waits.end(self)
        if secured is not None and not secured.is_closing():
            self._connection.connection_made(secured)


class RestServer:
    """uvicorn inside the node's event loop; signals are the node's business."""

    def __init__(self, server: uvicorn.Server, listening: socket.socket) -> None:
        self.port: int = listening.getsockname()[1]
        self._server = server
        self._task = asyncio.create_task(server.serve(sockets=[listening]))

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._server.server_state.connections)

    async def close(self) -> None:
        """After what is under way."""
        self._server.should_exit = True
        await self._task


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The node has handlers of its own."""
        yield


def _tls(security: Security) -> ssl.SSLContext | None:
    certificate, key = security.path(CERTIFICATE), security.path(KEY)
    if certificate is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    return context


async def start_rest(
    node: Node, address: str, security: Security, *, ports: Mapping[str, int] | None = None
) -> RestServer:
    """Listening when it returns; `ports`: kind -> number, of the node's others."""
    listening = bound_socket(address, "--http")
    ports = {**(ports or {}), "http": listening.getsockname()[1]}
    listening.listen()  # who comes before uvicorn has started waits for it
    waits, context = Patience(max_connections()), _tls(security)

    def connect(**options: Any) -> asyncio.Protocol:
        connection = _Connection(**options, waits=waits)
        return _TlsDoor(connection, context, waits) if context else connection

    config = uvicorn.Config(
        RestApp(node, token=security.token, ports=ports),
        http=cast(type[asyncio.Protocol], connect),  # all that uvicorn does with it is to call it
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=5,
        log_level="warning",
    )
    return RestServer(_Server(config), listening)
