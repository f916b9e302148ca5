"""The constants of Theorem 1 from what can be known before training. docs/theory.md weighs each of them.

Measured are the gradients and the loss of every exit at the initial model. L and mu nobody can measure; but the last
learning rate is a belief about them. The theorem's own is 2 / (mu (gamma + J T)), and noise and sampling cost kappa
times that rate times their part of B.
"""

from __future__ import annotations

from dataclasses import dataclass

from exitflow.theory.bound import BoundInputs, FloatArray


@dataclass(frozen=True)
class Measured:
    """What was measured at the initial model. The rows of a matrix are nodes; what matters is where p_{i,e} > 0."""

    gradient_variance: FloatArray  # (N, E) sigma^2_{i,e}: of a batch's gradient, summed over the weights
    second_moment: FloatArray  # (N, E) E||gradient||^2 of a batch
    loss: FloatArray  # (E,) mean over the samples
    num_parameters: FloatArray  # (E,) of the network up to each exit


@dataclass(frozen=True)
class Setup:
    """What is known of the training."""

    serve_share: FloatArray  # (E,) Lambda
    samples: FloatArray  # (N,) |S_i|
    probabilities: FloatArray  # (N, E) p_{i,e}
    num_rounds: int  # T
    num_steps: int  # J
    last_rate: float  # what a gradient moves the weights by in the end: the last rate, with momentum and eta_s
    joint_exits: bool = False  # a node trains all its exits at once


def curvature_of_rate(last: float, num_rounds: int, num_steps: int) -> float:
    """L = mu for which the theorem's rates end with `last`: kappa = 1, the least that any function has.

    To read kappa from how fast rates fall would make it grow with J T, and the error with it, as the same fall over
    more steps is slower. The noise that SGD leaves near the minimum of a quadratic does not depend on kappa.
    """
    gamma = max(8, num_steps) - 1
    return 2 / (last * (gamma + num_rounds * num_steps))


def estimated_inputs(measured: Measured, setup: Setup, curvature: tuple[float, float] | None = None) -> BoundInputs:
    """Theorem 1 for a training; `curvature` is (L, mu) where they are known."""
    smoothness, mu = curvature or (curvature_of_rate(setup.last_rate, setup.num_rounds, setup.num_steps),) * 2
    loss_bound = float(measured.loss.max())
    return BoundInputs(
        serve_share=setup.serve_share,
        samples=setup.samples,
        probabilities=setup.probabilities,
        pseudo_dimension=measured.num_parameters,
        gradient_variance=measured.gradient_variance,
        gradient_bound=measured.second_moment,
        loss_bound=loss_bound,
        smoothness=smoothness,
        strong_convexity=mu,
        heterogeneity=loss_bound,  # a difference of two losses
        squared_distance=2 * loss_bound / mu,  # strong convexity: mu/2 ||w - w*||^2 <= F(w) - F* <= M
        num_rounds=setup.num_rounds,
        num_steps=setup.num_steps,
        uniform_constant=1.0,
        joint_exits=setup.joint_exits,
    )
