"""The whole training loop against a bare PyTorch loop that makes the same gradient steps, and two workers against one.

All advance by a round in turn, so that they meet the same noise. The bare loop takes batches that lie ready as
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
from exitflow.system.system import load_system

BFLOAT16 = "training.optimiser.precision=bfloat16"


def resnet() -> None:
    """ResNet-18 of width 16 on 32x32 images, batches of 128, the paper's tree of 7."""
    overrides = ["model.width=16", "training.local_steps=4", "training.rounds=1000", "training.evaluate_every=1000"]
    source, overrides = "paper-7-cifar10:80-15-5", [*overrides, "model.strides=[1,2,2,2]"]
    _measure(source, overrides, cifar_like(7 * 512), num_rounds=7, goals=(0.95, 1.25))


def short_rounds() -> None:
    """The small scale: three steps of 32 images, and momentum that every node keeps on disk between rounds."""
    overrides = ["model.width=16", "model.stem_stride=2", "model.strides=[1,2,2,2]", "training.local_steps=3"]
    overrides += ["training.batch_size=32", "training.optimiser.momentum_between_rounds=keep", "training.rounds=1000"]
    source, overrides = "paper-7-cifar10:80-15-5", [*overrides, "training.evaluate_every=1000"]
    _measure(source, overrides, cifar_like(7 * 512), num_rounds=20, goals=(0.85, 0.95))


def digits() -> None:
    """The demo: width 8 on 8x8 images, batches of 32."""
    source, overrides = "paper-7:80-15-5", ["training.rounds=1000"]
    dataset = dataset_of(load_system(source))
    _measure(source, overrides, dataset, num_rounds=30, goals=(0.85, 0.7))


def _measure(
    source: str, overrides: list[str], dataset: Dataset, *, num_rounds: int, goals: tuple[float, float]
) -> None:
    system, faster = load_system(source, overrides), load_system(source, [*overrides, BFLOAT16])
    assembly = Assembly(system, dataset)
    with (
        rounds_of(system, dataset, "serial") as serial,
        rounds_of(faster, dataset, "serial") as bfloat16,
        rounds_of(system, dataset, "processes", 2) as processes,
    ):
        turns: dict[str, Iterator[object]] = {"bare": _bare_rounds(assembly), "serial": serial}
        turns |= {"bfloat16": bfloat16, "processes": processes}
        times: dict[str, list[float]] = {name: [] for name in turns}
        busy: dict[str, list[float]] = {name: [] for name in turns}
        for number in range(num_rounds + 1):
            for name, rounds in turns.items():
                seconds, computing = _timed(lambda rounds=rounds: next(rounds))  # type: ignore[misc]
                if number:  # the first round warms up
                    times[name].append(seconds)
                    busy[name].append(computing)

    def ratios(one: str, other: str, measured: dict[str, list[float]] = times) -> list[float]:
        return [before / after for before, after in zip(measured[one], measured[other], strict=True)]

    samples = len(system.topology.nodes) * assembly.num_steps * system.training.batch_size
    print(f"serial: {samples / min(times['serial']):,.0f} samples/s at best")
    print(ratio_line("samples/s of the loop over those of bare PyTorch", ratios("bare", "serial"), goals[0]))
    print(ratio_line("the same in bfloat16, over bare PyTorch in float32", ratios("bare", "bfloat16"), goals[1]))
    print(
        ratio_line(
            "the loop, by processor time, which nobody else's work is in", ratios("bare", "serial", busy), goals[0]
        )
    )
    print(ratio_line("bfloat16, by processor time", ratios("bare", "bfloat16", busy), goals[1]))
    print(ratio_line("two processes over serial", ratios("serial", "processes"), 1.6))


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


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    """(seconds, seconds of this thread on a processor)."""
    started, computing = time.perf_counter(), time.thread_time()
    work()
    return time.perf_counter() - started, time.thread_time() - computing
