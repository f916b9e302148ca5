"""The bound of Theorem 1, with all constants of its appendix.

    true error <= 2 generalisation + 2 bias + optimisation                                       (error-decomp)

    generalisation = sum over e of  w_e M C sqrt(Pdim_e / |S_{e,p}|)                             (eq:per-exit-gen-error)
    bias           = 2 M TV(w, Lambda)                                                           (eq:bias_bound)
    optimisation   = kappa / (gamma + J T) * (2 B / mu + mu (gamma + 1) / 2 * D)                 (thm:opt_error)
    B = sum over (i,e) of alpha_{i,e}^2 sigma^2_{i,e}                                            noise
        + 6 L Gamma                                                                              heterogeneity
        + 8 (J - 1)^2 G^2                                                                        drift
        + 4 J^2 sum over (i,e) of alpha_{i,e}^2 (1 - p_{i,e}) / p_{i,e} G_{i,e}                  sampling

where w is Lambda-tilde and alpha_{i,e} = eta_s w_e |S_i| / |S_{e,p}|.

The theorem lets a node train one exit a round. Where it trains n_i of them in one pass, their gradients come from the
same batch and the same draw, so that their noise adds up instead of averaging out: at worst to
(sum_e alpha_{i,e} sigma_{i,e})^2 <= n_i sum_e alpha_{i,e}^2 sigma^2_{i,e}, and likewise in the sampling. So noise and
sampling of such a node count n_i times, which holds for any gradients and is met where they are all alike.

Two slips of the paper are mended here:
G_{i,e} = sigma^2_{i,e} + (L diam W)^2 bounds the *squared* norm of a gradient, so G^2 := max G_{i,e} (the appendix
calls that maximum G, and then squares it); and D is E||w^(1) - w*||^2, which is printed without norm and square.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

UNIFORM_CONSTANT = 320.0  # C of the uniform deviation bound, as the appendix takes it from its reference


@dataclass(frozen=True)
class BoundInputs:
    """All that Theorem 1 asks for. N nodes, E exits; the rows of a matrix are nodes."""

    serve_share: FloatArray  # (E,) Lambda, sums to 1
    samples: FloatArray  # (N,) |S_i|
    probabilities: FloatArray  # (N, E) p_{i,e}
    pseudo_dimension: FloatArray  # (E,) Pdim(H_e)
    gradient_variance: FloatArray  # (N, E) sigma^2_{i,e}, where p_{i,e} > 0
    gradient_bound: FloatArray  # (N, E) G_{i,e} >= E||gradient||^2, where p_{i,e} > 0
    loss_bound: float  # M
    smoothness: float  # L
    strong_convexity: float  # mu
    heterogeneity: float  # Gamma
    squared_distance: float  # D = E||w^(1) - w*||^2
    num_rounds: int  # T
    num_steps: int  # J
    server_learning_rate: float = 1.0  # eta_s
    uniform_constant: float = UNIFORM_CONSTANT  # C
    joint_exits: bool = False  # a node trains all its exits at once, not one a round

    @property
    def trained(self) -> npt.NDArray[np.bool_]:
        """(N, E): whether node i may train exit e, that is i is in C_e."""
        return self.probabilities > 0

    @cached_property
    def sample_share(self) -> FloatArray:
        """(N, E) |S_i| / |S_{e,p}|; 0 where a node does not train an exit."""
        held: FloatArray = self.samples[:, None] * self.trained
        share: FloatArray = held / held.sum(axis=0)
        return share

    @property
    def exit_samples(self) -> FloatArray:
        """(E,) the samples that train each exit, |S_{e,p}|."""
        return self.samples @ self.trained

    @property
    def condition(self) -> float:
        """Kappa = L / mu."""
        return self.smoothness / self.strong_convexity

    @property
    def gamma(self) -> float:
        """max(8 kappa, J) - 1."""
        return max(8 * self.condition, self.num_steps) - 1

    @property
    def squared_gradient_bound(self) -> float:
        """G^2, over the pairs that train."""
        return float(self.gradient_bound[self.trained].max())

    @property
    def decay(self) -> float:
        """kappa / (gamma + J T): what the optimisation error falls with."""
        return self.condition / (self.gamma + self.num_steps * self.num_rounds)

    @property
    def trained_at_once(self) -> FloatArray:
        """(N, 1) n_i: the exits whose gradients a node takes from one batch."""
        count: FloatArray = self.trained.sum(axis=1, keepdims=True).astype(np.float64)
        return count if self.joint_exits else np.ones_like(count)

    @cached_property
    def noise_by_exit(self) -> FloatArray:
        """(E,) B's first part for weight 1 on an exit; it grows with the square of the weight."""
        variance = np.where(self.trained, self.gradient_variance, 0.0)
        noise: FloatArray = self.server_learning_rate**2 * np.sum(
            self.trained_at_once * self.sample_share**2 * variance, axis=0
        )
        return noise

    @cached_property
    def sampling_by_exit(self) -> FloatArray:
        """(E,) B's last part for weight 1 on an exit; it grows with the square of the weight."""
        absence = 1 / np.where(self.trained, self.probabilities, 1.0) - 1  # (1 - p) / p
        bound = np.where(self.trained, self.gradient_bound, 0.0)
        by_exit: FloatArray = np.sum(self.trained_at_once * self.sample_share**2 * absence * bound, axis=0)
        return by_exit * (2 * self.num_steps * self.server_learning_rate) ** 2


@dataclass(frozen=True)
class NoiseParts:
    """The four parts of B."""

    noise: float
    heterogeneity: float
    drift: float
    sampling: float

    @property
    def total(self) -> float:
        """All four parts of B together."""
        return self.noise + self.heterogeneity + self.drift + self.sampling


@dataclass(frozen=True)
class ErrorBound:
    """The three errors of Theorem 1 under some weights, in units of the loss."""

    generalisation: float
    bias: float
    optimisation: float
    parts: NoiseParts  # of B, inside the optimisation error

    @property
    def total(self) -> float:
        """The bound on the true error."""
        return 2 * self.generalisation + 2 * self.bias + self.optimisation

    def to_json(self) -> dict[str, float]:
        """Plain values; the parts are those of B."""
        errors = {name: getattr(self, name) for name in ("generalisation", "bias", "optimisation", "total")}
        return {**errors, **{f"b_{name}": value for name, value in vars(self.parts).items()}}


def total_variation(weights: FloatArray, shares: FloatArray) -> float:
    """Half of the sum of the differences."""
    return float(np.abs(weights - shares).sum() / 2)


def gradient_bounds(variance: FloatArray, smoothness: float, diameter: float) -> FloatArray:
    """G_{i,e} = sigma^2_{i,e} + (L diam W)^2: the second moment of a gradient anywhere in W."""
    return variance + (smoothness * diameter) ** 2


def statistical_heterogeneity(losses: FloatArray, least_losses: FloatArray, trained: npt.NDArray[np.bool_]) -> float:
    """Gamma: the most that a node's loss at an exit is higher at the common minimiser than at its own (eq:gamma).

    All (N, E); what counts is where `trained`.
    """
    return float((losses - least_losses)[trained].max())


def generalisation_error(inputs: BoundInputs, weights: FloatArray) -> float:
    """Epsilon_gen: how far the loss on the samples may be from the expected loss (eq:per-exit-gen-error)."""
    return float(weights @ deviation_by_exit(inputs))


def deviation_by_exit(inputs: BoundInputs) -> FloatArray:
    """(E,) M C sqrt(Pdim_e / |S_{e,p}|)."""
    ratio = np.sqrt(inputs.pseudo_dimension / inputs.exit_samples)
    deviation: FloatArray = inputs.loss_bound * inputs.uniform_constant * ratio
    return deviation


def bias_error(inputs: BoundInputs, weights: FloatArray) -> float:
    """Epsilon_bias: the price of training for other shares than will be served (eq:bias_bound)."""
    return 2 * inputs.loss_bound * total_variation(weights, inputs.serve_share)


def noise_parts(inputs: BoundInputs, weights: FloatArray) -> NoiseParts:
    """B, part by part (thm:opt_error)."""
    return NoiseParts(
        noise=float(weights**2 @ inputs.noise_by_exit),
        heterogeneity=6 * inputs.smoothness * inputs.heterogeneity,
        drift=8 * (inputs.num_steps - 1) ** 2 * inputs.squared_gradient_bound,
        sampling=float(weights**2 @ inputs.sampling_by_exit),
    )


def optimisation_error(inputs: BoundInputs, weights: FloatArray) -> float:
    """Epsilon_opt: how far T rounds of J steps may end from the minimum on the samples (thm:opt_error)."""
    return _optimisation(inputs, noise_parts(inputs, weights).total)


def _optimisation(inputs: BoundInputs, noise: float) -> float:
    mu = inputs.strong_convexity
    return inputs.decay * (2 * noise / mu + mu * (inputs.gamma + 1) / 2 * inputs.squared_distance)


def error_bound(inputs: BoundInputs, weights: FloatArray) -> ErrorBound:
    """The terms of Theorem 1 for these weights."""
    parts = noise_parts(inputs, weights)
    return ErrorBound(
        generalisation_error(inputs, weights), bias_error(inputs, weights), _optimisation(inputs, parts.total), parts
    )


def least_generalisation(inputs: BoundInputs) -> FloatArray:
    """All weight on the exit with the lowest Pdim_e / |S_{e,p}| (Sec. 3.4); in equal parts where several have it."""
    ratio = inputs.pseudo_dimension / inputs.exit_samples
    return _shares((ratio == ratio.min()).astype(np.float64))


def least_bias(inputs: BoundInputs) -> FloatArray:
    """The weights Lambda, under which the bias is 0 (Sec. 3.4)."""
    return _shares(inputs.serve_share)


def least_optimisation(inputs: BoundInputs) -> FloatArray:
    """In inverse proportion to what each exit adds to B: its noise and its sampling."""
    return inverse_shares(inputs.noise_by_exit + inputs.sampling_by_exit)


def least_noise(inputs: BoundInputs) -> FloatArray:
    """In inverse proportion to sum_i (|S_i| / |S_{e,p}|)^2 sigma^2_{i,e}: the minimiser of B's first part."""
    return inverse_shares(inputs.noise_by_exit)


def inverse_shares(coefficients: FloatArray) -> FloatArray:
    """argmin of sum_e coefficients_e w_e^2 on the simplex. Exits whose coefficient is 0 share everything."""
    free = coefficients == 0
    if free.any():
        return _shares(free.astype(np.float64))
    return _shares(coefficients.min() / coefficients)


def _shares(values: FloatArray) -> FloatArray:
    shares: FloatArray = values / values.sum()
    return shares
