"""Blended answers, sample by sample, as the text of `exitflow.evaluation.blending` says it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from scipy.optimize import minimize


def answer(logits: Sequence[Sequence[float]], weights: Sequence[tuple[float, float]]) -> list[float]:
    """Of the last exit to one sample; `logits[e]` is what exit e + 1 says by itself, `weights` are (before, own)."""
    found = list(logits[0])
    for (before, own), said in zip(weights[1:], logits[1:], strict=True):
        found = [before * earlier + own * now for earlier, now in zip(found, said, strict=True)]
    return found


def cross_entropy(logits: Sequence[float], label: int) -> float:
    """-log softmax(logits)[label]."""
    highest = max(logits)
    return highest + math.log(sum(math.exp(value - highest) for value in logits)) - logits[label]


def best_weights(
    before: Sequence[Sequence[float]], own: Sequence[Sequence[float]], labels: Sequence[int], ridge: float
) -> tuple[float, float]:
    """(before, own) with the least cross-entropy, held to (1/2, 1/2) by the ridge; by a search without gradients."""

    def loss(weights: Sequence[float]) -> float:
        pairs = [answer([a, b], [(0, 1), (weights[0], weights[1])]) for a, b in zip(before, own, strict=True)]
        total = sum(cross_entropy(logits, label) for logits, label in zip(pairs, labels, strict=True))
        return total + ridge / 2 * sum((weight - 0.5) ** 2 for weight in weights)

    found = minimize(loss, [1.0, 0.0], method="Nelder-Mead", options={"xatol": 1e-7, "fatol": 1e-12, "maxiter": 2000})
    return float(found.x[0]), float(found.x[1])
