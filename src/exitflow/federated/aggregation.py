"""The server's step: line 12 of Algorithm 1, folded over the updates as they arrive.

    w <- Proj( w + eta_s * sum over (i,e) of  Lambda-tilde_e |S_i| / (|S_{e,p}| p_{i,e}) * g_{i,e} )

Only the running sum is held, so memory does not grow with the number of nodes. The `coverage` step divides the sum,
element by element, by the total weight of the exits that cover the element: with one local step its stationary
points are those of the paper's step, and deep layers and rare heads learn at full speed. Buffers are no gradients:
they become the weighted mean over the nodes that trained them.

A task may train several exits: its update then counts, at each element, with the weights of those that cover it.

Two steps of the peers know no exits, only nodes: each element becomes the mean over the nodes that returned it, by
their samples (`sample-mean`: FedAvg, McMahan et al., 2017; FjORD, Horvath et al., 2021) or each node alike
(`node-mean`: HeteroFL, Diao et al., 2021; DepthFL, Kim et al., 2023; ScaleFL, Ilhan et al., 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from exitflow.config import require
from exitflow.federated.types import ServerState, Update
from exitflow.models.nested import Coverage
from exitflow.tensors import Slices, Tensors, take


@dataclass(frozen=True)
class Aggregation:
    """What the server's step needs to know in a round."""

    exit_weights: npt.NDArray[np.float64]  # (E,) Lambda-tilde
    exit_samples: npt.NDArray[np.float64]  # (E,) |S_{e,p}|
    coverage: Callable[..., Coverage]  # of any exits
    step: str = "paper"
    server_learning_rate: float = 1.0  # eta_s
    projection_radius: float | None = None
    noise: Callable[[Tensors], None] | None = None  # added to sums, for privacy; then an update's buffers are changes

    def weight(self, update: Update, exit: int) -> float:
        """Lambda-tilde_e |S_i| / (|S_{e,p}| p_{i,e})."""
        share = update.num_samples / self.exit_samples[exit - 1]
        return float(self.exit_weights[exit - 1] * share / update.task.probability)

    @property
    def is_mean(self) -> bool:
        """Whether each element becomes the mean over the nodes that returned it."""
        return self.step in ("sample-mean", "node-mean")

    def shares(self, update: Update) -> Iterator[tuple[float, Coverage]]:
        """With what weight an update counts, and where."""
        exits = update.task.exits
        if self.is_mean:
            yield (float(update.num_samples) if self.step == "sample-mean" else 1.0), self.coverage(*exits)
        else:
            yield from ((self.weight(update, exit), self.coverage(exit)) for exit in exits)


def aggregate(state: ServerState, updates: Iterable[Update], rule: Aggregation) -> ServerState:
    """The global model after one more round."""
    steps = _zeros(state.params)
    statistics, statistics_weight = _zeros(state.buffers), _zeros(state.buffers)
    steps_weight = _zeros(state.params) if rule.is_mean else {}
    for update in updates:
        for weight, covered in rule.shares(update):
            _add(steps, covered, update.delta, weight)
            _add_number(steps_weight, covered, weight)
            _add(statistics, covered, update.buffers, weight)
            _add_number(statistics_weight, covered, weight)
    if rule.noise:
        rule.noise({**steps, **statistics})
    if rule.step == "coverage":
        steps_weight = _covering_weight(steps, rule)
    _divide(steps, steps_weight)
    params = {name: value + rule.server_learning_rate * steps[name] for name, value in state.params.items()}
    if rule.noise:
        _divide(statistics, _covering_weight(statistics, rule))
        buffers = {name: _moved(value, statistics[name]) for name, value in state.buffers.items()}
    else:
        buffers = {
            name: torch.where(statistics_weight[name] > 0, statistics[name] / statistics_weight[name], value)
            for name, value in state.buffers.items()
        }
    return ServerState(state.round + 1, _project(params, rule.projection_radius), buffers)


ServerStep = Callable[[ServerState, Iterable[Update], Aggregation], ServerState]


def own_step(step: ServerStep, name: str) -> ServerStep:
    """A server step of the user's own, refused where what it gives is no state of this model after one more round."""

    def checked(state: ServerState, updates: Iterable[Update], rule: Aggregation) -> ServerState:
        after = step(state, updates, rule)
        shapes = {tensor_name: tensor.shape for tensor_name, tensor in state.tensors.items()}
        valid = isinstance(after, ServerState) and after.round == state.round + 1
        valid = valid and {tensor_name: tensor.shape for tensor_name, tensor in after.tensors.items()} == shapes
        problem = f"{name!r} must give the ServerState of round {state.round + 1}, with the tensors of the one before"
        require(valid, "training.server_step", problem)
        return after

    return checked


def _moved(value: Tensor, change: Tensor) -> Tensor:
    """A variance must not be carried below 0 by noise: what was positive keeps a tenth of itself."""
    return torch.where(value > 0, torch.maximum(value + change, value / 10), value + change)


def _zeros(tensors: Tensors) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def _add(sums: Tensors, covered: Slices, values: Tensors, weight: float) -> None:
    targets = take(sums, covered)
    if targets:
        parts = [_leading(values[name], target.shape) for name, target in targets.items()]
        torch._foreach_add_(list(targets.values()), parts, alpha=weight)


def _leading(value: Tensor, shape: torch.Size) -> Tensor:
    """What an exit covers of a tensor that a deeper exit of the same task has widened."""
    return value if value.shape == shape else value[tuple(slice(size) for size in shape)]


def _add_number(sums: Tensors, covered: Slices, number: float) -> None:
    targets = list(take(sums, covered).values())
    if targets:
        torch._foreach_add_(targets, number)


def _covering_weight(steps: Tensors, rule: Aggregation) -> dict[str, Tensor]:
    """The total weight of the exits that cover each element."""
    covering = _zeros(steps)
    for exit, exit_weight in enumerate(rule.exit_weights, start=1):
        _add_number(covering, rule.coverage(exit), float(exit_weight))
    return covering


def _divide(steps: dict[str, Tensor], weights: Tensors) -> None:
    for name, weight in weights.items():
        steps[name] = torch.where(weight > 0, steps[name] / weight, 0.0)


def _project(params: dict[str, Tensor], radius: float | None) -> dict[str, Tensor]:
    """Onto the ball of `radius` around 0."""
    if radius is None:
        return params
    norm = float(torch.stack([value.double().norm() for value in params.values()]).norm())
    return params if norm <= radius else {name: value * (radius / norm) for name, value in params.items()}
