"""What a node does: train on its own data (lines 6 to 9 of Algorithm 1), or measure its gradients.

A trainer holds one small network for each set of exits and loads the covered slices into it, so training exit e
computes, holds and returns nothing beyond exit e. Convolutions run in the faster memory layout.

A task with several exits is one pass with the weighted sum of their losses. Every element then follows the weighted
mean of the losses that reach it: its gradient is divided by the total weight of the exits that cover it, so that it
moves as fast as in a task of its own. The server counts it with just that weight. The peers' `joint_loss` leaves it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from exitflow.data.dataset import Preparation, Split
from exitflow.federated.feature_cache import FeatureCache
from exitflow.federated.node_state import NodeStates
from exitflow.federated.objectives import Objective, from_labels, make_objective
from exitflow.federated.options.compression import Compression
from exitflow.federated.sampling import step_exits
from exitflow.federated.schedules import Schedule
from exitflow.federated.training_spec import OPTIMISERS, OptimiserSpec, TrainingSpec
from exitflow.federated.types import GradientFigures, ServerState, Task, Update
from exitflow.models.layout import best_layout
from exitflow.models.nested import Coverage, NestedModel
from exitflow.models.tuning import trained_buffers, trained_parameters, training_mode
from exitflow.parts import load_part
from exitflow.seeds import derive
from exitflow.tensors import all_finite, copy_into, take

VARIANCE_BATCHES = 16  # gradients that a node measures at an exit, at most


@dataclass(frozen=True)
class Batch(Split):
    """Samples of a node, with their labels."""

    node: str
    rows: Tensor  # (B,) which of its samples


@dataclass(frozen=True)
class NodeData:
    """The training samples of every node that this program trains."""

    train: Split
    indices: Mapping[str, Tensor]  # node -> which of `train` it holds
    preparation: Preparation
    augment: bool = True

    def batches(self, node: str, size: int, *, seed: int) -> Iterator[Batch]:
        """Raw batches for ever: pass after pass in random order, incomplete batches dropped."""
        generator = torch.Generator().manual_seed(seed)
        held = self.indices[node]
        while True:
            order = torch.randperm(len(held), generator=generator)
            for start in range(0, len(held) - size + 1, size):
                rows = order[start : start + size]
                chosen = held[rows]
                inputs = self._read(chosen, generator)
                if self.augment:
                    inputs = self.preparation.augment(inputs, generator)
                yield Batch(inputs, self.train.labels[chosen], node, rows)

    def _read(self, rows: Tensor, generator: torch.Generator) -> Tensor:
        """Raw inputs; what a data set that reads them now draws for its own transforms follows from the seed."""
        if isinstance(self.train.inputs, Tensor):
            return self.train.inputs[rows]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(torch.randint(2**62, (), generator=generator)))
            return self.train.inputs[rows]


@dataclass(frozen=True)
class LocalTrainer:
    """Trains any exits of `model` on any node of `data`."""

    model: NestedModel
    data: NodeData
    spec: TrainingSpec
    num_steps: int  # J
    schedule: Schedule
    states: NodeStates | None = None  # where momentum stays between rounds; None: it starts from 0 in each
    device: str = "cpu"
    compression: Compression | None = None  # of updates
    residuals: NodeStates | None = None  # where what compression lost waits for the next update
    cache: FeatureCache | None = None  # of what frozen stages give; needs data that are not augmented

    @cached_property
    def _workplaces(self) -> dict[tuple[int, ...], _Workplace]:
        return {}

    def _workplace(self, *exits: int) -> _Workplace:
        if exits not in self._workplaces:
            network = self.model.submodel(*exits).to(self.device)
            training_mode(network)
            coverages = [self.model.coverage(exit) for exit in exits]
            self._workplaces[exits] = _Workplace(network, self.model.coverage(*exits), coverages)
        return self._workplaces[exits]

    def train(self, state: ServerState, task: Task) -> Update:
        """J steps of SGD on the loss of the task's exits."""
        place = self._workplace(*task.exits)
        place.load(state)
        loss_weights = torch.tensor(task.loss_weights, dtype=place.dtype, device=self.device)
        reaching_weights = place.reaching_weights(loss_weights) if self.spec.averages_elements else []
        proximal = self.spec.objective.proximal_weight
        received = [param.detach().clone() for param in place.params.values()] if proximal else []
        objective = make_objective(self.spec, task.round)
        own_optimiser = place.own_optimiser(self.spec.optimiser)
        kept: dict[str, Tensor] = {}
        state_round = None
        if self.states:
            kept = self.states.load(task)
            state_round = self.states.round_of(task)
        momentum = place.matching(kept)
        num_samples = len(self.data.indices[task.node])
        batches = self.data.batches(task.node, min(self.spec.batch_size, num_samples), seed=task.seed)
        total_losses = torch.zeros(2, len(task.exits), dtype=place.dtype, device=self.device)  # sums, and of how many
        for step, exits in enumerate(step_exits(task, self.spec, self.num_steps)):
            losses = self._losses(place, next(batches), exits, objective)
            trained = [task.exits.index(exit) for exit in exits]
            (losses @ loss_weights[trained]).backward()  # type: ignore[no-untyped-call]
            for param, weight in zip(place.params.values(), reaching_weights, strict=False):
                if param.grad is not None:  # a frozen one has none
                    param.grad.div_(weight)
            place.pull_back(received, proximal)
            rate = self.schedule(task.round, step)
            if own_optimiser:
                descend_by(own_optimiser, rate)
            else:
                place.descend(rate, momentum, self.spec.optimiser)
            total_losses[0, trained] += losses.detach()
            total_losses[1, trained] += 1
        if self.states and all_finite(momentum):
            self.states.save(task, {**kept, **momentum})
        means = (total_losses[0] / total_losses[1]).tolist()
        counts = total_losses[1].tolist()
        mean_losses = tuple(mean if count else None for mean, count in zip(means, counts, strict=True))
        delta = self._compressed(task, place.delta(state))
        return Update(
            task, delta, place.buffer_copies(), num_samples, self.num_steps, mean_losses, state_round=state_round
        )

    def _compressed(self, task: Task, delta: dict[str, Tensor]) -> dict[str, Tensor]:
        """What can be sent of the update and of what earlier ones lost; what is lost now waits for the next."""
        if not self.compression or not all_finite(delta):
            return delta
        earlier = self.residuals.load(task) if self.residuals else {}
        delta = {name: tensor + earlier[name] if name in earlier else tensor for name, tensor in delta.items()}
        rounded = self.compression.rounded(delta)
        if self.residuals:
            lost = {name: tensor - rounded[name] for name, tensor in delta.items()}
            self.residuals.save(task, {**earlier, **lost})
        return rounded

    def measure_gradients(self, state: ServerState, node: str, exit: int) -> GradientFigures:
        """How the gradient of the exit's loss varies from batch to batch (appendix of the paper), and how long it is.

        For batches of `batch_size`; a node with too few samples for two of them measures smaller ones and scales, but
        none of one sample, which batch norm cannot do. NaN where a node has fewer than four samples.
        """
        num_samples = len(self.data.indices[node])
        size = min(max(self.spec.batch_size, 2), num_samples // 2)
        if size < 2:
            return GradientFigures(math.nan, math.nan, math.nan, math.nan)
        place = self._workplace(exit)
        place.load(state)
        batches = self.data.batches(node, size, seed=derive(self.spec.seed, "variance", node, exit))
        params = list(place.params.values())
        count = min(VARIANCE_BATCHES, num_samples // size)
        losses = []

        def gradients() -> Iterator[tuple[Tensor, ...]]:
            for _ in range(count):
                loss = self._losses(place, next(batches), (exit,), from_labels).sum()
                losses.append(loss.detach())
                yield torch.autograd.grad(loss, params)

        mean_variance, squared_mean = _moments(gradients())
        num_weights = sum(param.numel() for param in params)
        variance = mean_variance * size / self.spec.batch_size * num_weights
        signal = max(squared_mean - mean_variance * num_weights / count, 0.0)  # ||E gradient||^2 without its noise
        loss = float(torch.stack(losses).mean())
        return GradientFigures(mean_variance * size / self.spec.batch_size, variance, variance + signal, loss)

    def _losses(self, place: _Workplace, batch: Batch, exits: Sequence[int], objective: Objective) -> Tensor:
        """The mean loss of each of `exits`."""
        known = {exit: carry.to(self.device, place.dtype) for exit, carry in self._known(batch, exits).items()}
        logits = self._logits(place, known[min(known)] if known else self._inputs(place, batch), exits, known)
        return torch.stack(objective(logits, batch.labels.to(self.device)))

    def _inputs(self, place: _Workplace, batch: Batch) -> Tensor:
        """The batch as the network takes it."""
        inputs = self.data.preparation(batch.tensor, dtype=place.dtype, device=self.device)
        return inputs.contiguous(memory_format=place.layout) if inputs.ndim == 4 else inputs

    def _logits(
        self, place: _Workplace, inputs: Tensor, exits: Sequence[int], known: Mapping[int, Tensor]
    ) -> list[Tensor]:
        """What the network says; losses are computed from it in the precision of the weights."""
        kept = {"known": known} if known else {}
        in_bfloat16 = self.spec.optimiser.precision == "bfloat16"
        with torch.autocast(torch.device(self.device).type, dtype=torch.bfloat16, enabled=in_bfloat16):
            logits = place.network(inputs, *exits, **kept)
        return [each.to(place.dtype) for each in logits]

    def _known(self, batch: Batch, exits: Sequence[int]) -> dict[int, Tensor]:
        """What is kept of the features of a batch, by exit."""
        if not self.cache:
            return {}
        indices = self.data.indices[batch.node]
        return self.cache.features(batch.node, lambda: self.data.train[indices].tensor, batch.rows, exits)


class _Workplace:
    """The network of some exits, into which a task's tensors are loaded."""

    def __init__(self, network: nn.Module, coverage: Coverage, exit_coverages: Sequence[Coverage]) -> None:
        self.layout = best_layout(network)
        self.network = network.to(memory_format=self.layout)  # type: ignore[call-overload]
        self.coverage = coverage
        self.exit_coverages = exit_coverages
        self.params = trained_parameters(network)
        self.buffers = trained_buffers(network)
        self.dtype = next(iter(self.params.values())).dtype

    @torch.no_grad()
    def load(self, state: ServerState) -> None:
        """Lines 4 and 6: what the server sent."""
        self.network.zero_grad()  # of a task that failed
        copy_into(self.params, take(state.params, self.coverage))
        copy_into(self.buffers, take(state.buffers, self.coverage))

    def reaching_weights(self, loss_weights: Tensor) -> list[Tensor]:
        """For each parameter, the total weight of the exits that cover each of its elements; [] where it is 1."""
        if len(self.exit_coverages) == 1:
            return []
        totals = {name: torch.zeros_like(param) for name, param in self.params.items()}
        for covered, weight in zip(self.exit_coverages, loss_weights, strict=True):
            for part in take(totals, covered).values():
                part += weight
        return list(totals.values())

    @torch.no_grad()
    def pull_back(self, received: Sequence[Tensor], weight: float) -> None:
        """Add the gradient of FedProx's term, weight / 2 ||w - received||^2 (Li et al., 2020), to what was trained."""
        for param, start in zip(self.params.values(), received, strict=False):
            if param.grad is not None:
                param.grad.add_(param - start, alpha=weight)

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

    def matching(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of those that parameters have the names of, each with the device and the layout of its parameter."""
        params = {name: param for name, param in self.params.items() if name in tensors}
        return {name: torch.empty_like(param).copy_(tensors[name]) for name, param in params.items()}

    def own_optimiser(self, spec: OptimiserSpec) -> torch.optim.Optimizer | None:
        """The user's own, for the parameters that are trained; None where the steps are SGD's."""
        if spec.name in OPTIMISERS:
            return None
        trained = [param for param in self.params.values() if param.requires_grad]
        optimiser: torch.optim.Optimizer = load_part(spec.name, key="training.optimiser.name")(trained, spec)
        return optimiser

    @torch.no_grad()
    def descend(self, learning_rate: float, momentum: dict[str, Tensor], spec: OptimiserSpec) -> None:
        """A step of SGD, which uses up the gradients and keeps `momentum` up to date.

        To the bit as `torch.optim.SGD`, which would take seconds to load PyTorch's compiler into every process.
        """
        trained = {name: param for name, param in self.params.items() if param.grad is not None}
        params: list[Tensor] = list(trained.values())
        steps: list[Tensor] | tuple[Tensor, ...] = [param.grad for param in params if param.grad is not None]
        if spec.weight_decay:
            steps = torch._foreach_add(steps, params, alpha=spec.weight_decay)
        if spec.momentum:
            for name, param in trained.items():
                if name not in momentum:
                    momentum[name] = torch.zeros_like(param)
            kept = [momentum[name] for name in trained]
            torch._foreach_mul_(kept, spec.momentum)
            torch._foreach_add_(kept, steps)
            steps = kept
        torch._foreach_add_(params, steps, alpha=-learning_rate)
        for done in params:
            done.grad = None


def descend_by(optimiser: torch.optim.Optimizer, learning_rate: float) -> None:
    """A step of the user's own optimiser, which uses up the gradients."""
    for group in optimiser.param_groups:
        group["lr"] = learning_rate
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)


def _moments(gradients: Iterator[tuple[Tensor, ...]]) -> tuple[float, float]:
    """(pointwise sample variance over the gradients, averaged over all points; squared norm of their mean).

    In float64, one pass.
    """
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
    squared_mean = sum(float((f + d / count).square().sum()) for f, d in zip(first, deviation, strict=True))
    return max(total, 0.0) / (count - 1) / sum(values.numel() for values in first), squared_mean
