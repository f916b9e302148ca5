"""Over Flower: every task is a message to its node, every update the reply."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from exitflow.errors import TrainingError
from exitflow.federated.flower.courier import Courier, Reply
from exitflow.federated.flower.local import LocalFederation
from exitflow.federated.flower.payload import pack, unpack
from exitflow.federated.local import LocalTrainer
from exitflow.federated.types import ServerState, Task, Update
from exitflow.models.nested import Coverage
from exitflow.tensors import take

POLL = 0.1  # seconds between looks for replies


@dataclass(frozen=True)
class FlowerBackend:
    """Nodes that are reached through `courier`."""

    courier: Courier
    stations: Mapping[str, int]  # node -> Flower's number for it
    coverage: Mapping[int, Coverage]  # exit -> what it covers
    run_id: str
    deadline: float = 600.0  # seconds for a round
    on_close: Callable[[], None] = field(default=lambda: None)

    def run(self, state: ServerState, tasks: Sequence[Task]) -> Iterator[Update]:
        """Every node gets what its exit covers, and returns as much."""
        jobs = [
            (task.node, task.exit, {"kind": "train", "run": self.run_id, "task": dataclasses.asdict(task)})
            for task in tasks
        ]
        for task, reply in zip(tasks, self._in_order(state, jobs), strict=True):
            if reply.error or "error" in reply.header:
                raise TrainingError(f"node {task.node!r}: {reply.error or reply.header['error']}")
            tensors = unpack(reply.payload)
            delta = {name: tensor for name, tensor in tensors.items() if name in state.params}
            buffers = {name: tensor for name, tensor in tensors.items() if name in state.buffers}
            header = reply.header
            yield Update(task, delta, buffers, header["num_samples"], header["num_steps"], header["loss"])

    def gradient_variances(self, state: ServerState, pairs: Sequence[tuple[str, int]]) -> list[float]:
        """Of each (node, exit), measured on the node."""
        jobs = [(node, exit, {"kind": "variance", "run": self.run_id, "exit": exit}) for node, exit in pairs]
        return [float(reply.header["variance"]) for reply in self._in_order(state, jobs)]

    def close(self) -> None:
        """End what was started for it."""
        self.on_close()

    def _in_order(self, state: ServerState, jobs: Sequence[tuple[str, int, dict[str, Any]]]) -> Iterator[Reply]:
        """The reply to each job, in order; a node without one within the deadline has an error instead."""
        packed: dict[int, bytes] = {}
        messages = []
        for node, exit, header in jobs:
            if exit not in packed:
                packed[exit] = pack(_covered(state, self.coverage[exit]))
            messages.append(self.courier.send(self.stations[node], header, packed[exit], seconds=self.deadline))
        waiting, arrived = set(messages), dict[str, Reply]()
        give_up = time.monotonic() + self.deadline
        for message in messages:
            while message in waiting:
                for reply in self.courier.receive(waiting):
                    arrived[reply.message] = reply
                    waiting.discard(reply.message)
                if message in waiting:
                    if time.monotonic() > give_up:
                        waiting.discard(message)
                        arrived[message] = Reply(message, error=f"no answer within {self.deadline:.0f} s")
                    time.sleep(POLL)
            yield arrived.pop(message)


def open_local_flower(trainer: LocalTrainer) -> FlowerBackend:
    """With a whole federation on this machine, which ends with the backend."""
    model = trainer.model
    federation = LocalFederation(list(trainer.data.indices), lambda run: trainer)
    stations = {station.name: station.id for station in federation.courier.stations()}
    coverage = {exit: model.coverage(exit) for exit in range(1, model.num_exits + 1)}
    return FlowerBackend(federation.courier, stations, coverage, "local", on_close=federation.close)


def _covered(state: ServerState, coverage: Coverage) -> dict[str, Tensor]:
    return take(state.tensors, coverage)
