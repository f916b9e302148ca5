"""An exit's answer, blended with the answer of the exits before it.

On its way to exit e a request passes exits 1 .. e-1, and what they said comes at no cost. Shallow exits learn from the
data of all nodes, deep ones see more of the input: together they know more than either. So

    answer_1 = logits_1,    answer_e = before_e * answer_(e-1) + own_e * logits_e,

with two weights for each exit, which minimise the cross-entropy on validation data: a convex problem. Needs no PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from exitflow.evaluation.outputs import ExitOutputs

FloatArray = npt.NDArray[np.float64]

RIDGE = 1e-3  # holds the weights to a plain mean where validation data are too few, or too easy, to tell
MAX_STEPS = 50  # of Newton's method, which takes about five


@dataclass(frozen=True, slots=True)
class Blend:
    """How an exit makes its answer."""

    before: float  # weight of the answer of the exits before it
    own: float  # weight of its own logits

    def answer(self, before: npt.NDArray[np.float32], own: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """(N, C) logits."""
        result: npt.NDArray[np.float32] = np.float32(self.before) * before + np.float32(self.own) * own
        return result


OWN = Blend(0.0, 1.0)  # of the first exit


def fit_blends(outputs: ExitOutputs) -> tuple[Blend, ...]:
    """For every exit, from what the exits say to validation data by themselves."""
    blends = [OWN]
    answer = outputs.logits[0]
    for own in outputs.logits[1:]:
        blends.append(_fit(answer, own, outputs.labels))
        answer = blends[-1].answer(answer, own)
    return tuple(blends)


def blended(outputs: ExitOutputs, blends: Sequence[Blend]) -> ExitOutputs:
    """The answers of all exits, from what they say by themselves; with no blends, just that."""
    if not blends:
        return outputs
    answers = [outputs.logits[0]]
    for blend, own in zip(blends[1:], outputs.logits[1:], strict=True):
        answers.append(blend.answer(answers[-1], own))
    return ExitOutputs(np.stack(answers), outputs.labels)


def _fit(before: npt.NDArray[np.float32], own: npt.NDArray[np.float32], labels: npt.NDArray[np.int64]) -> Blend:
    """Newton's method with halved steps, from the plain mean."""
    parts = np.stack((before, own)).astype(np.float64)  # (2, N, C)
    if not np.isfinite(parts).all():  # a network that has diverged
        return OWN
    parts -= parts.mean(axis=2, keepdims=True)
    mean = np.array([0.5, 0.5])
    weights = mean
    loss, gradient, curvature = _loss(weights, parts, labels, mean)
    for _ in range(MAX_STEPS):
        step = -np.linalg.solve(curvature, gradient)
        if -gradient @ step < 1e-12:
            break
        while (found := _loss(weights + step, parts, labels, mean))[0] > loss:
            step = step / 2
        weights = weights + step
        loss, gradient, curvature = found
    return Blend(float(weights[0]), float(weights[1]))


def _loss(
    weights: FloatArray, parts: FloatArray, labels: npt.NDArray[np.int64], mean: FloatArray
) -> tuple[float, FloatArray, FloatArray]:
    """Mean cross-entropy with the ridge, its gradient (2,) and its curvature (2, 2)."""
    logits = np.tensordot(weights, parts, axes=1)
    logits -= logits.max(axis=1, keepdims=True)
    powers = np.exp(logits)
    total = powers.sum(axis=1, keepdims=True)
    shares = powers / total
    rows = np.arange(len(labels))
    away = weights - mean
    loss = float((np.log(total[:, 0]) - logits[rows, labels]).mean() + RIDGE / 2 * away @ away)
    expected = np.einsum("nc,knc->kn", shares, parts)
    gradient = (expected - parts[:, rows, labels]).mean(axis=1) + RIDGE * away
    second = np.einsum("nc,jnc,knc->jk", shares, parts, parts) / len(labels)
    curvature = second - expected @ expected.T / len(labels) + RIDGE * np.eye(2)
    return loss, gradient, curvature
