"""The whole training loop against a bare PyTorch loop that makes the same gradient steps, and two workers against one.

All three advance by a round in turn, so that they meet the same noise. The bare loop takes batches that lie ready as
normalised floats; ours draws, augments and normalises them, and samples, aggregates, records and checkpoints besides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from torch.nn import functional as F

from benchmarks.common import cifar_like, ratio_line, rounds_of
from exitflow.data.dataset import Dataset
from exitflow.models.layout import best_layout
from exitflow.system.assembly import Assembly, dataset_of
from exitflow.system.system import System, load_system


def resnet() -> None:
    """ResNet-18 of width 16 on 32x32 images, batches of 128, the paper's tree of 7."""
    overrides = ["model.width=16", "training.local_steps=4", "training.rounds=1000", "training.evaluate_every=1000"]
    system = load_system("paper-7-cifar10:80-15-5", [*overrides, "model.strides=[1,2,2,2]"])
    _measure(system, cifar_like(7 * 512), num_rounds=7, loop_goal=0.95)


def digits() -> None:
    """The demo: width 8 on 8x8 images, batches of 32."""
    system = load_system("paper-7:80-15-5", ["training.rounds=1000"])
    _measure(system, dataset_of(system), num_rounds=30, loop_goal=0.85)


def _measure(system: System, dataset: Dataset, *, num_rounds: int, loop_goal: float) -> None:
    assembly = Assembly(system, dataset)
    bare = _bare_rounds(assembly)
    with rounds_of(system, dataset, "serial") as serial, rounds_of(system, dataset, "processes", 2) as processes:
        times: dict[str, list[float]] = {"bare": [], "serial": [], "processes": []}
        for number in range(num_rounds + 1):
            for name, rounds in (("bare", bare), ("serial", serial), ("processes", processes)):
                seconds = _timed(lambda rounds=rounds: next(rounds))  # type: ignore[misc]
                if number:  # the first round warms up
                    times[name].append(seconds)
    pairs = list(zip(times["bare"], times["serial"], times["processes"], strict=True))
    samples = len(system.topology.nodes) * assembly.num_steps * system.training.batch_size
    print(f"serial: {samples / min(times['serial']):,.0f} samples/s at best")
    print(ratio_line("samples/s of the loop over those of bare PyTorch", [b / s for b, s, _ in pairs], loop_goal))
    print(ratio_line("two processes over serial", [s / p for _, s, p in pairs], 1.6))


def _bare_rounds(assembly: Assembly) -> Iterator[None]:
    """What anybody would write: for each node a model, an optimizer, and J steps."""
    spec = assembly.system.training
    networks = {}
    for exit in range(1, assembly.model.num_exits + 1):
        network = assembly.model.submodel(exit).train()
        networks[exit] = network.to(memory_format=best_layout(network))  # type: ignore[call-overload]
    inputs = assembly.dataset.preparation(assembly.dataset.train.tensor).contiguous(memory_format=torch.channels_last)
    labels = assembly.dataset.train.labels
    while True:
        for node in assembly.system.topology.nodes:
            network = networks[node.exit]
            optimizer = torch.optim.SGD(
                network.parameters(), lr=0.1, momentum=spec.optimiser.momentum, weight_decay=spec.optimiser.weight_decay
            )
            size = min(spec.batch_size, assembly.samples[node.name])
            for step in range(assembly.num_steps):
                start = step * size % (len(labels) - size)
                optimizer.zero_grad()
                loss = F.cross_entropy(network(inputs[start : start + size])[0], labels[start : start + size])
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        yield


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
