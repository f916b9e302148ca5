"""Who trains what in a round: the matrix p, and draws from it (lines 2 and 3 of Algorithm 1).

Algorithm 1 draws one exit for each node. With `local_exits = "all"` a node trains every exit up to its own in one
pass instead: all of them have the same p_{i,e}, and the local loss weighs them as the server would. With "each-step"
it holds all of them too, and draws one for every local step, as FjORD does (Horvath et al., 2021).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat

import numpy as np
import numpy.typing as npt

from exitflow.config import require
from exitflow.errors import ConfigError, suggestion
from exitflow.federated.training_spec import TrainingSpec
from exitflow.federated.types import Task
from exitflow.seeds import derive
from exitflow.topology.graph import Node, Topology

FloatArray = npt.NDArray[np.float64]


def probability_matrix(topology: Topology, samples: Mapping[str, float], spec: TrainingSpec) -> FloatArray:
    """(N, E) p_{i,e}, in the order of the nodes. A node without samples trains nothing."""
    if spec.sampling:
        problem = "needs a row for every node"
        for name in spec.sampling:
            if name not in topology.by_name:
                raise ConfigError(f"no such node{suggestion(name, topology.by_name)}", key=f"sampling.{name}")
    matrix = np.zeros((len(topology.nodes), topology.num_exits))
    for row, node in zip(matrix, topology.nodes, strict=True):
        if samples[node.name] > 0:
            if spec.sampling:
                require(node.name in spec.sampling, f"sampling.{node.name}", problem)
            row[: node.exit] = _row(node, spec)
    return matrix


def _row(node: Node, spec: TrainingSpec) -> FloatArray:
    if spec.trains_all_exits:
        return np.full(node.exit, spec.participation)
    return _given_row(node, spec) if spec.sampling else _helping_row(node, spec)


def _helping_row(node: Node, spec: TrainingSpec) -> FloatArray:
    """p_{i,e} = p for e < E_i and 1 - (E_i - 1) p for e = E_i, all times the probability to take part."""
    help_probability = spec.help_probability
    own = 1 - (node.exit - 1) * help_probability
    problem = f"{help_probability} for each of {node.exit - 1} lower exits of node {node.name!r} is more than 1 in all"
    require(own >= 0, "help_probability", problem)
    return spec.participation * np.array([help_probability] * (node.exit - 1) + [own])


def _given_row(node: Node, spec: TrainingSpec) -> FloatArray:
    row = np.array(spec.sampling[node.name])
    valid = len(row) == node.exit and bool((row >= 0).all()) and row.sum() <= 1 + 1e-12
    problem = f"needs {node.exit} probabilities, for exits 1 to {node.exit}, that sum to 1 at most; got {row.tolist()}"
    require(valid, f"sampling.{node.name}", problem)
    return row * spec.participation


def check_every_exit_is_trained(probabilities: FloatArray, num_samples: int | None = None) -> None:
    """Refuse an exit without any data to train on; `num_samples` is how many there are for all nodes, where known."""
    for exit in range(1, probabilities.shape[1] + 1):
        nobody = "no node with data trains it"
        if num_samples is not None:
            nobody = f"of the {num_samples:,} training samples, the nodes that could train it hold none"
        advice = "put a node there, give its layer more data, or set help_probability"
        problem = f"exit {exit} has no data to train on: {nobody}; {advice}"
        require(bool((probabilities[:, exit - 1] > 0).any()), "", problem)


def sample_tasks(
    nodes: Sequence[str],
    probabilities: FloatArray,
    *,
    round: int,
    seed: int,
    joint_weights: FloatArray | None = None,
    as_sum: bool = False,
) -> list[Task]:
    """At most one task for each node. The deepest, which take longest, come first.

    A task has one exit, or, given `joint_weights`, (E,) Lambda-tilde_e / |S_{e,p}|, all exits of its node. The losses
    of these are weighed to sum to 1; `as_sum`, so that equal weights are 1 each.
    """
    if joint_weights is not None and as_sum:
        joint_weights = joint_weights / joint_weights.mean()
    tasks = []
    for node, row in zip(nodes, probabilities, strict=True):
        uniform = derive(seed, "sample", round, node) / 2**63
        exits, weights, probability = (
            _drawn_exit(row, uniform) if joint_weights is None else _all_exits(row, uniform, joint_weights, as_sum)
        )
        if exits:
            tasks.append(Task(round, node, exits, weights, probability, derive(seed, "local", round, node)))
    return sorted(tasks, key=lambda task: -task.deepest)


_Draw = tuple[tuple[int, ...], tuple[float, ...], float]  # exits, loss weights, probability


def _drawn_exit(row: FloatArray, uniform: float) -> _Draw:
    exit = int(np.searchsorted(np.cumsum(row), uniform, side="right")) + 1
    return ((exit,), (1.0,), float(row[exit - 1])) if exit <= len(row) else ((), (), 0.0)


def _all_exits(row: FloatArray, uniform: float, joint_weights: FloatArray, as_sum: bool) -> _Draw:
    """Those whose loss counts at all; where none does, the shallowest.

    The server weighs its update by 0 then, but for `sample-mean` and `node-mean`, which count nodes and no exits.
    """
    counting = np.flatnonzero((row > 0) & (joint_weights > 0))
    if uniform >= row.max(initial=0.0):
        return (), (), 0.0
    if len(counting) == 0:
        return (1,), (1.0,), float(row[0])
    weights = joint_weights[counting]
    shares = weights if as_sum else weights / weights.sum()
    return tuple(int(exit) + 1 for exit in counting), tuple(shares.tolist()), float(row[counting[0]])


def step_exits(task: Task, spec: TrainingSpec, num_steps: int) -> Iterator[tuple[int, ...]]:
    """Which exits of its task a node trains in each of its steps.

    All of them; with "each-step" one that is drawn uniformly, and the deepest too where it is to be learned from.
    """
    if spec.local_exits != "each-step":
        yield from repeat(task.exits, num_steps)
        return
    teacher = {task.deepest} if spec.objective.name != "labels" else set()
    for step in range(num_steps):
        drawn = task.exits[derive(task.seed, "exit", step) % len(task.exits)]
        yield tuple(sorted({drawn} | teacher))
