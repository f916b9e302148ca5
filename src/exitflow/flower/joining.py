"""How a training joins a federation: through a ServerApp of Flower's, which lends it its way to the nodes."""

from __future__ import annotations

import functools
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from exitflow.addresses import parse_address
from exitflow.errors import ConfigError, TrainingError
from exitflow.federated.types import Status
from exitflow.flower import commands
from exitflow.flower.backend import FlowerBackend
from exitflow.flower.commands import CONNECTION, write_connection
from exitflow.flower.courier import Courier, RelayCourier, registered
from exitflow.flower.folders import flower_app_config, read_address, system_for_nodes
from exitflow.flower.journal import Journal, keeping_journal
from exitflow.flower.keys import node_keys
from exitflow.flower.programs import Programs, working_folder
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


def new_run_id() -> str:
    """Under which nodes keep their states of a run."""
    return secrets.token_hex(8)


@dataclass(frozen=True)
class Session:
    """A training among the nodes of a federation."""

    courier: Courier
    membership: Membership
    system: System
    run_id: str
    samples: Mapping[str, int]  # of each node, as it says
    status: Status
    journal: Journal

    def backend(self, assembly: Assembly) -> FlowerBackend:
        """Over the nodes that are there."""
        return FlowerBackend(
            self.courier,
            lambda: self.membership.stations(self.courier),
            functools.cache(assembly.model.coverage),
            self.run_id,
            self.samples,
            details={"system": system_for_nodes(self.system), "num_steps": assembly.num_steps},
            spec=self.system.federation,
            status=self.status,
            journal=self.journal,
        )


@contextmanager
def join(
    membership: Membership,
    system: System,
    run_id: str,
    *,
    run: Path,
    known: Mapping[str, int] | None = None,
    status: Status | None = None,
) -> Iterator[Session]:
    """Reach the nodes and ask what they have; those that are `known` from before need not answer."""
    tell = status or (lambda text: None)
    keeping = keeping_journal(membership.folder, run=run, rounds=system.training.rounds)
    with reached(membership, system) as courier, keeping as journal:
        samples = ask_samples(courier, membership, system, run_id, known=known, status=tell)
        yield Session(courier, membership, system, run_id, samples, tell, journal)


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
    superlink = parse_address(address, "")
    try:
        programs.wait_for_port(superlink.host, superlink.port, patience=10)
        write_connection(programs.flower_home, address, folder / "ca.crt")
        programs.start("superexec", commands.superexec(folder, address, os.getpid()))
        app = programs.flower_home / "exitflow-app"
        commands.write_app(app, flower_app_config())
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
    header = {"kind": "hello", "run": run_id, "system": system_for_nodes(system), "num_steps": 1}
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
