"""Requests through queues one by one: first come, first served, at every node and on every wire."""

from __future__ import annotations

import heapq

import numpy as np

from exitflow.topology.graph import Topology
from exitflow.topology.rates import serving_plan


def serve(arrivals: list[float], service: float, servers: int) -> list[float]:
    """When each request is done."""
    free = [0.0] * servers
    done = []
    for time in arrivals:
        start = max(time, heapq.heappop(free))
        heapq.heappush(free, start + service)
        done.append(start + service)
    return done


def latencies(topology: Topology, seconds: float, seed: int) -> dict[int, list[float]]:
    """Milliseconds until each answer is back, by the exit that gave it; whether a request goes up is thrown by dice."""
    rng = np.random.default_rng(seed)
    plan = serving_plan(topology)
    inbox: dict[str, list[tuple[float, float]]] = {node.name: [] for node in topology.nodes}  # time, time of birth
    for node in topology.nodes:
        births = np.sort(rng.uniform(0, 1e3 * seconds, rng.poisson(node.arrival_rate * seconds)))
        inbox[node.name] = [(time, time) for time in births]
    answers: dict[int, list[float]] = {}
    for node in topology.children_first:
        rates = plan.nodes[node.name]
        inbox[node.name].sort()
        done = serve([time for time, _ in inbox[node.name]], node.service_ms or 0.0, node.cores or 1)
        outbox: dict[str, list[tuple[float, float]]] = {link.name: [] for link in node.parents}
        for time, (_, birth) in zip(done, inbox[node.name], strict=True):
            if rng.random() < rates.serve_fraction:
                answers.setdefault(node.exit, []).append(time - birth)
            else:
                parents = list(rates.parents)
                shares = np.array([rates.parents[parent] for parent in parents]) / rates.transfer_rate
                outbox[str(rng.choice(parents, p=shares))].append((time, birth))
        for link in node.parents:
            wire = 0.0 if link.bandwidth_mbps is None else link.request_bytes * 8 / link.bandwidth_mbps / 1e3
            outbox[link.name].sort()
            sent = serve([time for time, _ in outbox[link.name]], wire, 1)
            births = [birth for _, birth in outbox[link.name]]
            # the way back takes its half of the round trip too; the birth is not moved, so it may be added at once
            inbox[link.name] += [
                (time + (link.round_trip_ms or 0.0), birth) for time, birth in zip(sent, births, strict=True)
            ]
    return answers
