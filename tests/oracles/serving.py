"""The paper's evaluation, request by request: lists of test images that are ranked, served and passed on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from exitflow.topology.graph import Topology


def accuracy(
    topology: Topology,
    serve_fraction: Mapping[str, float],
    confidence: Callable[[int, int], float],
    correct: Callable[[int, int], bool],
    num_samples: int,
) -> tuple[float, dict[str, float]]:
    """(of the system, of each node). Every leaf offers the whole test set; a tree, where all requests arrive at leaves.

    `confidence` and `correct` take an exit and a sample.
    """
    parents = {node.name: node.parents[0].name for node in topology.nodes if node.parents}
    inbox: dict[str, list[int]] = {node.name: [] for node in topology.nodes}
    for node in topology.nodes:
        if node.name not in parents.values():
            inbox[node.name] = list(range(num_samples))
    right: dict[str, Sequence[bool]] = {}
    for node in sorted(topology.nodes, key=lambda node: node.exit):
        ranked = sorted(inbox[node.name], key=lambda sample: -confidence(node.exit, sample))
        count = round(serve_fraction[node.name] * len(ranked))
        right[node.name] = [correct(node.exit, sample) for sample in ranked[:count]]
        if node.name in parents:
            inbox[parents[node.name]] += ranked[count:]
    answers = [answer for each in right.values() for answer in each]
    return sum(answers) / len(answers), {name: sum(each) / len(each) for name, each in right.items() if each}
