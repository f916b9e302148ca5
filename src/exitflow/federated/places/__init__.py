"""Where local training happens: here, in a pool of processes, on a Ray cluster, or on the nodes of a federation.

All give the same bits.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from exitflow.errors import MissingExtraError
from exitflow.federated.local import LocalTrainer
from exitflow.federated.options.federation_spec import FederationSpec
from exitflow.federated.places.processes import ProcessesBackend
from exitflow.federated.places.serial import SerialBackend
from exitflow.federated.types import Backend, ServerState

Status = Callable[[str], None]  # is told what is being waited for


@dataclass(frozen=True)
class Place:
    """Where the workers are."""

    workers: int | None = None  # processes; None: one for each core
    address: str | None = None  # of Ray's cluster; None: one of our own, on this machine
    federation: FederationSpec = field(default_factory=FederationSpec)
    status: Status = field(default=lambda text: None)


def _serial(trainer: LocalTrainer, state: ServerState, place: Place) -> Backend:
    return SerialBackend(trainer)


def _processes(trainer: LocalTrainer, state: ServerState, place: Place) -> Backend:
    return ProcessesBackend(trainer, state, min(place.workers or default_workers(), len(trainer.data.indices)))


def _ray(trainer: LocalTrainer, state: ServerState, place: Place) -> Backend:
    _require("ray", "ray")
    from exitflow.federated.places.ray import RayBackend

    return RayBackend(trainer, place.workers, address=place.address)


def _flower(trainer: LocalTrainer, state: ServerState, place: Place) -> Backend:
    _require("flwr", "flower")
    from exitflow.flower.backend import open_local_flower

    return open_local_flower(trainer, place.federation, status=place.status)


BACKENDS: dict[str, Callable[[LocalTrainer, ServerState, Place], Backend]] = {
    "serial": _serial,
    "processes": _processes,
    "ray": _ray,
    "flower": _flower,
}


def default_workers() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


@contextmanager
def open_backend(
    name: str,
    trainer: LocalTrainer,
    state: ServerState,
    *,
    workers: int | None = None,
    place: Place | None = None,
) -> Iterator[Backend]:
    """The backend of that name, ended when the block is left."""
    with one_thread():
        backend = BACKENDS[name](trainer, state, place or Place(workers))
        try:
            yield backend
        finally:
            backend.close()


@contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch computes in one thread meanwhile, so that every backend gives the same bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _require(package: str, extra: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise MissingExtraError(package, extra)
