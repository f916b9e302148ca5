"""From 7 nodes to 1,000: the server's memory must not grow, and a task must not take longer.

All nodes stand at the one exit of the same network, so that all tasks are alike.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time

from benchmarks.common import cifar_like, rounds_of
from exitflow.system.system import System, decode_system

FEW, MANY = 7, 1000
NUM_TRAIN = 16_000


def main() -> None:
    few, many = (_peak_megabytes(num_nodes) for num_nodes in (FEW, MANY))
    print(f"the server's peak memory: {few:,.0f} MB with {FEW} nodes, {many:,.0f} MB with {MANY:,}")
    print(f"memory, {MANY:,} nodes over {FEW}: {many / few:.3f} (goal: at most 1.2)")
    _print_time_per_task()


def _system(num_nodes: int) -> System:
    training = {"rounds": 10_000, "local_steps": 2, "batch_size": 8, "evaluate_every": 10_000}
    tier = {"name": "node", "count": num_nodes, "exit": 1, "arrival_rate": 1.0}
    return decode_system({"tiers": [tier], "model": {"blocks": [1, 1, 1], "strides": [1, 2, 2]}, "training": training})


def _peak_megabytes(num_nodes: int) -> float:
    """In a process of its own."""
    program = f"from benchmarks import scale; scale.print_peak_memory({num_nodes})"
    return float(subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE).stdout)


def print_peak_memory(num_nodes: int) -> None:
    """Of this process, after two rounds with two workers."""
    with rounds_of(_system(num_nodes), cifar_like(NUM_TRAIN), "processes", 2) as rounds:
        for _ in range(2):
            next(rounds)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def _print_time_per_task() -> None:
    """One round of many nodes, then as many rounds of few as make the same number of tasks, in turn."""
    dataset, ratios = cifar_like(NUM_TRAIN), []
    with rounds_of(_system(FEW), dataset, "serial") as few, rounds_of(_system(MANY), dataset, "serial") as many:
        next(few), next(many)
        for _ in range(7):
            started = time.perf_counter()
            next(many)
            between = time.perf_counter()
            num_rounds = MANY // FEW
            for _ in range(num_rounds):
                next(few)
            ended = time.perf_counter()
            ratios.append((between - started) / MANY / ((ended - between) / (num_rounds * FEW)))
    spread = f"rounds from {min(ratios):.3f} to {max(ratios):.3f}"
    print(f"seconds a task, {MANY:,} nodes over {FEW}: {statistics.median(ratios):.3f} ({spread})")
