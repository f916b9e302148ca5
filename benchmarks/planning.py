"""How long planning takes for large hierarchies."""

from __future__ import annotations

import time

from exitflow.system.system import decode_system
from exitflow.topology.rates import serving_plan


def main() -> None:
    for num_devices in (100, 1_000, 10_000):
        table = {
            "tiers": [
                {"name": "device", "count": num_devices, "exit": 1, "arrival_rate": 1.0, "max_transfer_rate": 0.2},
                {"name": "edge", "count": num_devices // 10, "exit": 2, "max_transfer_rate": 0.5},
                {"name": "cloud", "count": 1, "exit": 3},
            ]
        }
        started = time.perf_counter()
        system = decode_system(table)
        plan = serving_plan(system.topology)
        seconds = time.perf_counter() - started
        print(f"{len(plan.nodes):>6,} nodes: read, checked and planned in {seconds:.3f} s")
