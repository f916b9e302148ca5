"""Local learning rates eta^(t,j): functions of the round t and the local step j."""

from __future__ import annotations

import math
from collections.abc import Callable

from exitflow.federated.training_spec import TrainingSpec
from exitflow.parts import load_part

Schedule = Callable[[int, int], float]  # round from 1, step from 0 -> learning rate


def make_schedule(spec: TrainingSpec, num_steps: int) -> Schedule:
    """The schedule that `spec` names, for rounds of `num_steps` local steps."""
    name, warmup = spec.schedule.name, spec.schedule.warmup_rounds
    if name == "cosine":
        schedule = cosine(spec.learning_rate, spec.schedule.final_learning_rate, spec.rounds)
    elif name == "constant":
        schedule = constant(spec.learning_rate)
    else:
        schedule = load_part(name, key="training.schedule.name")(spec, num_steps)
    return warmed_up(schedule, warmup) if warmup else schedule


def constant(rate: float) -> Schedule:
    """The learning rate stays the same throughout."""
    return lambda round, step: rate


def cosine(start: float, end: float, num_rounds: int) -> Schedule:
    """Half a cosine from `start`, once a round, as in the paper's experiments."""
    return lambda round, step: end + (start - end) * (1 + math.cos(math.pi * (round - 1) / num_rounds)) / 2


def theorem(strong_convexity: float, smoothness: float, num_steps: int) -> Schedule:
    """2 / (mu (gamma + (t - 1) J + j + 1)) with gamma = max(8 kappa, J) - 1, kappa = L / mu (Theorem 1)."""
    gamma = max(8 * smoothness / strong_convexity, num_steps) - 1
    return lambda round, step: 2 / (strong_convexity * (gamma + (round - 1) * num_steps + step + 1))


def warmed_up(schedule: Schedule, num_rounds: int) -> Schedule:
    """The same, but for `num_rounds` of which each has an equal part more of it than the one before."""
    return lambda round, step: schedule(round, step) * min(1.0, round / (num_rounds + 1))
