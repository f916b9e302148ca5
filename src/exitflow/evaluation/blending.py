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

RIDGE = 5.0  # samples' worth: holds the weights to a plain mean where validation data are too few, or too easy, to tell
MAX_STEPS = 50  # of Newton's method, which takes about five
MAX_HALVINGS = 40  # of a step


@dataclass(frozen=True, slots=True)
class Blend:
    """How an exit makes its answer."""

    before: float  # weight of the answer of the exits before it
    own: float  # weight of its own logits

    def answer(self, before: npt.NDArray[np.float32], own: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """(N, C) logits; whoever asks deals with those that are no numbers."""
        with np.errstate(over="ignore", invalid="ignore"):
            result: npt.NDArray[np.float32] = np.float32(self.own) * own
            return result + np.float32(self.before) * before if self.before else result


OWN = Blend(0.0, 1.0)  # of the first exit
MEAN = np.array([0.5, 0.5])


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
    weights = MEAN
    loss, gradient, curvature = _loss(weights, parts, labels)
    for _ in range(MAX_STEPS):
        step = -np.linalg.lstsq(curvature, gradient, rcond=None)[0]
        if -gradient @ step < 1e-12:
            break
        for _ in range(MAX_HALVINGS):
            found = _loss(weights + step, parts, labels)
            if found[0] <= loss:
                break
            step = step / 2
        else:
            break
        weights = weights + step
        loss, gradient, curvature = found
    return Blend(float(weights[0]), float(weights[1]))


def _loss(
    weights: FloatArray, parts: FloatArray, labels: npt.NDArray[np.int64]
) -> tuple[float, FloatArray, FloatArray]:
    """Mean cross-entropy with the ridge, its gradient (2,) and its curvature (2, 2)."""
    logits = np.tensordot(weights, parts, axes=1)
    logits -= logits.max(axis=1, keepdims=True)
    powers = np.exp(logits)
    total = powers.sum(axis=1, keepdims=True)
    shares = powers / total
    rows, count = np.arange(len(labels)), len(labels)
    away = weights - MEAN
    loss = float((np.log(total[:, 0]) - logits[rows, labels]).mean() + RIDGE / count / 2 * away @ away)
    expected = np.einsum("nc,knc->kn", shares, parts)
    gradient = (expected - parts[:, rows, labels]).mean(axis=1) + RIDGE / count * away
    around = parts - expected[:, :, None]  # centred first: large logits would cancel
    curvature = (np.einsum("nc,jnc,knc->jk", shares, around, around) + RIDGE * np.eye(2)) / count
    return loss, gradient, curvature
