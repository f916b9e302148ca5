"""A federation of machines: what each of them needs, what each of them runs, and how a training joins them.

    DIR/server/        for the machine where the nodes meet, and from which is trained
    DIR/nodes/NAME/    for the machine of each node

Secrets are in both: the server's private key and shared secret, each node's private key. No file holds them all
once the folders were handed out.
"""

from __future__ import annotations

import functools
import json
import os
import re
import secrets
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import tomli_w

from exitflow.config import read_toml, require
from exitflow.errors import ConfigError, TrainingError
from exitflow.federated.types import Status
from exitflow.flower import command_lines
from exitflow.flower.backend import FlowerBackend
from exitflow.flower.control import CONNECTION, write_connection
from exitflow.flower.courier import Courier, RelayCourier, registered
from exitflow.flower.keys import public_key_of, write_authority, write_node_key, write_shared_secret
from exitflow.flower.programs import Programs
from exitflow.system.assembly import Assembly
from exitflow.system.system import System

JOINING = 120.0  # seconds in which the nodes must have said hello


@dataclass(frozen=True)
class Membership:
    """How a training reaches its federation."""

    folder: Path | None  # the server's, as `init` wrote it; None: whom the SuperLink knows by name is trusted
    superlink: str | None = None  # HOST:PORT; None: as `init` was told
    relay: Path | None = None  # the socket at which a ServerApp will connect; None: we start one

    def stations(self, courier: Courier) -> dict[str, int]:
        """node -> Flower's number for it: under the right name, and with the right key."""
        if self.folder is None:
            return {station.name: station.id for station in courier.stations()}
        return registered(courier, node_keys(self.folder))


def node_keys(folder: Path) -> dict[str, str]:
    """The public key of each node, as the server's folder has it."""
    return {path.stem: public_key_of(path) for path in sorted((folder / "nodes").glob("*.pub"))}


def check_address(text: str) -> str:
    """HOST:PORT."""
    host, _, port = text.rpartition(":")
    known = re.fullmatch(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]", host) and re.fullmatch(r"[0-9]{1,5}", port)
    valid = known is not None and 0 < int(port) < 65536
    require(valid, "--superlink", f"expected HOST:PORT, such as 10.0.0.1:9092, got {text!r}")
    return text


def new_run_id() -> str:
    """Under which nodes keep their states of a run."""
    return secrets.token_hex(8)


# -- init


def init_federation(system: System, out: Path, *, superlink: str) -> None:
    """Write what each machine needs into the new folder `out`."""
    address = check_address(superlink)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError("is not an empty directory; keys that are in use must not be overwritten", source=str(out))
    host = address.rpartition(":")[0].strip("[]")
    server = out / "server"
    write_authority(server, sorted({host, "127.0.0.1", "localhost"}))
    write_shared_secret(server / "superexec.secret")
    _write_common(server, system, address)
    (server / "nodes").mkdir()
    command_lines.write_app(server / "app", flower_app_config())
    _write_start(server, "exitflow-superlink", "the meeting point of the federation", "server")
    for node in system.topology.nodes:
        folder = out / "nodes" / node.name
        write_node_key(folder)
        shutil.copy(folder / "node.pub", server / "nodes" / f"{node.name}.pub")
        shutil.copy(server / "ca.crt", folder)
        _write_common(folder, system, address, node=node.name)
        _write_start(folder, f"exitflow-node-{node.name}", f"node {node.name} of the federation", "node")


def flower_app_config() -> dict[str, str]:
    """What `flwr run --run-config` may set; all are paths on the machine that runs the ServerApp."""
    return {"relay": "", "system": "", "out": "", "federation": "", "data-dir": "", "resume": ""}


def _write_common(folder: Path, system: System, address: str, **more: str) -> None:
    (folder / "system.toml").write_text(_for_nodes(system))
    (folder / "federation.toml").write_text(tomli_w.dumps({"superlink": address, **more}))


def _for_nodes(system: System) -> str:
    """The system, but for where the server's own data lie."""
    return replace(system, data=replace(system.data, dir=None)).to_toml()


def _write_start(folder: Path, unit: str, what: str, command: str) -> None:
    """A start script, and a systemd unit that runs it from where the folder was put."""
    script = f"""#!/bin/sh
# Starts {what}. Keep this folder readable for its owner only: it holds a private key.
here=$(cd "$(dirname "$0")" && pwd)
exec "${{EXITFLOW:-exitflow}}" federation {command} "$here" "$@"
"""
    (folder / "start.sh").write_text(script)
    (folder / "start.sh").chmod(0o700)
    service = f"""# cp {unit}.service /etc/systemd/system/ && systemctl enable --now {unit}
[Unit]
Description=exitflow: {what}
After=network-online.target
Wants=network-online.target

[Service]
# Where you put this folder, and where exitflow is installed; a node with data of its own: start.sh --data-dir DIR
Environment=EXITFLOW=/opt/exitflow/bin/exitflow
ExecStart=/opt/exitflow/federation/start.sh
Restart=always
RestartSec=5

[Install]
WantedBy=multi-user.target
"""
    (folder / f"{unit}.service").write_text(service)


# -- what the machines run


def read_address(folder: Path) -> str:
    """Of the SuperLink, as `init` was told."""
    return check_address(str(read_toml(folder / "federation.toml").get("superlink", "")))


def server_folder(path: str | Path) -> Path:
    """The server's folder: as given, or below the folder that `init` wrote."""
    folder = Path(path)
    for candidate in (folder / "server", folder):
        if (candidate / "superexec.secret").is_file():
            return candidate
    problem = "is not a folder that `exitflow federation init` has written for the server"
    raise ConfigError(problem, key="--federation", source=str(folder))


@contextmanager
def working_folder() -> Iterator[Path]:
    """For sockets, whose paths must be short, and logs."""
    folder = Path(tempfile.mkdtemp(prefix="exitflow-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def running_server(folder: Path, *, host: str | None = None, flwr_run: bool = False) -> Iterator[Programs]:
    """The SuperLink, with the keys of all nodes registered; its database survives it.

    With `flwr_run` there is a SuperExec beside it, which runs what `flwr run` submits.
    """
    address = read_address(folder)
    port = int(address.rpartition(":")[2])
    listen = host or address.rpartition(":")[0].strip("[]")
    with working_folder() as work:
        programs = Programs(work, logs=folder / "logs")
        try:
            database = (folder / "superlink.db").resolve()
            programs.start(
                "superlink", command_lines.superlink(folder.resolve(), host=listen, port=port, database=database)
            )
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
                command = command_lines.superexec(folder.resolve(), f"{reachable}:{port}", os.getpid())
                programs.start("superexec", command)
            yield programs
        finally:
            programs.stop()


def run_server(folder: Path, *, host: str | None, flwr_run: bool, ready: Callable[[], None]) -> None:
    """The meeting point, until told to end."""
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    with running_server(folder, host=host, flwr_run=flwr_run) as programs:
        ready()
        while not ended.wait(1):
            programs.check()


# -- how a training joins


@dataclass(frozen=True)
class Session:
    """A training among the nodes of a federation."""

    courier: Courier
    membership: Membership
    system: System
    run_id: str
    samples: Mapping[str, int]  # of each node, as it says
    status: Status

    def backend(self, assembly: Assembly) -> FlowerBackend:
        """Over the nodes that are there."""
        return FlowerBackend(
            self.courier,
            lambda: self.membership.stations(self.courier),
            functools.cache(assembly.model.coverage),
            self.run_id,
            self.samples,
            details={"system": _for_nodes(self.system), "num_steps": assembly.num_steps},
            spec=self.system.federation,
            status=self.status,
        )


@contextmanager
def join(
    membership: Membership,
    system: System,
    run_id: str,
    *,
    known: Mapping[str, int] | None = None,
    status: Status | None = None,
) -> Iterator[Session]:
    """Reach the nodes and ask what they have; those that are `known` from before need not answer."""
    tell = status or (lambda text: None)
    with reached(membership, system) as courier:
        samples = ask_samples(courier, membership, system, run_id, known=known, status=tell)
        yield Session(courier, membership, system, run_id, samples, tell)


@contextmanager
def reached(membership: Membership, system: System) -> Iterator[Courier]:
    """What carries messages to the nodes, through a ServerApp of Flower's."""
    folder = membership.folder
    known = node_keys(folder) if folder else {}
    strangers = [node.name for node in system.topology.nodes if folder and node.name not in known]
    if strangers:
        problem = f"has no key for node {strangers[0]!r}; make a federation for this system with `federation init`"
        raise ConfigError(problem, source=str(folder))
    with working_folder() as work:
        if membership.relay:
            relay = RelayCourier(membership.relay, address="")
            starting: AbstractContextManager[None] = nullcontext()
        else:
            assert folder is not None
            relay = RelayCourier(work / "relay", address=membership.superlink or read_address(folder))
            starting = server_app(relay, folder.resolve(), work)
        with closing(relay), starting:
            if not relay.wait(JOINING):
                raise TrainingError("no ServerApp of Flower's has connected")
            yield relay


@contextmanager
def server_app(relay: RelayCourier, folder: Path, work: Path) -> Iterator[None]:
    """A SuperExec beside us, which runs the ServerApp that lends us its grid."""
    programs, address = Programs(work), relay.address
    host, _, port = address.rpartition(":")
    try:
        programs.wait_for_port(host.strip("[]"), int(port), patience=10)
        write_connection(programs.flower_home, address, folder / "ca.crt")
        programs.start("superexec", command_lines.superexec(folder, address, os.getpid()))
        app = programs.flower_home / "exitflow-app"
        command_lines.write_app(app, flower_app_config())
        programs.flwr([["run", str(app), CONNECTION, "--run-config", f"relay={json.dumps(str(relay.path))}"]])
        give_up = time.monotonic() + JOINING
        while not relay.wait(0.1):
            programs.check()
            if time.monotonic() > give_up:
                raise TrainingError(f"the SuperLink at {address} did not start the run; is its secret this folder's?")
        yield
    finally:
        relay.close()  # the ServerApp has done its work, and ends by itself
        programs.stop()


def ask_samples(
    courier: Courier,
    membership: Membership,
    system: System,
    run_id: str,
    *,
    known: Mapping[str, int] | None = None,
    status: Status,
) -> dict[str, int]:
    """How many samples each node has."""
    names = [node.name for node in system.topology.nodes]
    missing = [name for name in names if name not in (known or {})]
    samples = dict(known or {})
    header = {"kind": "hello", "run": run_id, "system": _for_nodes(system), "num_steps": 1}
    give_up = time.monotonic() + min(JOINING, system.federation.deadline)
    asked: dict[str, str] = {}
    while missing:
        online = {station.name for station in courier.stations() if station.online}
        for name, station in membership.stations(courier).items():
            if name in missing and name in online and name not in asked.values():
                asked[courier.send(station, header, b"", seconds=JOINING)] = name
        for reply in courier.receive(asked) if asked else []:
            name = asked.pop(reply.message)
            if reply.error and not reply.refused:  # Flower's own: the node went away, and may come back
                continue
            if problem := reply.error or reply.header.get("error"):
                raise TrainingError(f"node {name!r}: {problem}")
            count = reply.header.get("num_samples")
            if type(count) is not int or not 0 <= count < 2**40:
                raise TrainingError(f"node {name!r}: its number of samples is {count!r}")
            samples[name] = count
            missing.remove(name)
        if missing and time.monotonic() > give_up:
            raise TrainingError(
                f"these nodes have not come: {', '.join(missing)}; every node must be there when a run begins"
            )
        status(f"waiting for {', '.join(missing[:3])}" if missing else "")
        time.sleep(0.2)
    return samples
