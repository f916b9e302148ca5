"""What of the bound depends on the weights, as a function of them; and the weights that minimise it.

    cost(w) = generalisation . w  +  bias TV(w, Lambda)  +  (noise + sampling) . w^2          w on the simplex

Convex, and separate in the exits but for the sum of the weights. So for a price v on that sum each exit has its own
best weight, which grows with v, in straight pieces: from 0 up to Lambda_e, where it rests because of the kink of TV,
and on from there. The minimiser is where they sum to 1, found exactly by interpolating between the bends.

*Calibrated* costs are of the size of what can be. A loss lies in [0, M], so the deviation of an exit is M at most, and
no error, however chosen the weights, is more than M: where the theorem's constants say more, the whole term is scaled
until its worst weights cost M. Then it is a bound no more, but a cost relative to the worst. Terms are never scaled up:
what is small stays small.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from exitflow.theory.bound import BoundInputs, FloatArray, deviation_by_exit, optimisation_error, total_variation


@dataclass(frozen=True)
class ErrorTerms:
    """What weights cost, in units of the loss."""

    generalisation: float
    bias: float
    noise: float
    sampling: float

    @property
    def total(self) -> float:
        """The sum of the four terms."""
        return self.generalisation + self.bias + self.noise + self.sampling

    def to_json(self) -> dict[str, float]:
        """The terms and their sum as values that JSON can hold."""
        return {**vars(self), "total": self.total}


@dataclass(frozen=True)
class WeightCosts:
    """The coefficients of the cost, E exits."""

    serve_share: FloatArray  # (E,) Lambda
    generalisation: FloatArray  # (E,) for each unit of weight
    bias: float  # for each unit of total variation
    noise: FloatArray  # (E,) for each unit of weight squared
    sampling: FloatArray  # (E,) for each unit of weight squared

    def terms(self, weights: FloatArray) -> ErrorTerms:
        """What these weights cost, term by term."""
        return ErrorTerms(
            generalisation=float(self.generalisation @ weights),
            bias=self.bias * total_variation(weights, self.serve_share),
            noise=float(self.noise @ weights**2),
            sampling=float(self.sampling @ weights**2),
        )


def weight_costs(inputs: BoundInputs) -> WeightCosts:
    """The theorem's own constants: the bound is the cost of the weights plus `fixed_error`."""
    per_noise = 2 * inputs.decay / inputs.strong_convexity
    return WeightCosts(
        serve_share=inputs.serve_share,
        generalisation=2 * deviation_by_exit(inputs),
        bias=4 * inputs.loss_bound,
        noise=per_noise * inputs.noise_by_exit,
        sampling=per_noise * inputs.sampling_by_exit,
    )


def fixed_error(inputs: BoundInputs) -> float:
    """What of the bound is the same for all weights: heterogeneity, drift, and the distance at the start."""
    return optimisation_error(inputs, np.zeros_like(inputs.serve_share))


def calibrated_costs(inputs: BoundInputs) -> WeightCosts:
    """The same with no error above M."""
    most = inputs.loss_bound
    literal = weight_costs(inputs)
    deviation = np.minimum(literal.generalisation, 2 * most)
    farthest = 1 - literal.serve_share.min()  # the greatest TV(w, Lambda): all weight on the least served exit
    optimisation = _scale(most, float((literal.noise + literal.sampling).max()))
    return replace(
        literal,
        generalisation=deviation * _scale(most, float(deviation.max())),
        bias=literal.bias * _scale(most, literal.bias * float(farthest)),
        noise=literal.noise * optimisation,
        sampling=literal.sampling * optimisation,
    )


def _scale(most: float, worst: float) -> float:
    return min(1.0, most / worst) if worst > 0 else 1.0


def cheapest_weights(costs: WeightCosts) -> FloatArray:
    """(E,) argmin of the cost on the simplex."""
    share, kink = costs.serve_share, costs.bias / 2
    square = costs.noise + costs.sampling
    scale = max(float(square.max()), float(costs.generalisation.max()), costs.bias) or 1.0
    square = np.maximum(square, 1e-9 * scale)  # where nothing curves the cost, a trace of it keeps the minimiser unique

    def at(price: float) -> FloatArray:
        below = (price - costs.generalisation + kink) / (2 * square)  # where more weight also means less bias
        above = (price - costs.generalisation - kink) / (2 * square)
        return np.maximum(np.where(above > share, above, np.minimum(below, share)), 0.0)

    at_share = costs.generalisation + 2 * square * share
    bends = np.sort(np.concatenate([costs.generalisation - kink, at_share - kink, at_share + kink]))
    prices = np.append(bends, bends[-1] + 2 * float(square.sum()))  # by then the weights sum to more than 1
    weights = at(float(np.interp(1.0, [at(price).sum() for price in prices], prices)))
    shares: FloatArray = weights / weights.sum()
    return shares
