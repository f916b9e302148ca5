"""A whole federation on the loopback address, for as long as a training lasts."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from exitflow.certificates import make_authority
from exitflow.errors import TrainingError
from exitflow.federated.local import LocalTrainer
from exitflow.flower import commands
from exitflow.flower.commands import CONNECTION, write_connection
from exitflow.flower.courier import RelayCourier, registered
from exitflow.flower.frames import Header
from exitflow.flower.keys import DAYS_VALID, write_node_key, write_server_certificate, write_shared_secret
from exitflow.flower.programs import Programs
from exitflow.flower.worker import Worker, serve
from exitflow.free_ports import free_ports

STARTING = 120.0  # seconds that the programs have to start


class LocalFederation:
    """A SuperLink, and for every node a SuperNode and a worker that was forked from this process."""

    def __init__(self, nodes: Sequence[str], trainer_of: Callable[[Header], LocalTrainer]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="exitflow-"))
        self.programs = Programs(self.folder)
        self._lifeline = os.pipe()
        self._workers: dict[str, mp.process.BaseProcess] = {}
        try:
            self._start(nodes, trainer_of)
        except BaseException:
            self.close()
            raise

    def _start(self, nodes: Sequence[str], trainer_of: Callable[[Header], LocalTrainer]) -> None:
        for node in nodes:
            self._fork_worker(node, trainer_of)
        authority = make_authority("exitflow simulation", days=DAYS_VALID)
        write_server_certificate(self.folder, authority, ["127.0.0.1"], days=DAYS_VALID)
        write_shared_secret(self.folder / "superexec.secret")
        port, *node_ports = free_ports(1 + len(nodes))
        address = f"127.0.0.1:{port}"
        superlink = commands.superlink(self.folder, host="127.0.0.1", port=port, database=None)
        self.programs.start("superlink", superlink)
        self.keys = {node: self._write_node(node) for node in nodes}
        write_connection(self.programs.flower_home, address, self.folder / "ca.crt")
        self.programs.start("superexec", commands.superexec(self.folder, address, os.getpid()))
        commands.write_app(self.folder / "app", {"relay": ""})
        self.courier = RelayCourier(self.folder / "relay", address)
        register = [
            ["supernode", "register", str(self._node(node) / "node.pub"), CONNECTION, "--name", node] for node in nodes
        ]
        relay = f"relay={json.dumps(str(self.folder / 'relay'))}"
        run = ["run", str(self.folder / "app"), CONNECTION, "--run-config", relay]
        self.programs.wait_for_port("127.0.0.1", port)
        self.programs.flwr([*register, run])
        self._commands = {
            node: commands.supernode(self._node(node), address, port=port, worker=self._socket(node))
            for node, port in zip(nodes, node_ports, strict=True)
        }
        for node in nodes:
            self.restart(node)
        self._wait_until_complete(set(nodes))

    def restart(self, node: str) -> None:
        """Start the SuperNode of a node, which must not be running."""
        self.programs.start(f"node-{node}", self._commands[node])

    def worker_pid(self, node: str) -> int:
        """The id of the process that trains a node."""
        pid = self._workers[node].pid
        assert pid is not None
        return pid

    def stations(self) -> dict[str, int]:
        """node -> Flower's number for it, of those with the keys that we made."""
        return registered(self.courier, self.keys)

    def close(self) -> None:
        """End everything, and leave nothing behind."""
        if hasattr(self, "courier"):
            self.courier.close()
        self.programs.stop()
        os.close(self._lifeline[1])
        for worker in self._workers.values():
            worker.join(5)
            worker.kill()
            worker.join()
        os.close(self._lifeline[0])
        shutil.rmtree(self.folder, ignore_errors=True)

    def _node(self, node: str) -> Path:
        return self.folder / "nodes" / node

    def _socket(self, node: str) -> Path:
        return self._node(node) / "worker"

    def _write_node(self, node: str) -> str:
        key = write_node_key(self._node(node))
        shutil.copy(self.folder / "ca.crt", self._node(node))
        return key

    def _fork_worker(self, node: str, trainer_of: Callable[[Header], LocalTrainer]) -> None:
        self._node(node).mkdir(parents=True)
        process = mp.get_context("fork").Process(target=self._work, args=(node, trainer_of), daemon=True)
        process.start()
        self._workers[node] = process

    def _work(self, node: str, trainer_of: Callable[[Header], LocalTrainer]) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to end
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.close(self._lifeline[1])
        serve(Worker(node, trainer_of), self._socket(node), until_closed=self._lifeline[0])
        os._exit(0)

    def _wait_until_complete(self, nodes: set[str]) -> None:
        give_up = time.monotonic() + STARTING
        while not self.courier.wait(0.1):
            self._check(give_up)
        while nodes - {station.name for station in self.courier.stations() if station.online}:
            self._check(give_up)

    def _check(self, give_up: float) -> None:
        self.programs.check()
        if time.monotonic() > give_up:
            raise TrainingError(f"Flower did not start within {STARTING:.0f} s; see {self.folder / 'logs'}")
        time.sleep(0.1)
