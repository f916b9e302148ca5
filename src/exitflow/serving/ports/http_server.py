"""The HTTP port of a node: uvicorn with its limits, in the node's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from exitflow.logs import about
from exitflow.serving.node.node import Node
from exitflow.serving.ports.grpc_server import max_calls
from exitflow.serving.ports.rest import RestApp
from exitflow.serving.wire.addresses import bound_socket
from exitflow.serving.wire.certificate_files import CERTIFICATE, KEY
from exitflow.serving.wire.security import Security

HEADER_SECONDS = 10.0  # for the head of a request to come in


class _WithPeer(logging.LoggerAdapter[logging.Logger]):
    """Adds who is at the other end to what uvicorn says of a connection."""

    level = logging.WARNING  # uvicorn looks there whether it should say more


class _Connection(H11Protocol):
    """One that is closed when no request comes: uvicorn would wait for ever for the first, and for all that began."""

    _patience: asyncio.TimerHandle | None = None

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

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._head_came()

    def _wait_for_head(self) -> None:
        if self._patience is None:
            self._patience = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _head_came(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None


class RestServer:
    """uvicorn inside the node's event loop; signals are the node's business."""

    def __init__(self, server: uvicorn.Server, listening: socket.socket) -> None:
        self.port: int = listening.getsockname()[1]
        self._server = server
        self._task = asyncio.create_task(server.serve(sockets=[listening]))

    async def close(self) -> None:
        """After what is under way."""
        self._server.should_exit = True
        await self._task


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The node has handlers of its own."""
        yield


async def start_rest(node: Node, address: str, security: Security) -> RestServer:
    """Listening when it returns."""
    listening = bound_socket(address, "--http")
    listening.listen()  # who comes before uvicorn has started waits for it
    config = uvicorn.Config(
        RestApp(node, token=security.token),
        http=_Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=5,
        limit_concurrency=max_calls(node.spec),
        log_level="warning",
        ssl_certfile=security.path(CERTIFICATE),
        ssl_keyfile=security.path(KEY),
    )
    return RestServer(_Server(config), listening)
