"""The constants of Theorem 1 from what can be known before training. docs/theory.md weighs each of them.

Measured are the gradients and the loss of every exit at the initial model. L and mu nobody can measure; but a learning
rate is a belief about them. The theorem turns them into rates, 2 / (mu (gamma + tau)); read backwards, it turns the
first and the last rate of the training into the L and mu for which it would have chosen them.
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
    first_rate: float  # the local learning rate at the first step after its warm-up, over 1 - momentum
    last_rate: float  # and at its last
    server_learning_rate: float = 1.0  # eta_s
    joint_exits: bool = False  # a node trains all its exits at once


def curvature_of_rates(first: float, last: float, num_steps: int) -> tuple[float, float]:
    """(L, mu) for which the theorem's rates over `num_steps` steps in all begin with `first` and end with `last`.

    The first is 1 / (4 L), as long as 8 kappa >= J; how fast they fall from there gives mu. Rates that hardly fall, or
    rise, belong to a kappa beyond what the steps can tell, and count as kappa = J T / 8, for which they halve; those
    that fall faster than any kappa lets them count as kappa = 1.
    """
    smoothness = 1 / (4 * first)
    most = max(num_steps / 8, 1.0)
    fall = 1 / last - 1 / first  # mu (J T - 1) / 2
    condition = smoothness * (num_steps - 1) / (2 * fall) if fall > 0 else most
    return smoothness, smoothness / min(max(condition, 1.0), most)


def estimated_inputs(measured: Measured, setup: Setup, curvature: tuple[float, float] | None = None) -> BoundInputs:
    """Theorem 1 for a training; `curvature` is (L, mu) where they are known."""
    total_steps = setup.num_rounds * setup.num_steps
    smoothness, mu = curvature or curvature_of_rates(setup.first_rate, setup.last_rate, total_steps)
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
        server_learning_rate=setup.server_learning_rate,
        uniform_constant=1.0,
        joint_exits=setup.joint_exits,
    )
