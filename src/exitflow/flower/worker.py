"""The warm worker of a node: model, data and PyTorch stay in one process; messages come through a local socket."""

from __future__ import annotations

import dataclasses
import logging
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from exitflow.errors import ExitflowError, TrainingError
from exitflow.federated.local import LocalTrainer
from exitflow.federated.types import UPDATE_FIGURES, ServerState, task_from_json
from exitflow.flower.frames import Header, receive_frame, send_frame
from exitflow.logs import about
from exitflow.models.tuning import trained_buffers, trained_parameters
from exitflow.tensors import copy_into, pack, take, unpack

log = logging.getLogger("exitflow.federation")


class Worker:
    """Answers the messages of the server for one node."""

    def __init__(self, node: str, trainer_of: Callable[[Header], LocalTrainer]) -> None:
        self._node = node
        self._trainer_of = trainer_of  # header of a message -> what this node does in its run

    def answer(self, header: Header, payload: bytes) -> tuple[Header, bytes]:
        """The reply to a message; an error is a reply too."""
        try:
            kind = header["kind"]
            if kind not in self._answers:
                raise TrainingError(f"there is no message of kind {kind!r}")
            return self._answers[kind](header, payload)
        except ExitflowError as error:
            problem = str(error)
        except Exception as error:  # the server names the node, and goes on or stops by its rule
            problem = f"{type(error).__name__}: {error}"
        log.warning("a message of the server was answered with an error: %s", problem)
        return {"error": problem}, b""

    @property
    def _answers(self) -> dict[str, Callable[[Header, bytes], tuple[Header, bytes]]]:
        """What answers each kind of message."""
        return {"train": self._train, "gradients": self._gradients, "hello": self._hello}

    def _hello(self, header: Header, payload: bytes) -> tuple[Header, bytes]:
        num_samples = len(self._trainer_of(header).data.indices[self._node])
        log.info("a training asked how many samples there are: %d", num_samples, extra=about(run=header["run"]))
        return {"num_samples": num_samples}, b""

    def _train(self, header: Header, payload: bytes) -> tuple[Header, bytes]:
        trainer, task = self._trainer_of(header), task_from_json(header["task"])
        if task.node != self._node:
            raise TrainingError(f"the task is for node {task.node!r}, this is {self._node!r}")
        log.info("round %d: a task to train exits %s", task.round, task.exits, extra=about(run=header["run"]))
        began = time.monotonic()
        update = trainer.train(_received(trainer, task.exits, payload), task)
        figures = {name: getattr(update, name) for name in UPDATE_FIGURES}
        delta = trainer.compression.encoded(update.delta) if trainer.compression else update.delta
        packed = pack({**delta, **update.buffers})
        seconds = round(time.monotonic() - began, 3)
        figures_told = about(run=header["run"], bytes=len(packed), seconds=seconds, loss=update.losses[-1])
        log.info("round %d: trained, and the update is handed to Flower", task.round, extra=figures_told)
        return {**figures, "run": header["run"], "task": header["task"]}, packed

    def _gradients(self, header: Header, payload: bytes) -> tuple[Header, bytes]:
        trainer, exit = self._trainer_of(header), header["exit"]
        figures = trainer.measure_gradients(_received(trainer, (exit,), payload), self._node, exit)
        return dataclasses.asdict(figures), b""


def _received(trainer: LocalTrainer, exits: Sequence[int], payload: bytes) -> ServerState:
    """The model as the server sent it: what the exits cover, in a frame of the whole that holds nothing else."""
    model = trainer.model
    params = {name: torch.empty_like(param) for name, param in trained_parameters(model).items()}
    buffers = {name: torch.empty_like(buffer) for name, buffer in trained_buffers(model).items()}
    state = ServerState(0, params, buffers)
    copy_into(take(state.tensors, model.coverage(*exits)), unpack(payload))
    return state


def serve(worker: Worker, path: Path, *, until_closed: int) -> None:
    """Answer at the socket `path`, one message at a time, until the other end of a pipe is closed."""
    torch.set_num_threads(1)
    if path.is_socket():  # of a worker that was killed
        path.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        os.chmod(path, 0o600)
        listener.listen()
        while True:
            ready, _, _ = select.select([listener.fileno(), until_closed], [], [])
            if until_closed in ready:
                return
            connection, _ = listener.accept()
            with connection:
                try:
                    send_frame(connection, *worker.answer(*receive_frame(connection)))
                except (EOFError, OSError):  # Flower gave the message up
                    continue
