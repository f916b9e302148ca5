"""Line 12 of Algorithm 1 and the `coverage` step, element by element."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from exitflow.federated.types import Update
from exitflow.models.nested import Coverage


def step(
    value: Tensor,
    name: str,
    updates: Sequence[Update],
    coverage: Callable[..., Coverage],
    exit_weights: Sequence[float],
    exit_samples: Sequence[float],
    server_learning_rate: float,
    divide: bool,
) -> Tensor:
    """The new value of one parameter."""
    new = value.clone()
    for index in itertools.product(*(range(size) for size in value.shape)):
        total = 0.0
        for update in updates:
            place = _place(index, coverage(*update.task.exits), name, value)
            for e in update.task.exits:
                if _place(index, coverage(e), name, value) is not None:
                    weight = exit_weights[e - 1] * update.num_samples / exit_samples[e - 1] / update.task.probability
                    total += weight * float(update.delta[name][place])
        if divide:
            covering = sum(
                weight
                for e, weight in enumerate(exit_weights, start=1)
                if _place(index, coverage(e), name, value) is not None
            )
            total = total / covering if covering > 0 else 0.0
        new[index] = value[index] + server_learning_rate * total
    return new


def mean_over_nodes(
    value: Tensor,
    name: str,
    updates: Sequence[Update],
    coverage: Callable[..., Coverage],
    by_samples: bool,
    rate: float,
) -> Tensor:
    """The `sample-mean` and `node-mean` steps: the average of what the nodes that hold an element have made of it."""
    new = value.clone()
    for index in itertools.product(*(range(size) for size in value.shape)):
        weights, values = [], []
        for update in updates:
            place = _place(index, coverage(*update.task.exits), name, value)
            if place is not None:
                weights.append(update.num_samples if by_samples else 1)
                values.append(float(value[index]) + float(update.delta[name][place]))
        if weights:
            mean = sum(weight * each for weight, each in zip(weights, values, strict=True)) / sum(weights)
            new[index] = (1 - rate) * value[index] + rate * mean
    return new


def statistic(
    value: Tensor,
    name: str,
    updates: Sequence[Update],
    coverage: Callable[..., Coverage],
    exit_weights: Sequence[float],
    exit_samples: Sequence[float],
) -> Tensor:
    """The new value of one buffer: a weighted mean over the nodes that trained it, or what it was."""
    weights, values = [], []
    for update in updates:
        for e in update.task.exits:
            if name in coverage(e):
                weights.append(exit_weights[e - 1] * update.num_samples / exit_samples[e - 1] / update.task.probability)
                values.append(update.buffers[name])
    if sum(weights) == 0:
        return value
    return torch.stack([weight * each for weight, each in zip(weights, values, strict=True)]).sum(0) / sum(weights)


def _place(index: tuple[int, ...], covered: Coverage, name: str, value: Tensor) -> tuple[int, ...] | None:
    """Where element `index` of the whole tensor stands in the covered slice; None where it is not covered."""
    if name not in covered:
        return None
    slices = list(covered[name]) + [slice(None)] * (value.ndim - len(covered[name]))
    place = []
    for position, part, size in zip(index, slices, value.shape, strict=True):
        positions = list(range(size))[part]
        if position not in positions:
            return None
        place.append(positions.index(position))
    return tuple(place)
