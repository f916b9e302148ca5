"""Serve or forward: how sure an exit is of an answer, and who answers what.

Shared by the evaluation and by the serving nodes, so that what is predicted is what is done. Needs no PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from exitflow.config import require
from exitflow.parts import check_part, load_part

FloatArray = npt.NDArray[np.float64]
GAIN = "gain"  # ranks by the gain that is expected of a deeper answer
NUM_FEATURES = 5  # of `gain_features`
ConfidenceKind = Literal["entropy", "max-softmax", "margin"]


def confidence(logits: npt.ArrayLike, kind: str = "entropy", gain: Sequence[float] = ()) -> FloatArray:
    """(N,) from (N, C) logits; higher is surer.

    `kind` is one of CONFIDENCES, the user's own `module:function`, or "gain", which needs the weights of `gain`.
    """
    if kind == GAIN:
        return expected_gain(np.asarray(logits, dtype=np.float64), gain)
    return confidence_function(kind)(np.asarray(logits, dtype=np.float64))


def confidence_function(kind: str) -> Callable[[FloatArray], FloatArray]:
    """By name."""
    check_part("confidence", kind, CONFIDENCES, "confidence")
    return CONFIDENCES[kind] if kind in CONFIDENCES else load_part(kind, key="confidence")


def _negative_entropy(logits: FloatArray) -> FloatArray:
    """1 - H(softmax) / log C: 1 for a certain answer, 0 for a uniform one."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    powers = np.exp(shifted)
    total = powers.sum(axis=1)
    entropy = np.log(total) - np.einsum("nc,nc->n", powers, shifted) / total
    result: FloatArray = 1 - entropy / math.log(logits.shape[1])
    return result


def _max_softmax(logits: FloatArray) -> FloatArray:
    """The probability of the answer."""
    result: FloatArray = np.exp(logits.max(axis=1) - _log_sum_exp(logits)[:, 0])
    return result


def _margin(logits: FloatArray) -> FloatArray:
    """The best logit over the second; never saturates, so there are no ties among the very sure."""
    top = np.partition(logits, -2, axis=1)
    result: FloatArray = top[:, -1] - top[:, -2]
    return result


def _log_sum_exp(logits: FloatArray) -> FloatArray:
    highest = logits.max(axis=1, keepdims=True)
    result: FloatArray = highest + np.log(np.exp(logits - highest).sum(axis=1, keepdims=True))
    return result


def gain_features(logits: FloatArray) -> FloatArray:
    """(N, 5) what tells whether a deeper answer would be better: three confidences, the energy, and a constant."""
    margin = _margin(logits)
    columns = (_negative_entropy(logits), _max_softmax(logits), margin / (1 + margin), _log_sum_exp(logits)[:, 0])
    return np.stack([*columns, np.ones(len(logits))], axis=1)


def expected_gain(logits: FloatArray, weights: Sequence[float]) -> FloatArray:
    """(N,) from 0, where a deeper answer surely gains, to 1, where it surely loses.

    It is (1 + P(right) - P(deeper right)) / 2. Both probabilities are logistic in `gain_features`, and half of the
    `weights` belongs to each.
    """
    problem = f"needs {2 * NUM_FEATURES} weights, fitted on validation data, got {len(weights)}"
    require(len(weights) == 2 * NUM_FEATURES, "confidence", f"{GAIN!r} {problem}")
    scores = gain_features(logits) @ np.asarray(weights, dtype=np.float64).reshape(2, NUM_FEATURES).T
    own, deeper = (np.tanh(scores / 2).T + 1) / 2
    result: FloatArray = (1 + own - deeper) / 2
    return result


CONFIDENCES: dict[str, Callable[[FloatArray], FloatArray]] = {
    "entropy": _negative_entropy,
    "max-softmax": _max_softmax,
    "margin": _margin,
}


RANKINGS = (*CONFIDENCES, GAIN)  # what a user may choose from


def serves(values: FloatArray, threshold: float) -> npt.NDArray[np.bool_]:
    """(N,) whether a node with this threshold answers; it forwards the others."""
    return values >= threshold


def surest_first(values: FloatArray) -> npt.NDArray[np.intp]:
    """The order in which a node serves; among equals, the sample that stands first."""
    return np.argsort(-values, kind="stable")


def served_rates(received: FloatArray, order: npt.NDArray[np.intp], serve_rate: float) -> FloatArray:
    """(N,) requests/s of each sample that a node serves: the surest, until `serve_rate` is filled.

    `received` (N,) is the rate at which each sample reaches the node. The last one to fit may be served in part.
    """
    ranked = received[order]
    before = np.cumsum(ranked) - ranked
    served = np.empty_like(received)
    served[order] = np.clip(serve_rate - before, 0.0, ranked)
    return served
