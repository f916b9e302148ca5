"""One node as a process: it listens, says where, and serves until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

import grpc.aio

from exitflow.errors import ExitflowError
from exitflow.serving.addresses import is_loopback, parse_address
from exitflow.serving.bundle import load_bundle
from exitflow.serving.grpc_server import start_grpc
from exitflow.serving.node import Node
from exitflow.serving.rest import start_rest
from exitflow.serving.security import Security
from exitflow.serving.spec import ServingSpec

log = logging.getLogger("exitflow.serving")

GRACE = 5.0  # seconds that requests under way are given when the node stops


@dataclass(frozen=True)
class ServeOptions:
    """What `exitflow serve` was told."""

    bundle: str
    node: str
    listen: str  # HOST:PORT of gRPC; port 0: any that is free
    http: str | None = None
    clients: str | None = None  # another gRPC port, for clients without a certificate
    parents: Mapping[str, str] = field(default_factory=dict)
    spec: ServingSpec = field(default_factory=ServingSpec)
    security: Security = field(default_factory=Security)
    until_stdin_closes: bool = False  # so that nothing is left of a tree whose starter was killed

    def __post_init__(self) -> None:
        for key, address in (("--listen", self.listen), ("--http", self.http), ("--clients", self.clients)):
            if address is not None:
                host, _ = parse_address(address, key)
                self.security.check_may_listen(host, key, local=is_loopback(host))


def serve(options: ServeOptions) -> None:
    """Until SIGTERM or SIGINT."""
    asyncio.run(_serve(options))


async def _serve(options: ServeOptions) -> None:
    bundle = load_bundle(options.bundle)
    entry = bundle.node(options.node)
    bundle = load_bundle(options.bundle, max_exit=entry.exit)
    security = options.security
    node = Node(bundle, options.node, options.spec, options.parents, credentials=security.channel_credentials())
    servers, where = [], {}
    server, port = await start_grpc(node, options.listen, credentials=security.node_credentials(), token=security.token)
    servers.append(server)
    where["grpc"] = f"{parse_address(options.listen, '')[0]}:{port}"
    if options.clients:
        server, port = await start_grpc(
            node,
            options.clients,
            credentials=security.client_credentials(),
            token=security.token,
            may_forward=not security.mutual,
        )
        servers.append(server)
        where["clients"] = f"{parse_address(options.clients, '')[0]}:{port}"
    rest = None
    if options.http:
        host, port = parse_address(options.http, "--http")
        rest = await start_rest(node, host, port, security)
        where["http"] = f"{host}:{rest.port}"
    gc.collect()
    gc.freeze()  # what is here now stays; collections look at requests only
    print(json.dumps({"node": node.name, "exit": node.exit, "bundle": bundle.version, **where}), flush=True)
    await _until_told(node, options)
    node.draining = True
    log.info("node %s stops", node.name)
    await _stop(node, servers)
    if rest:
        await rest.close()


async def _stop(node: Node, servers: list[grpc.aio.Server]) -> None:
    await asyncio.gather(*(server.stop(GRACE) for server in servers))
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(node.close(), GRACE)


async def _until_told(node: Node, options: ServeOptions) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    reloads: set[asyncio.Task[None]] = set()

    def reload() -> None:
        task = loop.create_task(_reload(node))
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    loop.add_signal_handler(signal.SIGHUP, reload)
    if options.until_stdin_closes:
        loop.add_reader(sys.stdin.fileno(), lambda: stop.set() if not os.read(sys.stdin.fileno(), 1024) else None)
    await stop.wait()


async def _reload(node: Node) -> None:
    try:
        await node.reload()
    except ExitflowError as error:
        log.error("the bundle was not loaded again: %s", error)
