"""Algorithm 1 as it stands in the paper: one flat vector of all parameters, loops over everything, no shortcuts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from exitflow.models.nested import NestedModel

Pair = tuple[str, int]


@dataclass
class Inputs:
    """What the algorithm is given; N^(t) and the batches are handed in, so that both versions draw alike."""

    model: NestedModel
    samples: Mapping[str, int]  # |S_i|
    probabilities: Mapping[Pair, float]  # p_{i,e} > 0
    exit_weights: Callable[[int], Sequence[float]]  # t -> Lambda-tilde
    num_rounds: int  # T
    num_steps: int  # J
    learning_rate: Callable[[int, int], float]  # eta^(t,j)
    server_learning_rate: float  # eta_s
    sampled: Callable[[int], Sequence[Pair]]  # t -> N^(t)
    batch: Callable[[int, str, int], tuple[Tensor, Tensor]]  # t, i, j -> B_i
    radius: float | None = None


def run(inputs: Inputs) -> dict[str, Tensor]:
    model = inputs.model
    w = flat({name: param.detach() for name, param in model.named_parameters()})
    for t in range(1, inputs.num_rounds + 1):
        total = torch.zeros_like(w)
        for i, e in inputs.sampled(t):
            w_ie = w.clone()
            for j in range(inputs.num_steps):
                batch_inputs, labels = inputs.batch(t, i, j)
                gradient = torch.zeros_like(w)
                for z in range(len(labels)):
                    gradient += sample_gradient(model, w_ie, e, batch_inputs[z : z + 1], labels[z : z + 1])
                w_ie = w_ie - inputs.learning_rate(t, j) * gradient / len(labels)
            g = w_ie - w
            s_ep = sum(inputs.samples[node] for node, exit in inputs.probabilities if exit == e)
            p_ie = inputs.probabilities[i, e]
            total += inputs.exit_weights(t)[e - 1] * inputs.samples[i] / s_ep * g / p_ie
        w = w + inputs.server_learning_rate * total
        if inputs.radius is not None and float(w.norm()) > inputs.radius:
            w = w * inputs.radius / float(w.norm())
    return _named(model, w)


def sample_gradient(model: NestedModel, w: Tensor, exit: int, sample: Tensor, label: Tensor) -> Tensor:
    """Gradient of l^(e)(w, z) with respect to all of w; zero beyond the exit."""
    w = w.clone().requires_grad_()
    params = _named(model, w)
    logits = functional_call(
        _AtExit(model, exit), {f"model.{name}": value for name, value in params.items()}, (sample,)
    )
    return torch.autograd.grad(F.cross_entropy(logits, label), w)[0]


class _AtExit(torch.nn.Module):
    def __init__(self, model: NestedModel, exit: int) -> None:
        super().__init__()
        self.model = model
        self.exit = exit

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model.classify(self.model.advance(inputs, 0, self.exit), self.exit)


def flat(params: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([param.reshape(-1) for param in params.values()])


def _named(model: NestedModel, w: Tensor) -> dict[str, Tensor]:
    params = dict(model.named_parameters())
    pieces = torch.split(w, [param.numel() for param in params.values()])
    return {name: piece.view(param.shape) for (name, param), piece in zip(params.items(), pieces, strict=True)}
