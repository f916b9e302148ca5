"""What a node does: train one exit on its own data (lines 6 to 9 of Algorithm 1), or measure its gradients.

A trainer holds one small network for each exit and loads the covered slices into it, so training exit e computes,
holds and returns nothing beyond exit e. Convolutions run in the faster memory layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from exitflow.data.dataset import Preparation, Split
from exitflow.federated.compression import Compression
from exitflow.federated.node_state import NodeStates
from exitflow.federated.schedules import Schedule
from exitflow.federated.spec import TrainingSpec
from exitflow.federated.types import ServerState, Task, Update
from exitflow.models.layout import best_layout
from exitflow.models.nested import Coverage, NestedModel
from exitflow.seeds import derive
from exitflow.tensors import all_finite, copy_into, take

VARIANCE_BATCHES = 16  # gradients that a node measures at an exit, at most


@dataclass(frozen=True)
class NodeData:
    """The training samples of every node that this program trains."""

    train: Split
    indices: Mapping[str, Tensor]  # node -> which of `train` it holds
    preparation: Preparation
    augment: bool = True

    def batches(self, node: str, size: int, *, seed: int) -> Iterator[Split]:
        """Raw batches for ever: pass after pass in random order, incomplete batches dropped."""
        generator = torch.Generator().manual_seed(seed)
        held = self.indices[node]
        while True:
            order = held[torch.randperm(len(held), generator=generator)]
            for start in range(0, len(held) - size + 1, size):
                chosen = order[start : start + size]
                inputs = self.train.inputs[chosen]
                if self.augment:
                    inputs = self.preparation.augment(inputs, generator)
                yield Split(inputs, self.train.labels[chosen])


@dataclass(frozen=True)
class LocalTrainer:
    """Trains any exit of `model` on any node of `data`."""

    model: NestedModel
    data: NodeData
    spec: TrainingSpec
    num_steps: int  # J
    schedule: Schedule
    states: NodeStates | None = None  # where momentum stays between rounds; None: it starts from 0 in each
    device: str = "cpu"
    compression: Compression | None = None  # of updates
    residuals: NodeStates | None = None  # where what compression lost waits for the next update

    @cached_property
    def _workplaces(self) -> dict[int, _Workplace]:
        return {}

    def _workplace(self, exit: int) -> _Workplace:
        if exit not in self._workplaces:
            network = self.model.submodel(exit).to(self.device).train()
            self._workplaces[exit] = _Workplace(network, self.model.coverage(exit))
        return self._workplaces[exit]

    def train(self, state: ServerState, task: Task) -> Update:
        """J steps of SGD on the loss of the task's exit."""
        place = self._workplace(task.exit)
        place.load(state)
        optimizer = torch.optim.SGD(
            place.params.values(), lr=1.0, momentum=self.spec.momentum, weight_decay=self.spec.weight_decay
        )
        state_round = None
        if self.states:
            place.restore_momentum(optimizer, self.states.load(task))
            state_round = self.states.round_of(task)
        num_samples = len(self.data.indices[task.node])
        batches = self.data.batches(task.node, min(self.spec.batch_size, num_samples), seed=task.seed)
        total_loss = torch.zeros((), dtype=place.dtype, device=self.device)
        for step in range(self.num_steps):
            optimizer.param_groups[0]["lr"] = self.schedule(task.round, step)
            optimizer.zero_grad()
            loss = self._loss(place, next(batches))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total_loss += loss.detach()
        if self.states and all_finite(momentum := place.momentum(optimizer)):
            self.states.save(task, momentum)
        mean_loss = float(total_loss) / self.num_steps
        delta = self._compressed(task, place.delta(state))
        return Update(
            task, delta, place.buffer_copies(), num_samples, self.num_steps, mean_loss, state_round=state_round
        )

    def _compressed(self, task: Task, delta: dict[str, Tensor]) -> dict[str, Tensor]:
        """What can be sent of the update and of what earlier ones lost; what is lost now waits for the next."""
        if not self.compression or not all_finite(delta):
            return delta
        if self.residuals:
            earlier = self.residuals.load(task)
            delta = {name: tensor + earlier[name] if earlier else tensor for name, tensor in delta.items()}
        rounded = self.compression.rounded(delta)
        if self.residuals:
            self.residuals.save(task, {name: tensor - rounded[name] for name, tensor in delta.items()})
        return rounded

    def gradient_variance(self, state: ServerState, node: str, exit: int) -> float:
        """The mean over all weights of the variance of their gradient from batch to batch (appendix of the paper).

        For batches of `batch_size`; a node with too few samples for two of them measures smaller ones and scales.
        NaN where a node has fewer than two samples.
        """
        num_samples = len(self.data.indices[node])
        size = min(self.spec.batch_size, num_samples // 2)
        if size < 1:
            return math.nan
        place = self._workplace(exit)
        place.load(state)
        batches = self.data.batches(node, size, seed=derive(self.spec.seed, "variance", node, exit))
        params = list(place.params.values())
        count = min(VARIANCE_BATCHES, num_samples // size)
        gradients = (torch.autograd.grad(self._loss(place, next(batches)), params) for _ in range(count))
        return _mean_variance(gradients) * size / self.spec.batch_size

    def _loss(self, place: _Workplace, batch: Split) -> Tensor:
        inputs = self.data.preparation(batch.inputs, dtype=place.dtype, device=self.device)
        if inputs.ndim == 4:
            inputs = inputs.contiguous(memory_format=place.layout)
        return F.cross_entropy(place.network(inputs), batch.labels.to(self.device))


class _Workplace:
    """The network of one exit, into which a task's tensors are loaded."""

    def __init__(self, network: nn.Module, coverage: Coverage) -> None:
        self.layout = best_layout(network)
        self.network = network.to(memory_format=self.layout)  # type: ignore[call-overload]
        self.coverage = coverage
        self.params = dict(network.named_parameters())
        self.buffers = dict(network.named_buffers())
        self.dtype = next(iter(self.params.values())).dtype

    @torch.no_grad()
    def load(self, state: ServerState) -> None:
        """Lines 4 and 6: what the server sent."""
        copy_into(self.params, take(state.params, self.coverage))
        copy_into(self.buffers, take(state.buffers, self.coverage))

    @torch.no_grad()
    def delta(self, state: ServerState) -> dict[str, Tensor]:
        """g = w^(t,J) - w^(t), on the CPU."""
        before = take(state.params, self.coverage)
        after = [param.cpu() for param in self.params.values()]
        names = list(self.params)
        return dict(zip(names, torch._foreach_sub(after, [before[name] for name in names]), strict=True))

    def buffer_copies(self) -> dict[str, Tensor]:
        """The statistics after the last step, on the CPU."""
        return {name: buffer.detach().to("cpu", copy=True) for name, buffer in self.buffers.items()}

    def momentum(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """By name of the parameter; {} where there is no momentum."""
        found = {name: optimizer.state[param].get("momentum_buffer") for name, param in self.params.items()}
        return {name: buffer for name, buffer in found.items() if buffer is not None}

    def restore_momentum(self, optimizer: torch.optim.Optimizer, momentum: Mapping[str, Tensor]) -> None:
        """Begin with the momentum of an earlier round."""
        for name, buffer in momentum.items():
            param = self.params[name]
            optimizer.state[param]["momentum_buffer"] = torch.empty_like(param).copy_(buffer)


def _mean_variance(gradients: Iterator[tuple[Tensor, ...]]) -> float:
    """Pointwise sample variance over the gradients, averaged over all points; in float64, one pass."""
    first = [gradient.double() for gradient in next(gradients)]
    count, deviation, square = 1, [torch.zeros_like(g) for g in first], [torch.zeros_like(g) for g in first]
    for gradient in gradients:
        count += 1
        for index, values in enumerate(gradient):
            from_first = values.double() - first[index]
            deviation[index] += from_first
            square[index] += from_first**2
    pairs = zip(square, deviation, strict=True)
    total = sum(float((squares - sums**2 / count).sum()) for squares, sums in pairs)
    return total / (count - 1) / sum(values.numel() for values in first)
