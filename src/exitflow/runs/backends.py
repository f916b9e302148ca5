"""Where local training happens: the one table of backends by name.

Here, in a pool of processes, on a Ray cluster, or on nodes behind Flower; all give the same bits. What a backend needs
is imported when it is opened, so that asking for the names does not wait for PyTorch.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from exitflow.config import require
from exitflow.errors import MissingExtraError, suggestion
from exitflow.federated.options.federation_spec import FederationSpec

if TYPE_CHECKING:
    from exitflow.federated.local import LocalTrainer
    from exitflow.federated.types import Backend, ServerState, Status


@dataclass(frozen=True)
class Place:
    """Where the workers of a training are, and how many."""

    workers: int | None = None  # processes; None: one for each core
    address: str | None = None  # of Ray's cluster; None: one of our own, on this machine
    federation: FederationSpec = field(default_factory=FederationSpec)
    status: Status = field(default=lambda text: None)

    def __post_init__(self) -> None:
        known = self.workers is None or (type(self.workers) is int and self.workers >= 1)
        require(known, "workers", f"must be a whole number, at least 1, got {self.workers!r}")
        known = self.address is None or isinstance(self.address, str)
        require(known, "address", f"expected HOST:PORT of a Ray cluster, got {self.address!r}")


def _serial(trainer: LocalTrainer, state: ServerState, place: Place) -> Backend:
    from exitflow.federated.places.serial import SerialBackend

    return SerialBackend(trainer)


def _processes(trainer: LocalTrainer, state: ServerState, place: Place) -> Backend:
    from exitflow.federated.places.processes import ProcessesBackend

    return ProcessesBackend(trainer, state, min(place.workers or default_workers(), len(trainer.data.indices)))


def _ray(trainer: LocalTrainer, state: ServerState, place: Place) -> Backend:
    _require_package("ray", "ray")
    from exitflow.federated.places.ray import RayBackend

    return RayBackend(trainer, place.workers, address=place.address)


def _flower(trainer: LocalTrainer, state: ServerState, place: Place) -> Backend:
    _require_package("flwr", "flower")
    from exitflow.flower.backend import open_local_flower

    return open_local_flower(trainer, place.federation, status=place.status)


BACKENDS: dict[str, Callable[[LocalTrainer, ServerState, Place], Backend]] = {
    "processes": _processes,
    "serial": _serial,
    "ray": _ray,
    "flower": _flower,
}


def default_workers() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def check_backend(name: str) -> None:
    """Refuse a name that is not in the table."""
    known = isinstance(name, str) and name in BACKENDS
    require(known, "backend", f"there is no backend {name!r}{suggestion(str(name), BACKENDS)}")


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
    check_backend(name)
    with one_thread():
        backend = BACKENDS[name](trainer, state, place or Place(workers))
        try:
            yield backend
        finally:
            backend.close()


@contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch computes in one thread meanwhile, so that every backend gives the same bits."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _require_package(package: str, extra: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise MissingExtraError(package, extra)
