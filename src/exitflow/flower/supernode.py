"""A node of a federation: its own data, its own states, and a warm worker behind Flower's SuperNode."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from exitflow.config import parse_toml
from exitflow.data.sources import load_dataset
from exitflow.errors import ConfigError, TrainingError
from exitflow.federated.local import LocalTrainer
from exitflow.flower import commands
from exitflow.flower.federation_status import calling
from exitflow.flower.folders import node_of, read_address
from exitflow.flower.frames import Header
from exitflow.flower.keys import CA, public_key_in
from exitflow.flower.programs import Programs, RunningProgram, working_folder
from exitflow.flower.worker import Worker, serve
from exitflow.free_ports import free_ports
from exitflow.system.assembly import Assembly
from exitflow.system.system import System, decode_system, load_resolved, own_parts

AGAIN = 3.0  # seconds before a SuperNode that has ended is started again
UNKNOWN_TO_SERVER = 5  # times in a row that a server must not know our key: it registers keys when it has started

NEW_KEY = (
    "take the folder that `federation init` wrote for it, or put its node.pub into server/nodes and start that anew"
)

log = logging.getLogger("exitflow.federation")


class NodeTrainers:
    """What this node does in each run: the server says how to train, the node has the data."""

    def __init__(
        self, node: str, states: Path, data_dir: str | None, known_parts: frozenset[str] = frozenset()
    ) -> None:
        if data_dir is not None and not Path(data_dir).is_dir():
            raise ConfigError(f"there is no directory {data_dir!r}", key="--data-dir")
        self._node = node
        self._known_parts = known_parts  # code of one's own that the server may have called here
        self._states = states
        self._data_dir = data_dir  # all that lies there is this node's; None: its part of the system's partition
        self._trainers: dict[tuple[str, str, int], LocalTrainer] = {}

    def __call__(self, header: Header) -> LocalTrainer:
        """For the run that a message belongs to. Its states stay on disk, under the name of the run."""
        run, text, num_steps = str(header["run"]), str(header["system"]), int(header["num_steps"])
        if not run.isalnum():
            raise ConfigError(f"is no name of a run: {run!r}", key="run")
        if (run, text, num_steps) not in self._trainers:
            self._trainers.clear()  # one run at a time
            system = decode_system(parse_toml(text))
            self._trainers[run, text, num_steps] = self._trainer(system, self._states / run / "nodes", num_steps)
        return self._trainers[run, text, num_steps]

    def _trainer(self, system: System, states: Path, num_steps: int) -> LocalTrainer:
        if self._node not in system.topology.by_name:
            raise ConfigError(f"the system of this run has no node {self._node!r}", key="nodes")
        if strangers := sorted(own_parts(system) - self._known_parts):
            problem = f"{strangers[0]!r} is not in this node's own system.toml, if it has one, so it is not called here"
            raise ConfigError(problem, key="model.factory")
        data = system.data
        if data.name == "digits" and self._data_dir is not None:
            problem = "data set 'digits' is embedded; leave this out, and the node takes its part of the partition"
            raise ConfigError(problem, key="--data-dir")
        dataset = load_dataset(data.name, data_dir=self._data_dir, verify=data.verify and not self._data_dir)
        if self._data_dir is None:
            return Assembly(system, dataset).trainer(states, num_steps=num_steps)
        return Assembly(system, dataset).trainer(states, num_steps=num_steps, only=self._node)


def run_node(folder: Path, *, data_dir: str | None) -> None:
    """Serve the federation as the node that `folder` was written for, until told to end."""
    node, address = node_of(folder), read_address(folder)
    supernode = SuperNode(node, address, folder / CA, public_key_in(folder))
    own = load_resolved(folder / "system.toml")
    trainers = NodeTrainers(node, folder / "states", data_dir, own_parts(own))
    _check_data(folder, trainers)
    lifeline, end = os.pipe()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os.write(end, b"."))
    with working_folder() as work:
        programs = Programs(work, logs=folder / "logs")
        try:
            (port,) = free_ports(1)
            command = commands.supernode(folder.resolve(), address, port=port, worker=work / "worker")
            failures: list[Exception] = []
            log.info("node %r has its data, and looks for the server at %s", node, address)

            def keep_running() -> None:
                try:
                    supernode.keep_running(programs, command)
                except ConfigError as error:
                    failures.append(error)
                    os.write(end, b".")
                except Exception as error:  # then nothing would ever come
                    failures.append(TrainingError(f"Flower's SuperNode cannot be started: {error}"))
                    os.write(end, b".")

            threading.Thread(target=keep_running, daemon=True).start()
            serve(Worker(node, trainers), work / "worker", until_closed=lifeline)
            if failures:
                raise failures[0]  # a sentence that says why this node can never take part
            log.info("ended")
        finally:
            programs.stop()


def run_worker(node: str, socket: Path, *, states: Path, data_dir: str | None) -> None:
    """Only the worker, for a SuperNode that somebody else runs."""
    lifeline, end = os.pipe()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os.write(end, b"."))
    serve(Worker(node, NodeTrainers(node, states, data_dir)), socket, until_closed=lifeline)


def _check_data(folder: Path, trainers: NodeTrainers) -> None:
    """Load the data once, so that what is wrong with them is said when the node starts."""
    trainers({"run": "check", "system": (folder / "system.toml").read_text(), "num_steps": 1})


@dataclass
class SuperNode:
    """Flower's program that connects a node with the server, and what the log should know of it."""

    node: str
    address: str
    authority: Path
    public_key: str
    connected: bool = False
    unknown: int = 0  # times in a row that the server did not know the key

    def keep_running(self, programs: Programs, command: list[str]) -> None:
        """Start it again whenever it ends: the server may not be there yet, or may have been away."""
        while not programs.stopped:
            program = programs.start("supernode", command)
            read = 0
            while program.poll(1.0) is None:
                read = self.tell(program, read)
            if not programs.stopped:
                self.tell(program, read)
                self.connected = False
                self.explain(program)
                time.sleep(AGAIN)

    def tell(self, program: RunningProgram, read: int) -> int:
        """Tell the log what Flower's own log says of the connection since byte `read`; returns how far it is read."""
        with program.log.open("rb") as file:
            file.seek(read)
            lines = file.read()
        for line in lines.splitlines():
            if not self.connected and (b"SuperNode ID:" in line or b"Connection successful" in line):
                self.connected, self.unknown = True, 0
                log.info("connected to the server at %s", self.address)
            elif self.connected and b"Connection attempt failed" in line:
                self.connected = False
                log.warning("the server at %s does not answer; trying again", self.address)
        return read + len(lines)

    def explain(self, program: RunningProgram) -> None:
        """Say why it has ended; a ConfigError where it can never work."""
        words = program.last_words()
        if "Failed to activate" in words:
            with calling(self.address, self.authority) as roll_call:
                present = roll_call()
            known = [node for node in present or () if node.public_key == self.public_key]
            self.unknown += present is not None and not known
            if self.unknown >= UNKNOWN_TO_SERVER:
                problem = f"the server at {self.address} knows no node with this key; {NEW_KEY}"
                raise ConfigError(problem, source=str(self.authority.with_name("node.key")))
            if present is not None and not known:
                words = "the server knows no node with this key"
            if any(node.connected for node in known):
                words = "for the server this node is connected still; it will notice within a minute that it was away"
        log.warning("Flower's SuperNode ended: %s; trying again", words)
