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
from dataclasses import dataclass, field, replace

from exitflow.addresses import parse_address
from exitflow.errors import ConfigError, ExitflowError
from exitflow.serving.bundle.bundle import load_bundle
from exitflow.serving.node.node import Node
from exitflow.serving.node.node_settings import ServingSpec
from exitflow.serving.ports.description import Surroundings
from exitflow.serving.ports.grpc_server import Port, start_grpc
from exitflow.serving.ports.limits import raise_file_limit
from exitflow.serving.wire.own_certificate import OwnCertificate
from exitflow.serving.wire.security import Security

log = logging.getLogger("exitflow.serving")

SWITCH_SECONDS = 0.0005  # for which event loop and engine's thread may keep Python from each other; its own is 0.005
MAX_DRAIN = 3600
LOOK_SECONDS = 30.0  # between looks at the certificate's files
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
    drain: float = 0.0  # seconds between saying that it is not ready any more, and closing the ports
    until_stdin_closes: bool = False  # so that nothing is left of a tree whose starter was killed

    def __post_init__(self) -> None:
        if not 0 <= self.drain <= MAX_DRAIN:
            raise ConfigError(f"must be between 0 and {MAX_DRAIN} seconds, got {self.drain:g}", key="--drain")
        for key, address in (("--listen", self.listen), ("--http", self.http), ("--clients", self.clients)):
            if address is not None:
                self.security.check_may_listen(parse_address(address, key), key, certified=key == "--listen")


def serve(options: ServeOptions) -> None:
    """Serve until SIGTERM or SIGINT comes."""
    sys.setswitchinterval(SWITCH_SECONDS)
    raise_file_limit()
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
    certificate = OwnCertificate(options.security, options.node) if options.security.certs else None
    async with contextlib.AsyncExitStack() as stack:  # what was started last is stopped first
        bundle = load_bundle(options.bundle, max_exit=entry.exit)
        node = Node(bundle, options.node, options.spec, options.parents, security=options.security)
        node.start()
        del bundle  # and with it the segments: the engine has its own
        stack.push_async_callback(_close, node)
        where = await _listen(node, options, certificate, stack)
        told = _listen_to_signals(node, options, certificate)
        if certificate:
            watching = asyncio.create_task(_watch(certificate, node))
            stack.callback(watching.cancel)
        gc.collect()
        gc.freeze()  # what is here now stays; collections look at requests only
        print(
            json.dumps({"node": node.name, "exit": node.exit, "bundle": node.current.bundle.version, **where}),
            flush=True,
        )
        await told.wait()
        node.draining = True
        if options.drain:
            log.info("node %s is not ready any more, and serves for %g s", node.name, options.drain)
            told.clear()
            with contextlib.suppress(TimeoutError):  # who says it twice means now
                await asyncio.wait_for(told.wait(), options.drain)
        node.stopping = True
        log.info("node %s stops", node.name)


async def _listen(
    node: Node, options: ServeOptions, certificate: OwnCertificate | None, stack: contextlib.AsyncExitStack
) -> dict[str, str]:
    """Where: kind of port -> address."""
    where, ports = {}, {}
    for kind, port in _ports(options, certificate).items():
        server, ports[kind] = await start_grpc(node, port)
        stack.push_async_callback(server.stop, GRACE)
        where[kind] = _at(port.address, ports[kind])
    if options.http:
        from exitflow.serving.ports.http_server import start_rest  # 8 MB that a node without HTTP does without

        around = Surroundings(ports, certificate)
        rest = await start_rest(node, options.http, token=options.security.token, around=around)
        stack.push_async_callback(rest.close)
        where["http"] = _at(options.http, rest.port)
    return where


def _at(address: str, port: int) -> str:
    """The address with the port that it has in the end."""
    return str(replace(parse_address(address, ""), port=port))


def _ports(options: ServeOptions, certificate: OwnCertificate | None) -> dict[str, Port]:
    token = options.security.token
    if certificate:  # who has shown one needs no token
        credentials = certificate.server_credentials(mutual=True)
        found = {"grpc": Port(options.listen, credentials=credentials, certified=True)}
    else:
        found = {"grpc": Port(options.listen, token=token)}
    if options.clients:
        credentials = certificate.server_credentials(mutual=False) if certificate else None
        found["clients"] = Port(options.clients, "--clients", for_nodes=False, credentials=credentials, token=token)
    return found


async def _close(node: Node) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(node.close(), GRACE)


async def _watch(certificate: OwnCertificate, node: Node) -> None:
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        await _take_up(certificate, node)


async def _take_up(certificate: OwnCertificate | None, node: Node) -> None:
    """Show the renewed certificate, if there is one."""
    if certificate is None:
        return
    renewed = await asyncio.to_thread(certificate.renewed)
    if renewed:
        node.connect_anew()


def _listen_to_signals(node: Node, options: ServeOptions, certificate: OwnCertificate | None) -> asyncio.Event:
    """Set when the node shall stop."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    reloads: set[asyncio.Task[None]] = set()

    def reload() -> None:
        task = loop.create_task(_reload(node, certificate))
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    loop.add_signal_handler(signal.SIGHUP, reload)
    if options.until_stdin_closes:
        loop.add_reader(sys.stdin.fileno(), lambda: stop.set() if not os.read(sys.stdin.fileno(), 1024) else None)
    return stop


async def _reload(node: Node, certificate: OwnCertificate | None) -> None:
    await _take_up(certificate, node)
    try:
        await node.reload()
    except ExitflowError as error:
        log.error("the bundle was not loaded again: %s", error)
    except Exception:
        log.exception("the bundle was not loaded again")
