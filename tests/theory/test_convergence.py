"""Theorem 1's promise on a problem that meets its assumptions: the measured error stays under the bound.

Exit 1 sees two of five features and exit 2 all, through one linear softmax with l2, so every F_{i,e} is l2-strongly
convex in *all* weights, as Assumption 4 asks. (Where an exit covers only a part of the network, it is not.)
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.nn import functional as F

from exitflow.federated.loop import run_rounds
from exitflow.federated.places.serial import SerialBackend
from exitflow.federated.plan import TrainingPlan
from exitflow.federated.schedules import theorem
from exitflow.federated.weighting import ExitProfile
from exitflow.models.nested import Coverage, NestedModel
from exitflow.theory.bound import BoundInputs, gradient_bounds, optimisation_error, statistical_heterogeneity
from tests.small import gaussian_split, initial_state, linear_trainer, training

pytestmark = pytest.mark.heavy

NODES = ("device-0", "device-1", "edge-0")
HELD = {"device-0": list(range(12)), "device-1": list(range(12, 20)), "edge-0": list(range(20, 40))}
SAMPLES = np.array([12.0, 8.0, 20.0])
SEEN = (2, 5)  # features that each exit sees
WEIGHTS = np.array([0.7, 0.3])
L2 = 0.5
ALL = 20  # the samples of the largest node: a batch has all that a node holds
SPLIT = gaussian_split(40, 5, 3, seed=1)


class SeesSome(nn.Module):
    def __init__(self, seen: int) -> None:
        super().__init__()
        self.seen = seen
        self.weight = nn.Parameter(torch.zeros(3, 5, dtype=torch.float64))
        self.bias = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, inputs: Tensor, *exits: int) -> tuple[Tensor, ...]:
        return (features(inputs, self.seen) @ self.weight.T + self.bias,)


def features(inputs: Tensor, seen: int) -> Tensor:
    return inputs * (torch.arange(5) < seen)


class OneLinear(NestedModel):
    """Every exit covers all weights."""

    num_exits = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 5, dtype=torch.float64))
        self.bias = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def advance(self, carry: Tensor, start: int, stop: int) -> Tensor:
        return carry

    def classify(self, carry: Tensor, exit: int) -> Tensor:
        return features(carry, SEEN[exit - 1]) @ self.weight.T + self.bias

    def coverage(self, *exits: int) -> Coverage:
        return {"weight": (), "bias": ()}

    def submodel(self, *exits: int) -> nn.Module:
        (exit,) = exits
        return SeesSome(SEEN[exit - 1])


def loss(terms):
    """flat -> (value, gradient) of the sum over (factor, rows, exit) of factor times the mean loss with l2."""

    def objective(flat):
        flat = torch.tensor(flat, requires_grad=True)
        weight, bias = flat[:15].view(3, 5), flat[15:]
        total = torch.zeros((), dtype=torch.float64)
        for factor, rows, exit in terms:
            logits = features(SPLIT.inputs[rows], SEEN[exit]) @ weight.T + bias
            total = total + factor * (F.cross_entropy(logits, SPLIT.labels[rows]) + L2 / 2 * flat.square().sum())
        return float(total.detach()), torch.autograd.grad(total, flat)[0].numpy()

    return objective


def minimum(terms):
    result = minimize(loss(terms), np.zeros(18), jac=True, method="L-BFGS-B", options={"ftol": 1e-15, "gtol": 1e-10})
    return result.x, result.fun


class Problem:
    """The weighted loss of Algorithm 1, and the constants of Theorem 1 for it, all of them true bounds."""

    def __init__(self, probabilities, num_steps, *, batch_size=1):
        self.probabilities, self.num_steps = np.array(probabilities, dtype=float), num_steps
        self.batch_size = batch_size
        pairs = [(node, exit) for node in range(3) for exit in range(2) if self.probabilities[node, exit] > 0]
        exit_samples = SAMPLES @ (self.probabilities > 0)
        held = [HELD[name] for name in NODES]
        terms = [(WEIGHTS[e] * SAMPLES[i] / exit_samples[e], held[i], e) for i, e in pairs]
        self.value = lambda flat: loss(terms)(flat)[0]
        self.best, self.least = minimum(terms)
        alone = {pair: minimum([(1.0, held[pair[0]], pair[1])]) for pair in pairs}
        self.radius = 1.2 * max(np.linalg.norm(w) for w in [self.best, *(w for w, _ in alone.values())])
        smoothness, variance = 0.0, np.zeros((3, 2))
        for i, e in pairs:
            x = torch.cat([features(SPLIT.inputs[held[i]], SEEN[e]), torch.ones(len(held[i]), 1)], dim=1).numpy()
            n, batch = len(x), min(batch_size, len(x))
            # the Hessian of cross-entropy in the logits is at most 1/2, and |softmax - one_hot|^2 at most 2
            smoothness = max(smoothness, np.linalg.eigvalsh(x.T @ x / n).max() / 2 + L2)
            variance[i, e] = 2 * (x**2).sum(1).mean() / batch * (n - batch) / (n - 1)
        self.smoothness, self.variance = smoothness, variance
        at_best, least = np.zeros((3, 2)), np.zeros((3, 2))
        for i, e in pairs:
            at_best[i, e], least[i, e] = loss([(1.0, held[i], e)])(self.best)[0], alone[i, e][1]
        self.heterogeneity = statistical_heterogeneity(at_best, least, self.probabilities > 0)
        self.start = np.zeros(18)

    def start_far_away(self):
        """On the border of W, across from the minimiser."""
        self.start = -self.best / np.linalg.norm(self.best) * self.radius
        return self

    def inputs(self, num_rounds):
        return BoundInputs(
            serve_share=WEIGHTS,
            samples=SAMPLES,
            probabilities=self.probabilities,
            pseudo_dimension=np.ones(2),
            gradient_variance=self.variance,
            gradient_bound=gradient_bounds(self.variance, self.smoothness, 2 * self.radius),
            loss_bound=1.0,
            smoothness=self.smoothness,
            strong_convexity=L2,
            heterogeneity=self.heterogeneity,
            squared_distance=float(np.square(self.start - self.best).sum()),
            num_rounds=num_rounds,
            num_steps=self.num_steps,
        )

    def gaps(self, seed, rounds):
        """F(w) - F* after each of `rounds`."""
        spec = training(
            local_exits="one",
            rounds=max(rounds),
            batch_size=self.batch_size,
            weight_decay=L2,
            server_step="paper",
            seed=seed,
        )
        model = OneLinear()
        profile = ExitProfile(WEIGHTS, np.ones(2), SAMPLES, self.probabilities, spec.rounds)
        plan = TrainingPlan(NODES, profile, lambda profile, round: WEIGHTS, model.coverage, spec)
        plan = replace(plan, projection_radius=self.radius)
        trainer = linear_trainer(model, SPLIT, HELD, spec, self.num_steps)
        backend = SerialBackend(replace(trainer, schedule=theorem(L2, self.smoothness, self.num_steps)))
        start = torch.tensor(self.start)
        with torch.no_grad():
            model.weight.copy_(start[:15].view(3, 5))
            model.bias.copy_(start[15:])
        gaps = {}
        for state, report in run_rounds(plan, initial_state(model), backend):
            if report.round in rounds:
                flat = torch.cat([state.params["weight"].flatten(), state.params["bias"]]).numpy()
                gaps[report.round] = self.value(flat) - self.least
        return [gaps[round] for round in sorted(rounds)]


@pytest.mark.parametrize(
    ("probabilities", "num_steps", "num_rounds"),
    [
        ([[1, 0], [1, 0], [0, 1]], 1, 600),  # B is noise and heterogeneity
        ([[1, 0], [1, 0], [0.3, 0.7]], 2, 300),  # and drift and sampling
    ],
)
def test_the_measured_error_stays_under_the_bound_and_falls_as_one_over_the_steps(probabilities, num_steps, num_rounds):
    problem = Problem(probabilities, num_steps)
    rounds = np.unique(np.geomspace(1, num_rounds, 60).astype(int))
    errors = np.mean([problem.gaps(seed, set(rounds.tolist())) for seed in range(4)], axis=0)
    bounds = np.array([optimisation_error(problem.inputs(int(each)), WEIGHTS) for each in rounds])
    assert (errors < bounds).all()
    steps = rounds * num_steps
    late = steps >= 60  # gamma is about 50: from here on the rates fall
    slope = np.polyfit(np.log(problem.inputs(1).gamma + steps[late]), np.log(errors[late]), 1)[0]
    assert -1.5 < slope < -0.7


def test_without_noise_the_bound_ends_far_below_the_error_at_the_start_and_the_measured_error_stays_under_it():
    """What never moves, or moves too slowly, fails: noise and drift alone make the bounds above that large."""
    problem = Problem([[1, 0], [1, 0], [0, 1]], 1, batch_size=ALL).start_far_away()
    rounds = [1, 3, 10, 30, 100, 300, 1000]
    errors = problem.gaps(0, set(rounds))
    bounds = [optimisation_error(problem.inputs(each), WEIGHTS) for each in rounds]
    assert all(error < bound for error, bound in zip(errors, bounds, strict=True))
    assert bounds[-1] < (problem.value(problem.start) - problem.least) / 4
