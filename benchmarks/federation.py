"""What a real federation costs over a pool of processes, in time, bytes and memory; and Ray with 1,000 nodes.

All backends advance by a round in turn, so that they meet the same noise. Everything runs on this machine: seven
nodes of a federation share its cores, which on machines of their own they would not.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.common import cifar_like, rounds_of
from benchmarks.scale import MANY, NUM_TRAIN
from exitflow.data.dataset import Dataset
from exitflow.federated.types import ServerState
from exitflow.flower.backend import FlowerBackend
from exitflow.flower.loopback import LocalFederation
from exitflow.runs.runs import Run
from exitflow.runs.training import Training
from exitflow.system.assembly import Assembly, dataset_of
from exitflow.system.system import System, decode_system, load_system
from exitflow.tensors import num_bytes, take

TINY = ["model.width=2", "model.blocks=[1,1,1]", "model.strides=[1,2,2]", "model.exit_blocks=[1,2,3]"]
OFTEN = ["training.rounds=1000", "training.evaluate_every=1000"]


def tiny() -> None:
    """Seven nodes, a network that trains in milliseconds: what Flower itself takes."""
    overrides = [*TINY, *OFTEN, "training.local_steps=2", "training.batch_size=8"]
    system = load_system("paper-7:80-15-5", overrides)
    flower, processes, _ = _compare(system, dataset_of(system), num_rounds=8)
    print(f"flower, 7 nodes, tiny model: {_spread(flower)} s a round (goal: at most 10)")
    print(f"processes, the same: {_spread(processes)} s a round")


def realistic() -> None:
    """ResNet-18 of width 16 on 32x32 images, batches of 128, as in the benchmark of training."""
    overrides = [*OFTEN, "model.width=16", "training.local_steps=4", "model.strides=[1,2,2,2]"]
    system = load_system("paper-7-cifar10:80-15-5", overrides)
    flower, processes, wire = _compare(system, cifar_like(7 * 512), num_rounds=5)
    print(f"flower, 7 nodes, ResNet of width 16: {_spread(flower)} s a round; processes: {_spread(processes)} s")
    beyond = [f - 1.3 * p for f, p in zip(flower, processes, strict=True)]
    print(f"flower beyond 1.3 times processes: {_spread(beyond)} s a round (goal: at most 10)")
    print(f"bytes of messages over covered bytes: {wire:.4f} (goal: at most 1.1)")


def ray() -> None:
    """A simulation of 1,000 nodes, two workers each."""
    training = {"rounds": 10_000, "local_steps": 2, "batch_size": 8, "evaluate_every": 10_000}
    tier = {"name": "node", "count": MANY, "exit": 1, "arrival_rate": 1.0}
    model = {"blocks": [1, 1, 1], "strides": [1, 2, 2]}
    system = decode_system({"tiers": [tier], "model": model, "training": training})
    dataset = cifar_like(NUM_TRAIN)
    times: dict[str, list[float]] = {"processes": [], "ray": []}
    with rounds_of(system, dataset, "processes", 2) as pool, rounds_of(system, dataset, "ray", 2) as cluster:
        for number in range(3):
            for name, rounds in (("processes", pool), ("ray", cluster)):
                seconds = _timed_round(rounds)
                if number:
                    times[name].append(seconds)
    ratios = [r / p for r, p in zip(times["ray"], times["processes"], strict=True)]
    print(f"ray, {MANY:,} nodes: {_spread(times['ray'])} s a round; over processes: {_spread(ratios)}")


def _compare(system: System, dataset: Dataset, *, num_rounds: int) -> tuple[list[float], list[float], float]:
    """(seconds a round of flower, of processes, bytes of messages over covered bytes)."""
    flower: list[float] = []
    processes: list[float] = []
    with rounds_of(system, dataset, "processes", 2) as pool, _flower(system, dataset) as (rounds, run, federation):
        for number in range(num_rounds + 1):
            pair = _timed_round(pool), _timed_round(rounds)
            if number:  # the first round warms up
                processes.append(pair[0])
                flower.append(pair[1])
        print(f"memory of a node (proportional set size): {_node_megabytes(federation):,.0f} MB")
        return flower, processes, _wire_ratio(system, dataset, run)


@contextmanager
def _flower(system: System, dataset: Dataset) -> Iterator[tuple[Iterator[ServerState], Run, LocalFederation]]:
    assembly = Assembly(system, dataset)
    with tempfile.TemporaryDirectory() as folder:
        run = Run.create(Path(folder) / "run", system.to_toml())
        trainer = assembly.trainer(run.states_folder)
        started = time.perf_counter()
        federation = LocalFederation(list(assembly.samples), lambda header: trainer)
        print(f"starting the federation: {time.perf_counter() - started:.1f} s")
        try:
            backend = FlowerBackend(
                federation.courier, federation.stations, assembly.model.coverage, "benchmark", assembly.samples
            )
            yield Training(assembly, run).rounds(assembly.initial_state(), backend), run, federation
        finally:
            federation.close()


def _wire_ratio(system: System, dataset: Dataset, run: Run) -> float:
    """Of a round in which every node trains its own exit, both directions."""
    assembly = Assembly(system, dataset)
    state, wire = assembly.initial_state(), run.last_record.wire_bytes
    covered = {
        node.name: 2 * num_bytes(take(state.tensors, assembly.model.coverage(node.exit)))
        for node in system.topology.nodes
    }
    sent = sum(figures.down + figures.up for figures in wire.values())
    return float(sent / sum(covered[node] for node in wire))


def _node_megabytes(federation: LocalFederation) -> float:
    """Of everything that runs for node device-0: SuperNode, SuperExec and worker."""
    programs = federation.programs
    preloaded = programs.preloaded_pid
    children = [int(pid) for pid in Path(f"/proc/{preloaded}/task/{preloaded}/children").read_text().split()]
    superexecs = [pid for pid in children if pid not in programs.pids]  # of all nodes; they are alike
    pids = [programs["node-device-0"].pid, federation.worker_pid("device-0"), superexecs[0]]
    return sum(_proportional_kilobytes(pid) for pid in pids) / 1024


def _proportional_kilobytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def _timed_round(rounds: Iterator[ServerState]) -> float:
    started = time.perf_counter()
    next(rounds)
    return time.perf_counter() - started


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
