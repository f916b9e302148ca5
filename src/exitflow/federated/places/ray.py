"""Tasks on a Ray cluster, local or remote: for simulations that outgrow one machine.

Long-lived actors, one for each core, hold the model and the data. The global model is put into Ray's object store
once a round, where all actors of a machine read the same memory. Updates are handed on in the order of the tasks,
however the actors finish, so that the sums come out the same to the bit as in the serial backend.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
import torch
from torch import Tensor

from exitflow.addresses import parse_address
from exitflow.errors import ConfigError, TrainingError, os_problem
from exitflow.federated.local import LocalTrainer
from exitflow.federated.types import UPDATE_FIGURES, GradientFigures, ServerState, Task, Update
from exitflow.models.torchvision_operators import with_operators
from exitflow.tensors import Tensors

Arrays = Mapping[str, npt.NDArray[Any]]

QUEUE = 2  # tasks that an actor has at a time, so that it never waits for the next


class RayBackend:
    """Runs tasks in actors that live as long as the backend."""

    def __init__(self, trainer: LocalTrainer, num_workers: int | None = None, *, address: str | None = None) -> None:
        self._own = not ray.is_initialized()
        if self._own:
            _connect(num_workers, address)
        cores = int(ray.cluster_resources().get("CPU", 1))  # type: ignore[no-untyped-call]
        count = min(num_workers or cores, cores, len(trainer.data.indices))  # an actor without a core never starts
        trainer_ref = ray.put(trainer)
        actor = ray.remote(num_cpus=1)(_Actor)
        self.actors: list[Any] = [actor.remote([trainer_ref], "torchvision" in sys.modules) for _ in range(count)]
        self._pinned = bool(trainer.states or trainer.residuals)  # what a node keeps lies where it was last trained

    def run(self, state: ServerState, tasks: Sequence[Task]) -> Iterator[Update]:
        """Updates are views into the object store, valid until the next one is asked for."""
        shared = ray.put((_arrays(state.params), _arrays(state.buffers)))
        jobs = [(task.node, "train", (shared, task)) for task in tasks]
        for task, reply in zip(tasks, self._in_order(jobs), strict=True):
            delta, buffers, figures = reply
            yield Update(task, _tensors(delta), _tensors(buffers), **figures)

    def measure_gradients(self, state: ServerState, pairs: Sequence[tuple[str, int]]) -> list[GradientFigures]:
        """The figures of each (node, exit), measured by the workers."""
        shared = ray.put((_arrays(state.params), _arrays(state.buffers)))
        return list(self._in_order([(node, "gradients", (shared, node, exit)) for node, exit in pairs]))

    def close(self) -> None:
        """End the actors, and the connection if it was ours."""
        for actor in self.actors:
            ray.kill(actor)
        if self._own:
            ray.shutdown()

    def _in_order(self, jobs: Sequence[tuple[str, str, tuple[Any, ...]]]) -> Iterator[Any]:
        """The result of each job, in order. Only so many are begun as the actors can take."""
        waiting = deque(enumerate(jobs))
        queued = [0] * len(self.actors)
        running: dict[Any, tuple[int, int]] = {}  # reference -> job, actor
        done: dict[int, Any] = {}
        for turn in range(len(jobs)):
            while turn not in done:
                while waiting and (actor := self.actor_for(waiting[0][1][0], queued)) is not None:
                    index, (_, method, arguments) = waiting.popleft()
                    running[getattr(self.actors[actor], method).remote(*arguments)] = (index, actor)
                    queued[actor] += 1
                finished, _ = ray.wait(list(running))
                for reference in finished:
                    index, actor = running.pop(reference)
                    queued[actor] -= 1
                    done[index] = reference
            yield self._result(done.pop(turn), jobs[turn])

    def actor_for(self, node: str, queued: list[int]) -> int | None:
        """The idlest actor, or the node's own; None where that has enough to do."""
        actor = zlib.crc32(node.encode()) % len(queued) if self._pinned else int(np.argmin(queued))
        return actor if queued[actor] < QUEUE else None

    def _result(self, reference: Any, job: tuple[str, str, tuple[Any, ...]]) -> Any:
        try:
            return ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            reason = os_problem(cause) if isinstance(cause, OSError) else cause
            problem = f"a worker of Ray failed at node {job[0]!r}: {type(cause).__name__}: {reason}"
            raise TrainingError(problem) from None
        except ray.exceptions.RayError as error:
            raise TrainingError(f"a worker of Ray died at node {job[0]!r}: {' '.join(str(error).split())}") from None


def _connect(num_workers: int | None, address: str | None) -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}
    if address:
        check_reachable(address)
        try:
            ray.init(address=address, **settings)
        except (ConnectionError, ValueError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"no Ray cluster answers at {address!r}: {reason}", key="--address") from None
    else:
        ray.init(address="local", num_cpus=num_workers, include_dashboard=False, **settings)


def check_reachable(address: str) -> None:
    """Ray itself would try for minutes."""
    where = parse_address(address.removeprefix("ray://"), "--address", example="10.0.0.1:6379", may_be_any=False)
    try:
        where.connect(10)
    except OSError as error:
        raise ConfigError(f"nobody answers at {address}: {error.strerror or error}", key="--address") from None


class _Actor:
    """Holds what the nodes do."""

    def __init__(self, trainer: Sequence[Any], needs_torchvision: bool) -> None:
        torch.set_num_threads(1)
        if needs_torchvision:  # the network is of a package that imports it
            with_operators()
        self._trainer: LocalTrainer = ray.get(trainer[0])  # in a list, or Ray would have loaded it before

    def train(self, shared: tuple[Arrays, Arrays], task: Task) -> tuple[Arrays, Arrays, dict[str, Any]]:
        update = self._trainer.train(_state(shared), task)
        figures = {name: getattr(update, name) for name in UPDATE_FIGURES}
        return _arrays(update.delta), _arrays(update.buffers), figures

    def gradients(self, shared: tuple[Arrays, Arrays], node: str, exit: int) -> GradientFigures:
        return self._trainer.measure_gradients(_state(shared), node, exit)


def _state(shared: tuple[Arrays, Arrays]) -> ServerState:
    params, buffers = shared
    return ServerState(0, _tensors(params), _tensors(buffers))


def _arrays(tensors: Tensors) -> Arrays:
    """Ray passes NumPy arrays on without copying them."""
    return {name: tensor.detach().numpy() for name, tensor in tensors.items()}


def _tensors(arrays: Arrays) -> dict[str, Tensor]:
    with warnings.catch_warnings():  # the arrays are shared and read-only; nobody writes to them
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
