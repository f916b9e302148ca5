"""Problem P1 by trying everything: every node's fraction on a grid, every request by itself."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

from exitflow.topology.graph import Topology
from tests.oracles.serving import accuracy


def best_accuracy(
    topology: Topology,
    confidence: Callable[[int, int], float],
    correct: Callable[[int, int], bool],
    num_samples: int,
    steps: int,
) -> float:
    """The most accurate of all plans on a tree whose nodes serve k/steps of what they receive and keep all limits."""
    nodes = sorted(topology.nodes, key=lambda node: node.exit)
    choices = [[step / steps for step in range(steps + 1)] if node.parents else [1.0] for node in nodes]
    best = 0.0
    for fractions in product(*choices):
        serve = {node.name: fraction for node, fraction in zip(nodes, fractions, strict=True)}
        received = {node.name: node.arrival_rate for node in nodes}
        allowed = True
        for node in nodes:
            for link in node.parents:
                sent = received[node.name] * (1 - serve[node.name])
                received[link.name] += sent
                allowed &= link.max_transfer_rate is None or sent <= link.max_transfer_rate + 1e-9
        if allowed:
            best = max(best, accuracy(topology, serve, confidence, correct, num_samples)[0])
    return best
