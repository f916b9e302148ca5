"""A pool of forked processes, one thread each; tensors pass through shared memory.

The parent writes the global model into one shared buffer a round. A worker is told a task as a line of JSON, reads
the model from the buffer, trains, and writes its update into the slot that it was given. Updates are handed on in
the order of the tasks, however the workers finish, so the sums come out the same to the bit as in the serial
backend. Memory is anonymous and pipes close with their owner: whoever is killed, nothing stays behind.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import mmap
import multiprocessing as mp
import os
import signal
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, cast

import torch
from torch import Tensor

from exitflow.errors import TrainingError, os_problem
from exitflow.federated.local import LocalTrainer
from exitflow.federated.types import UPDATE_FIGURES, GradientFigures, ServerState, Task, Update, task_from_json
from exitflow.tensors import Layout, copy_into, take

SPARE_SLOTS = (
    14  # updates that may wait for their turn while the workers go on; pages that nothing touches cost nothing
)


class ProcessesBackend:
    """Runs tasks in `num_workers` processes that live as long as the backend."""

    def __init__(self, trainer: LocalTrainer, state: ServerState, num_workers: int) -> None:
        self._shared = _SharedTensors(trainer, state, num_slots=num_workers + SPARE_SLOTS)
        self.workers: list[WorkerProcess] = []
        context = mp.get_context("fork")
        for _ in range(num_workers):
            ours, theirs = context.Pipe()
            inherited = [worker.connection for worker in self.workers] + [ours]
            process = context.Process(target=_work, args=(trainer, self._shared, theirs, inherited), daemon=True)
            process.start()
            theirs.close()
            self.workers.append(WorkerProcess(process, ours))

    def run(self, state: ServerState, tasks: Sequence[Task]) -> Iterator[Update]:
        """Updates are views into shared memory, valid until the next one is asked for."""
        self._shared.broadcast(state)
        jobs = [{"kind": "train", "task": dataclasses.asdict(task)} for task in tasks]
        for task, (slot, reply) in zip(tasks, self._in_order(jobs), strict=True):
            delta, buffers = self._shared.update(task, slot)
            yield Update(task, delta, buffers, **{**reply, "losses": tuple(reply["losses"])})

    def measure_gradients(self, state: ServerState, pairs: Sequence[tuple[str, int]]) -> list[GradientFigures]:
        """The figures of each (node, exit), measured by the workers."""
        self._shared.broadcast(state)
        jobs = [{"kind": "gradients", "node": node, "exit": exit} for node, exit in pairs]
        return [GradientFigures(**reply) for _, reply in self._in_order(jobs)]

    def close(self) -> None:
        """End the workers, and wait until they have ended."""
        for worker in self.workers:
            worker.connection.close()
        for worker in self.workers:
            worker.process.terminate()
            worker.process.join()

    def _in_order(self, jobs: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
        """(slot, reply) of each job, in order; a slot is used again once the next one is asked for.

        Of the next jobs, as many as have a slot, the deepest is begun first: it takes longest, and begun last it
        would keep one worker busy and the others waiting.
        """
        waiting = list(range(len(jobs)))
        idle = deque(self.workers)
        slots = deque(range(self._shared.num_slots))
        busy: dict[Connection, tuple[WorkerProcess, int, int]] = {}
        done: dict[int, tuple[int, dict[str, Any]]] = {}
        for turn in range(len(jobs)):
            while True:
                while idle and (near := waiting[: len(slots)]):  # so the last slot is for the next in turn
                    index = max(near, key=lambda index: (_depth(jobs[index]), -index))
                    waiting.remove(index)
                    worker, slot = idle.popleft(), slots.popleft()
                    worker.send({**jobs[index], "slot": slot})
                    busy[worker.connection] = (worker, index, slot)
                if turn in done:
                    break
                for connection in cast("list[Connection]", wait(list(busy))):
                    worker, index, slot = busy.pop(connection)
                    done[index] = (slot, worker.receive(jobs[index]))
                    idle.append(worker)
            slot, reply = done.pop(turn)
            yield slot, reply
            slots.append(slot)


@dataclasses.dataclass(frozen=True)
class WorkerProcess:
    """The parent's side of one process."""

    process: mp.process.BaseProcess
    connection: Connection

    def send(self, message: Mapping[str, Any]) -> None:
        try:
            self.connection.send_bytes(json.dumps(message).encode())
        except OSError:
            raise self._death() from None

    def receive(self, job: Mapping[str, Any]) -> dict[str, Any]:
        try:
            reply: dict[str, Any] = json.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            raise self._death(job) from None
        if "error" in reply:
            raise TrainingError(f"a worker failed at {_describe(job)}: {reply['error']}")
        return reply

    def _death(self, job: Mapping[str, Any] | None = None) -> TrainingError:
        self.process.join(timeout=5)
        doing = f" at {_describe(job)}" if job else ""
        return TrainingError(f"a worker process died{doing} (exit code {self.process.exitcode})")


def _depth(job: Mapping[str, Any]) -> int:
    return int(job["exit"] if job["kind"] == "gradients" else job["task"]["exits"][-1])


def _describe(job: Mapping[str, Any]) -> str:
    if job["kind"] == "gradients":
        return f"the gradients of node {job['node']!r}, exit {job['exit']}"
    task = job["task"]
    return f"round {task['round']}, node {task['node']!r}, exit {task['exits'][-1]}"


class _SharedTensors:
    """The global model, and slots for updates, in anonymous memory that forked processes share."""

    def __init__(self, trainer: LocalTrainer, state: ServerState, num_slots: int) -> None:
        self.num_slots = num_slots
        self._model = Layout.of(state.tensors)
        self._coverage = functools.cache(trainer.model.coverage)
        slot_bytes = self._model.num_bytes
        memory = mmap.mmap(-1, self._model.num_bytes + num_slots * slot_bytes)
        everything = torch.frombuffer(memory, dtype=torch.uint8)
        views = self._model.views(everything)
        self.state = ServerState(
            0, {name: views[name] for name in state.params}, {name: views[name] for name in state.buffers}
        )
        self._slots = everything[self._model.num_bytes :].view(num_slots, slot_bytes)

    def broadcast(self, state: ServerState) -> None:
        """Show the workers a new global model."""
        copy_into(self.state.tensors, state.tensors)

    def update(self, task: Task, slot: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(delta, buffers) of an update of that task in that slot."""
        covered = take(self.state.tensors, self._coverage(*task.exits))
        views = Layout.of(covered).views(self._slots[slot])
        delta = {name: view for name, view in views.items() if name in self.state.params}
        return delta, {name: view for name, view in views.items() if name in self.state.buffers}


def _work(trainer: LocalTrainer, shared: _SharedTensors, connection: Connection, inherited: list[Connection]) -> None:
    """The life of a worker: do what comes through the pipe until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to end
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in inherited:  # or the pipes of a killed parent would stay open here
        other.close()
    torch.set_num_threads(1)
    while True:
        try:
            job = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)
        try:
            reply = _do(trainer, shared, job)
        except Exception as error:
            reason = os_problem(error) if isinstance(error, OSError) else error
            reply = {"error": f"{type(error).__name__}: {reason}"}
        try:
            connection.send_bytes(json.dumps(reply).encode())
        except OSError:
            os._exit(0)


def _do(trainer: LocalTrainer, shared: _SharedTensors, job: Mapping[str, Any]) -> dict[str, Any]:
    if job["kind"] == "gradients":
        return dataclasses.asdict(trainer.measure_gradients(shared.state, job["node"], job["exit"]))
    update = trainer.train(shared.state, task_from_json(job["task"]))
    delta, buffers = shared.update(update.task, job["slot"])
    copy_into(delta, update.delta)
    copy_into(buffers, update.buffers)
    return {name: getattr(update, name) for name in UPDATE_FIGURES}
