"""`python -m benchmarks.serving_device BUNDLE EDGE THREADS SECONDS`: a program that asks its own Device.

Figures are printed as JSON. EDGE is where the device's parent listens; "-": nowhere. Without a parent the engine itself
is asked in turn, and told beside it.
"""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from exitflow import Device
from exitflow.serving.bundle.bundle import load_bundle
from exitflow.serving.bundle.engine import Engine

TURN = 0.1  # seconds of each in turn


def _ask(call: Callable[[int], object], threads: int, seconds: float) -> dict[str, Any]:
    """`call` with the numbers of samples, from all threads at once."""
    latencies: list[float] = []
    cpu, began = time.process_time(), time.perf_counter()

    def work() -> None:
        row = 0
        while (started := time.perf_counter()) < began + seconds:
            call(row % 256)
            latencies.append(time.perf_counter() - started)
            row += 1

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    elapsed = time.perf_counter() - began
    return {
        "requests": len(latencies),
        "rate": len(latencies) / elapsed,
        "p50": statistics.median(latencies),
        "cpu": (time.process_time() - cpu) / len(latencies),
    }


def main(path: str, edge: str, threads: int, seconds: float) -> dict[str, Any]:
    bundle = load_bundle(path)
    inputs = bundle.samples().inputs
    leaf = next(node for node in bundle.topology.nodes if node.exit == 1)
    parents = {} if edge == "-" else {leaf.parents[0].name: edge}
    engine = Engine(bundle.segments[:1])
    with Device(path, node=leaf.name, parents=parents, settings=["control=threshold"]) as device:
        _ask(lambda row: device.infer(inputs[row]), threads, 0.1)
        if parents:
            return _ask(lambda row: device.infer(inputs[row]), threads, seconds)
        ours, bare = [], []
        for _ in range(round(seconds / TURN / 2)):
            bare.append(_ask(lambda row: engine.run({0: inputs[row : row + 1]}), threads, TURN))
            ours.append(_ask(lambda row: device.infer(inputs[row]), threads, TURN))
    return {
        f"{what}{key}": statistics.median(found[key] for found in each)
        for what, each in (("", ours), ("engine_", bare))
        for key in ("rate", "p50", "cpu")
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))))
