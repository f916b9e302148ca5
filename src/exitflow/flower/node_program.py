"""A node of a federation: its own data, its own states, and a warm worker behind Flower's SuperNode."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from exitflow.config import parse_toml, read_toml
from exitflow.data.sources import load_dataset
from exitflow.errors import ConfigError, TrainingError
from exitflow.federated.local import LocalTrainer
from exitflow.flower import command_lines
from exitflow.flower.deployment import read_address, working_folder
from exitflow.flower.frames import Header
from exitflow.flower.programs import Programs
from exitflow.flower.worker import Worker, serve
from exitflow.free_ports import free_ports
from exitflow.models.specs import factories
from exitflow.system.assembly import Assembly
from exitflow.system.system import System, decode_system, load_resolved

AGAIN = 3.0  # seconds before a SuperNode that has ended is started again


class NodeTrainers:
    """What this node does in each run: the server says how to train, the node has the data."""

    def __init__(
        self, node: str, states: Path, data_dir: str | None, known_factories: frozenset[str] = frozenset()
    ) -> None:
        if data_dir is not None and not Path(data_dir).is_dir():
            raise ConfigError(f"there is no directory {data_dir!r}", key="--data-dir")
        self._node = node
        self._known_factories = known_factories  # code of one's own that the server may have called here
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
        if strangers := sorted(factories(system.model) - self._known_factories):
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


def run_node(folder: Path, *, data_dir: str | None, tell: Callable[[str], None]) -> None:
    """Serve the federation as the node that `folder` was written for, until told to end."""
    node = node_of(folder)
    own = load_resolved(folder / "system.toml")
    trainers = NodeTrainers(node, folder / "states", data_dir, factories(own.model))
    _check_data(folder, trainers)
    lifeline, end = os.pipe()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os.write(end, b"."))
    with working_folder() as work:
        programs = Programs(work, logs=folder / "logs")
        try:
            (port,) = free_ports(1)
            command = command_lines.supernode(folder.resolve(), read_address(folder), port=port, worker=work / "worker")
            failures: list[Exception] = []

            def keep_running() -> None:
                try:
                    _keep_running(programs, command, tell)
                except Exception as error:  # then nothing would ever come
                    failures.append(error)
                    os.write(end, b".")

            threading.Thread(target=keep_running, daemon=True).start()
            serve(Worker(node, trainers), work / "worker", until_closed=lifeline)
            if failures:
                raise TrainingError(f"Flower's SuperNode cannot be started: {failures[0]}")
        finally:
            programs.stop()


def run_worker(node: str, socket: Path, *, states: Path, data_dir: str | None) -> None:
    """Only the worker, for a SuperNode that somebody else runs."""
    lifeline, end = os.pipe()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os.write(end, b"."))
    serve(Worker(node, NodeTrainers(node, states, data_dir)), socket, until_closed=lifeline)


def node_of(folder: Path) -> str:
    """The name of the node that `folder` was written for."""
    node = read_toml(folder / "federation.toml").get("node") if (folder / "node.key").is_file() else None
    if not isinstance(node, str):
        problem = "is not a folder that `exitflow federation init` has written for a node"
        raise ConfigError(problem, source=str(folder))
    return node


def _check_data(folder: Path, trainers: NodeTrainers) -> None:
    """Load the data once, so that what is wrong with them is said when the node starts."""
    trainers({"run": "check", "system": (folder / "system.toml").read_text(), "num_steps": 1})


def _keep_running(programs: Programs, command: list[str], tell: Callable[[str], None]) -> None:
    """Start the SuperNode again whenever it ends: the server may not be there yet, or may have been away."""
    while not programs.stopped:
        supernode = programs.start("supernode", command)
        while supernode.poll(1.0) is None:
            pass
        if not programs.stopped:
            tell(f"Flower's SuperNode ended: {supernode.last_words()}; trying again")
            time.sleep(AGAIN)
