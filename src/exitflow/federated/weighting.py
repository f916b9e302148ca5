"""Lambda-tilde: how much the loss of each exit counts in training.

A weighting is a plain function of what is known of the exits and of the round. All return (E,), summing to 1. A system
file names one of `WEIGHTINGS`, or any other as `module:function`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from exitflow.parts import load_part
from exitflow.theory.bound import BoundInputs, inverse_shares
from exitflow.theory.error_costs import calibrated_costs, cheapest_weights

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ExitProfile:
    """What a weighting may know. E exits, N nodes."""

    serve_share: FloatArray  # (E,) Lambda, sums to 1
    multiply_adds: FloatArray  # (E,) for one input, up to each exit
    samples: FloatArray  # (N,) |S_i|
    probabilities: FloatArray  # (N, E) p_{i,e}
    num_rounds: int  # T
    normalised_step: bool = False  # the server step is `coverage`: no weight slows what one exit alone covers
    gradient_variance: FloatArray | None = None  # (E,) v_e, measured; only where the weighting needs it
    bound: BoundInputs | None = None  # Theorem 1 for this training, from what was measured; likewise

    @property
    def exit_samples(self) -> FloatArray:
        """(E,) |S_{e,p}|: samples of all nodes that may train each exit."""
        return self.samples @ (self.probabilities > 0)


ExitWeighting = Callable[[ExitProfile, int], FloatArray]  # profile, round (from 1) -> (E,), sums to 1


def measuring_gradients(weighting: ExitWeighting) -> ExitWeighting:
    """Mark a weighting that needs `gradient_variance` or `bound`: nodes then measure them before the first round."""
    weighting.measures_gradients = True  # type: ignore[attr-defined]
    return weighting


def measures_gradients(weighting: ExitWeighting) -> bool:
    """Whether the weighting is marked so."""
    return getattr(weighting, "measures_gradients", False)


def equal_weight(profile: ExitProfile, round: int) -> FloatArray:
    """1/E each, as BranchyNet and most of its successors have it."""
    return _normalised(np.ones_like(profile.serve_share))


def flops_prop(profile: ExitProfile, round: int) -> FloatArray:
    """In proportion to min(t/T, relative cost of the exit): the ramp of Shallow-Deep Networks (Kaya et al., 2019)."""
    relative_cost = profile.multiply_adds / profile.multiply_adds.max()
    return _normalised(np.minimum(round / profile.num_rounds, relative_cost))


def serving_rate(profile: ExitProfile, round: int) -> FloatArray:
    """Lambda: no bias error (Sec. 3.4)."""
    return _normalised(profile.serve_share)


@measuring_gradients
def balanced_adj(profile: ExitProfile, round: int) -> FloatArray:
    """Halfway between Lambda, which has no bias error, and the exits whose gradients vary least (Sec. 3.4)."""
    return (_normalised(profile.serve_share) + steadiest(profile)) / 2


@measuring_gradients
def bound_min(profile: ExitProfile, round: int) -> FloatArray:
    """The weights with the lowest bound of Theorem 1, calibrated so that no error exceeds the loss that can be lost.

    The least that `exitflow explain` sets the others against. In trainings they are no better than the shares that are
    served, so no name in a system file stands for them.
    """
    assert profile.bound is not None
    return cheapest_weights(calibrated_costs(profile.bound))


def linear_depth(profile: ExitProfile, round: int) -> FloatArray:
    """1, 2, ..., E, in proportion: the deeper the exit, the more it counts (ScaleFL: Ilhan et al., 2023)."""
    return _normalised(np.arange(1.0, len(profile.serve_share) + 1))


def fixed_weights(weights: Sequence[float]) -> ExitWeighting:
    """The same weights in every round, as the losses of BranchyNet have them (Teerapittayanon et al., 2016)."""
    return lambda profile, round: _normalised(np.array(weights, dtype=np.float64))


def auto(profile: ExitProfile, round: int) -> FloatArray:
    """For nodes that train all their exits at once: Lambda, or where the step is `coverage`, by traffic and data.

    There, what only a deep exit covers learns at full speed under any weights. They decide who shapes the layers that
    exits share, and all data do that best: halfway between Lambda and equal weights, times the fourth power of the
    data that can train each exit. In both cases all exits share a tenth, so that none is left untrained.
    """
    equal, wanted = equal_weight(profile, round), _normalised(profile.serve_share)
    if profile.normalised_step:
        data = (profile.exit_samples / profile.exit_samples.max()) ** 4
        wanted = _normalised((wanted + equal) / 2 * data)
    return 0.9 * wanted + 0.1 * equal


def steadiest(profile: ExitProfile) -> FloatArray:
    """The minimiser of the sum over (i, e) of (Lambda-tilde_e |S_i| / |S_{e,p}|)^2 v_e^2, as the authors compute it.

    B's first term with v_e^2 for sigma^2, though v_e, the figure of the paper's Table 3, is a variance already:
    `theory.bound.least_noise` minimises the term itself.
    """
    assert profile.gradient_variance is not None
    trained_by = profile.probabilities > 0  # (N, E)
    concentration = (profile.samples**2) @ trained_by / profile.exit_samples**2  # (E,) sum_i (|S_i| / |S_{e,p}|)^2
    return inverse_shares(profile.gradient_variance**2 * concentration)


def _normalised(weights: FloatArray) -> FloatArray:
    shares: FloatArray = weights / weights.sum()
    return shares


WEIGHTINGS: dict[str, ExitWeighting] = {
    "auto": auto,
    "equal-weight": equal_weight,
    "flops-prop": flops_prop,
    "serving-rate": serving_rate,
    "balanced-adj": balanced_adj,
    "linear-depth": linear_depth,
}


def find_weighting(name: str) -> ExitWeighting:
    """One of the table, or the user's own."""
    return WEIGHTINGS[name] if name in WEIGHTINGS else load_part(name, key="weighting")
