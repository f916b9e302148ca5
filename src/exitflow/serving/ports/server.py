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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from exitflow.errors import ExitflowError
from exitflow.serving.bundle.bundle import load_bundle
from exitflow.serving.node.node import Node
from exitflow.serving.node.node_settings import ServingSpec
from exitflow.serving.ports.grpc_server import start_grpc
from exitflow.serving.wire.addresses import is_loopback, parse_address
from exitflow.serving.wire.security import Security

log = logging.getLogger("exitflow.serving")

SWITCH_SECONDS = 0.0005  # for which event loop and engine's thread may keep Python from each other; its own is 0.005
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
    sys.setswitchinterval(SWITCH_SECONDS)
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        runner.run(_serve(options))


def event_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where it is installed: a tenth less CPU for every request."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return None
    return uvloop.new_event_loop


async def _serve(options: ServeOptions) -> None:
    entry = load_bundle(options.bundle, max_exit=0).node(options.node)
    async with contextlib.AsyncExitStack() as stack:  # what was started last is stopped first
        bundle = load_bundle(options.bundle, max_exit=entry.exit)
        node = Node(bundle, options.node, options.spec, options.parents, security=options.security)
        del bundle  # and with it the segments: the engine has its own
        stack.push_async_callback(_close, node)
        where = await _listen(node, options, stack)
        gc.collect()
        gc.freeze()  # what is here now stays; collections look at requests only
        print(
            json.dumps({"node": node.name, "exit": node.exit, "bundle": node.current.bundle.version, **where}),
            flush=True,
        )
        await _until_told(node, options)
        node.draining = True
        log.info("node %s stops", node.name)


async def _listen(node: Node, options: ServeOptions, stack: contextlib.AsyncExitStack) -> dict[str, str]:
    """Where: kind of port -> address."""
    security = options.security
    own = None if security.mutual else security.token  # who has shown a certificate needs no token
    ports = [("grpc", "--listen", options.listen, security.node_credentials(), own, True)]
    if options.clients:
        open_to = security.client_credentials()
        ports.append(("clients", "--clients", options.clients, open_to, security.token, not security.mutual))
    where = {}
    for kind, key, address, credentials, token, may_forward in ports:
        server, port = await start_grpc(
            node, address, credentials=credentials, token=token, may_forward=may_forward, key=key
        )
        stack.push_async_callback(server.stop, GRACE)
        where[kind] = f"{parse_address(address, '')[0]}:{port}"
    if options.http:
        from exitflow.serving.ports.http_server import start_rest  # 8 MB that a node without HTTP does without

        rest = await start_rest(node, options.http, security)
        stack.push_async_callback(rest.close)
        where["http"] = f"{parse_address(options.http, '')[0]}:{rest.port}"
    return where


async def _close(node: Node) -> None:
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
    except Exception:
        log.exception("the bundle was not loaded again")
