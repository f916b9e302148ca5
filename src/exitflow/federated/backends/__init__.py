"""Where local training happens: in this process, or in a pool of processes. All give the same bits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from exitflow.federated.backends.processes import ProcessesBackend
from exitflow.federated.backends.serial import SerialBackend
from exitflow.federated.local import LocalTrainer
from exitflow.federated.types import Backend, ServerState

BACKENDS: dict[str, Callable[[LocalTrainer, ServerState, int], Backend]] = {
    "serial": lambda trainer, state, workers: SerialBackend(trainer),
    "processes": ProcessesBackend,
}


def default_workers() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


@contextmanager
def open_backend(
    name: str, trainer: LocalTrainer, state: ServerState, *, workers: int | None = None
) -> Iterator[Backend]:
    """The backend of that name, ended when the block is left. PyTorch computes in one thread meanwhile, so that
    every backend gives the same bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    useful = min(workers or default_workers(), len(trainer.data.indices))
    backend = BACKENDS[name](trainer, state, useful)
    try:
        yield backend
    finally:
        backend.close()
        torch.set_num_threads(threads)
