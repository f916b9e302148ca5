"""Data and runs for the benchmarks."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from exitflow.data.dataset import Dataset, Preparation, Split
from exitflow.federated.types import ServerState
from exitflow.runs.backends import open_backend
from exitflow.runs.runs import Run
from exitflow.runs.training import Training
from exitflow.system.assembly import Assembly
from exitflow.system.system import System


def cifar_like(num_train: int) -> Dataset:
    """Random images of CIFAR's shape, with its augmentation."""
    generator = torch.Generator().manual_seed(0)

    def split(count: int) -> Split:
        inputs = torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
        return Split(inputs, torch.randint(10, (count,), generator=generator))

    preparation = Preparation((125.0,) * 3, (62.0,) * 3, crop_padding=4, flip=True)
    return Dataset("random", split(num_train), split(100), split(100), 10, preparation)


@contextmanager
def rounds_of(
    system: System, dataset: Dataset, backend: str, workers: int | None = None
) -> Iterator[Iterator[ServerState]]:
    """The whole training loop, round by round: sampling, training, aggregation, record and checkpoint on disk."""
    assembly = Assembly(system, dataset)
    with tempfile.TemporaryDirectory() as folder:
        run = Run.create(Path(folder) / "run", system.to_toml())
        state = assembly.initial_state()
        with open_backend(backend, assembly.trainer(run.states_folder), state, workers=workers) as opened:
            yield Training(assembly, run).rounds(state, opened)


def ratio_line(what: str, ratios: list[float], goal: float) -> str:
    """Median of the ratios of single rounds, with their range."""
    median = statistics.median(ratios)
    return f"{what}: {median:.3f} (rounds from {min(ratios):.3f} to {max(ratios):.3f}; goal: at least {goal})"
