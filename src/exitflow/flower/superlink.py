"""The server of a federation: Flower's SuperLink, and a log of who comes and goes and of what trainings do."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from exitflow.addresses import parse_address
from exitflow.flower import commands
from exitflow.flower.commands import CONNECTION, write_connection
from exitflow.flower.federation_status import Present, calling, days_until
from exitflow.flower.folders import read_address
from exitflow.flower.journal import Follower, tell
from exitflow.flower.keys import CA, node_keys, valid_until
from exitflow.flower.programs import Programs, working_folder

LOOK = 2.0  # seconds between looks at who is connected
WARN_DAYS = 30.0  # before the end of a certificate, of which the log then speaks every day
DAY = 86400.0  # seconds

log = logging.getLogger("exitflow.federation")


@contextmanager
def running_server(folder: Path, *, host: str | None = None, flwr_run: bool = False) -> Iterator[tuple[Programs, str]]:
    """The SuperLink, with the keys of all nodes registered, and where it listens; its database survives it.

    With `flwr_run` there is a SuperExec beside it, which runs what `flwr run` submits.
    """
    address = read_address(folder)
    where = parse_address(address, "--superlink")
    port, listen = where.port, host or where.host
    with working_folder() as work:
        programs = Programs(work, logs=folder / "logs")
        try:
            database = (folder / "superlink.db").resolve()
            programs.start("superlink", commands.superlink(folder.resolve(), host=listen, port=port, database=database))
            reachable = "127.0.0.1" if listen in ("0.0.0.0", "::") else listen
            programs.wait_for_port(reachable, port)
            write_connection(programs.flower_home, f"{reachable}:{port}", folder / "ca.crt")
            keys = node_keys(folder)
            register = [
                ["supernode", "register", str((folder / "nodes" / f"{node}.pub").resolve()), CONNECTION, "--name", node]
                for node in keys
            ]
            programs.flwr(register, tolerate="already")
            if flwr_run:
                command = commands.superexec(folder.resolve(), f"{reachable}:{port}", os.getpid())
                programs.start("superexec", command)
            yield programs, f"{reachable}:{port}"
        finally:
            programs.stop()


def run_server(folder: Path, *, host: str | None, flwr_run: bool, ready: Callable[[], None]) -> None:
    """The meeting point, until told to end."""
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    keys, follower = node_keys(folder), Follower(folder)
    with running_server(folder, host=host, flwr_run=flwr_run) as (programs, address):
        ready()
        log.info("%d nodes have a key; waiting for them at %s", len(keys), address)
        presence, warned = Presence(keys), -DAY
        with calling(address, folder / CA) as roll_call:
            while not ended.wait(LOOK):
                programs.check()
                presence.see(roll_call())
                for event in follower.new():
                    tell(event)
                if time.monotonic() - warned >= DAY:
                    warned = time.monotonic()
                    warn_of_end(folder)
    log.info("ended")


@dataclass
class Presence:
    """Tells the log which nodes come and go."""

    keys: Mapping[str, str]
    connected: dict[str, bool] = field(default_factory=dict)  # of the nodes that were ever here

    def see(self, present: list[Present] | None) -> None:
        """Say what has changed since the last time; nothing where nobody answered."""
        for node in present or ():
            before = self.connected.get(node.name)
            if self.keys.get(node.name) != node.public_key or node.connected == bool(before):
                continue
            self.connected[node.name] = node.connected
            if not node.connected:
                log.warning("node %r is gone", node.name)
            else:
                log.info("node %r is %s", node.name, "connected" if before is None else "back")


def warn_of_end(folder: Path) -> None:
    """Tell the log where the server's certificate will end soon, or has ended."""
    until = valid_until(folder)
    if (days := days_until(until)) < WARN_DAYS:
        advice = "exitflow federation renew makes a new one, and nothing need be stopped"
        log.warning("the server's certificate ends on %s, in %.0f days: %s", until.date(), days, advice)
