"""Whether a request gains by going up, as a function of what an exit says: fitted on validation data.

Confidence tells how likely an answer is right. What matters for sending a request up is how much more likely a deeper
answer is right: a sample that is hopeless everywhere is best answered at once. For each exit two small logistic models
in the four features of `routing.confidence.gain_features` say how likely its own answer and the mean deeper one are
right; nodes then answer where the difference is largest (`confidence = "gain"`). Needs no PyTorch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from exitflow.evaluation.outputs import ExitOutputs
from exitflow.routing.confidence import NUM_FEATURES, gain_features

FloatArray = npt.NDArray[np.float64]

RIDGE = 1.0  # samples' worth, on standardised features: two exits that are alike are left so
MAX_STEPS = 50  # of Newton's method, which takes about six
SMALL = 1e-9  # of a step, at which it ends


def fit_gains(outputs: ExitOutputs) -> tuple[tuple[float, ...], ...]:
    """The weights for every exit; the deepest, which asks nobody, gets those of its own answer twice."""
    correct = outputs.correct.astype(np.float64)
    found = []
    for exit, logits in enumerate(outputs.logits):
        features = gain_features(logits.astype(np.float64))
        if not np.isfinite(features).all():  # a network that has diverged: all are alike
            found.append((0.0,) * (2 * NUM_FEATURES))
            continue
        deeper = correct[exit + 1 :].mean(axis=0) if exit + 1 < len(correct) else correct[exit]
        found.append((*_fit(features, correct[exit]), *_fit(features, deeper)))
    return tuple(found)


def _fit(features: FloatArray, targets: FloatArray) -> list[float]:
    """Logistic regression with a ridge by Newton's method; (F,) weights for the features as they are."""
    centre, spread = features[:, :-1].mean(axis=0), features[:, :-1].std(axis=0)
    spread = np.where(spread > 0, spread, 1.0)
    columns = np.hstack(((features[:, :-1] - centre) / spread, features[:, -1:]))
    weights = np.zeros(columns.shape[1])
    for _ in range(MAX_STEPS):
        chances = (np.tanh(columns @ weights / 2) + 1) / 2
        gradient = columns.T @ (chances - targets) + RIDGE * weights
        curvature = columns.T @ (columns * (chances * (1 - chances))[:, None]) + RIDGE * np.eye(len(weights))
        step = np.linalg.solve(curvature, gradient)
        weights = weights - step * min(1.0, 2.0 / max(float(np.abs(step).max()), SMALL))
        if np.abs(step).max() < SMALL:
            break
    slopes = weights[:-1] / spread
    return [*slopes.tolist(), float(weights[-1] - slopes @ centre)]
