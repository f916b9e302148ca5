"""The peers' losses, sample by sample and class by class, and a node's plain SGD on any loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.func import functional_call

from exitflow.models.nested import NestedModel

Logits = Callable[[Tensor, int], Tensor]  # inputs, exit


def softmax(logits: Tensor, temperature: float = 1.0) -> list[Tensor]:
    exponentials = [torch.exp(logit / temperature) for logit in logits]
    return [value / sum(exponentials) for value in exponentials]


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return sum(-torch.log(softmax(row)[int(label)]) for row, label in zip(logits, labels, strict=True)) / len(labels)


def divergence(teacher: Tensor, student: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(teacher || student), mean over the batch; the teacher is a constant."""
    total = 0.0
    for taught, learned in zip(teacher.detach(), student, strict=True):
        for p, q in zip(softmax(taught, temperature), softmax(learned, temperature), strict=True):
            total = total + p * (torch.log(p) - torch.log(q))
    return total / len(student)


def branchynet(logits: Sequence[Tensor], labels: Tensor, weights: Sequence[float]) -> Tensor:
    """Teerapittayanon et al., 2016: sum of w_n L(y_n, y)."""
    return sum(weight * cross_entropy(each, labels) for weight, each in zip(weights, logits, strict=True))


def depthfl(logits: Sequence[Tensor], labels: Tensor, weight: float) -> Tensor:
    """Kim et al., 2023: the cross-entropies, and each exit with each other, over their number less one."""
    total = branchynet(logits, labels, [1.0] * len(logits))
    for i in range(len(logits)):
        for j in range(len(logits)):
            if i != j:
                total = total + weight * divergence(logits[j], logits[i]) / (len(logits) - 1)
    return total


def scalefl(logits: Sequence[Tensor], labels: Tensor, gamma: float, temperature: float) -> Tensor:
    """Ilhan et al., 2023: exit j counts j; all but the last also learn from it; over the sum of the counts."""
    total, count = 0.0, len(logits)
    for j in range(1, count + 1):
        loss = cross_entropy(logits[j - 1], labels)
        if j < count:
            loss = loss + gamma * temperature**2 * divergence(logits[-1], logits[j - 1], temperature)
        total = total + j * loss
    return total / (count * (count + 1) / 2)


def fjord(widest: Tensor, drawn: Tensor, labels: Tensor) -> Tensor:
    """Horvath et al., 2021, alpha = T = 1: labels for the widest, and its answer for the drawn one."""
    return cross_entropy(widest, labels) + divergence(widest, drawn)


def ramp(round: int, length: float) -> float:
    """DepthFL's consistency weight."""
    return math.exp(-5.0 * (1.0 - min((round - 1) / length, 1.0)) ** 2)


def local_sgd(
    model: NestedModel,
    start: Mapping[str, Tensor],
    losses: Sequence[Callable[[Logits], Tensor]],
    rate: float,
    proximal_weight: float = 0.0,
) -> dict[str, Tensor]:
    """One step down each of `losses`, which are given a function from (inputs, exit) to logits. All of w, no slices."""
    w = {name: value.clone() for name, value in start.items()}
    for loss in losses:
        w = {name: value.detach().requires_grad_() for name, value in w.items()}

        def logits(inputs: Tensor, exit: int, w: dict[str, Tensor] = w) -> Tensor:
            named = {f"model.{name}": value for name, value in w.items()}
            return functional_call(_AtExit(model, exit), named, (inputs,))

        distance = sum(((w[name] - start[name]) ** 2).sum() for name in w)
        total = loss(logits) + proximal_weight / 2 * distance
        gradients = torch.autograd.grad(total, list(w.values()))
        w = {name: value.detach() - rate * g for (name, value), g in zip(w.items(), gradients, strict=True)}
    return w


class _AtExit(torch.nn.Module):
    def __init__(self, model: NestedModel, exit: int) -> None:
        super().__init__()
        self.model, self.exit = model, exit

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model.classify(self.model.advance(inputs, 0, self.exit), self.exit)
