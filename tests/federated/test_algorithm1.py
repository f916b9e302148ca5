"""The fast loop against the literal algorithm, and what the algorithm promises."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import nn
from torch.nn import functional as F

from exitflow.federated.aggregation import aggregate
from exitflow.federated.loop import run_rounds
from exitflow.federated.places.serial import SerialBackend
from exitflow.federated.plan import TrainingPlan
from exitflow.federated.sampling import sample_tasks
from exitflow.federated.schedules import theorem
from exitflow.federated.weighting import ExitProfile
from exitflow.models.nested import EarlyExitNetwork
from tests.oracles import algorithm1
from tests.small import NestedLinear, gaussian_split, initial_state, linear_trainer, training

NODES = ["device-0", "device-1", "edge-0"]
HELD = {"device-0": list(range(12)), "device-1": list(range(12, 20)), "edge-0": list(range(20, 40))}
SAMPLES = np.array([12.0, 8.0, 20.0])


def nested_linear():
    torch.manual_seed(0)
    model = NestedLinear((2, 5), 3).double()
    for param in model.parameters():
        nn.init.normal_(param)
    return model


def two_layers():
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(5, 4), nn.Tanh()), nn.Sequential(nn.Linear(4, 4), nn.Tanh())]
    return EarlyExitNetwork(stages, [nn.Linear(4, 3), nn.Linear(4, 3)]).double()


def make_plan(model, probabilities, spec, weights=(0.7, 0.3)):
    profile = ExitProfile(
        serve_share=np.array(weights),
        multiply_adds=np.ones(2),
        samples=SAMPLES,
        probabilities=probabilities,
        num_rounds=spec.rounds,
    )
    return TrainingPlan(NODES, profile, lambda profile, round: profile.serve_share, model.coverage, spec)


@pytest.mark.parametrize("make_model", [nested_linear, two_layers])
@pytest.mark.parametrize("radius", [None, 0.5])
@pytest.mark.parametrize(
    "probabilities",
    [
        [[1, 0], [1, 0], [0, 1]],
        [[1, 0], [1, 0], [0.3, 0.7]],
        [[0.5, 0], [0.5, 0], [0.1, 0.4]],
    ],
)
def test_the_loop_equals_the_literal_algorithm(make_model, radius, probabilities):
    model, split = make_model(), gaussian_split(40, 5, 3)
    probabilities = np.array(probabilities, dtype=float)
    spec = training(
        schedule="cosine",
        rounds=4,
        batch_size=5,
        learning_rate=0.3,
        server_step="paper",
        local_exits="one",
        seed=3,
    )
    num_steps = 3
    trainer = linear_trainer(model, split, HELD, spec, num_steps)
    plan = replace(make_plan(model, probabilities, spec), server_learning_rate=0.9, projection_radius=radius)
    *_, (state, _) = run_rounds(plan, initial_state(model), SerialBackend(trainer))

    tasks = {t: sample_tasks(NODES, probabilities, round=t, seed=3) for t in range(1, 5)}
    batches = {
        (t, task.node): list(itertools.islice(trainer.data.batches(task.node, 5, seed=task.seed), num_steps))
        for t in tasks
        for task in tasks[t]
    }
    expected = algorithm1.run(
        algorithm1.Inputs(
            model=model,
            samples=dict(zip(NODES, map(int, SAMPLES), strict=True)),
            probabilities={
                (node, exit + 1): float(probabilities[row, exit])
                for row, node in enumerate(NODES)
                for exit in range(2)
                if probabilities[row, exit] > 0
            },
            exit_weights=lambda t: (0.7, 0.3),
            num_rounds=4,
            num_steps=num_steps,
            learning_rate=trainer.schedule,
            server_learning_rate=0.9,
            sampled=lambda t: [(task.node, task.deepest) for task in tasks[t]],
            batch=lambda t, i, j: (batches[t, i][j].inputs, batches[t, i][j].labels),
            radius=radius,
        )
    )
    for name, value in expected.items():
        torch.testing.assert_close(state.params[name], value, rtol=1e-10, atol=1e-12)
    if radius:
        norm = torch.cat([value.flatten() for value in state.params.values()]).norm()
        assert float(norm) <= radius * (1 + 1e-9)


@pytest.mark.parametrize("make_model", [nested_linear, two_layers])
@pytest.mark.parametrize("participation", [1.0, 0.4])
def test_all_exits_at_once_is_one_step_down_the_gradient_of_the_weighted_loss(make_model, participation):
    """With one local step on all of a node's data; in expectation over who takes part."""
    model, split, rate = make_model(), gaussian_split(40, 5, 3), 0.3
    weights, depth = (0.7, 0.3), {"device-0": 1, "device-1": 1, "edge-0": 2}
    probabilities = participation * np.array([[1.0, 0], [1, 0], [1, 1]])
    spec = training(batch_size=20, learning_rate=rate)
    spec = replace(spec, server_step="paper", rounds=1, local_exits="all")
    trainer = linear_trainer(model, split, HELD, spec, 1)
    plan = make_plan(model, probabilities, spec, weights)
    start = initial_state(model)
    updates = [
        trainer.train(start, replace(task, probability=participation))
        for task in make_plan(model, probabilities / participation, spec, weights).tasks(1, np.array(weights))
    ]
    rule = plan.rule(np.array(weights))
    found = algorithm1.flat({name: torch.zeros_like(value) for name, value in start.params.items()})
    for present in itertools.product((False, True), repeat=3):
        chance = np.prod([participation if here else 1 - participation for here in present])
        after = aggregate(start, [update for update, here in zip(updates, present, strict=True) if here], rule)
        found += chance * (algorithm1.flat(after.params) - algorithm1.flat(start.params))

    w = algorithm1.flat(start.params)
    gradient = torch.zeros_like(w)
    for e in (1, 2):
        samples = [z for node, rows in HELD.items() if depth[node] >= e for z in rows]
        for z in samples:
            sample = split.inputs[z : z + 1], split.labels[z : z + 1]
            gradient += weights[e - 1] / len(samples) * algorithm1.sample_gradient(model, w, e, *sample)
    torch.testing.assert_close(found, -rate * gradient, rtol=1e-10, atol=1e-12)


def minimiser(split, weights, probabilities, l2):
    """argmin of F_{S,Lambda-tilde}: sum over e of Lambda-tilde_e times the mean loss of exit e on S_{e,p}, by L-BFGS.

    The l2 term of exit e acts on what exit e covers, as weight decay does on a node that trains it.
    """
    model = NestedLinear((2, 5), 3).double()
    rows = {e: sum((HELD[node] for n, node in enumerate(NODES) if probabilities[n][e - 1] > 0), []) for e in (1, 2)}

    def objective(flat):
        flat = torch.tensor(flat, requires_grad=True)
        weight, bias = flat[:15].view(3, 5), flat[15:]
        total = torch.zeros((), dtype=torch.float64)
        for e, size in ((1, 2), (2, 5)):
            inputs, labels = split.inputs[rows[e]], split.labels[rows[e]]
            loss = F.cross_entropy(inputs[:, :size] @ weight[:, :size].T + bias, labels)
            total = total + weights[e - 1] * (loss + l2 / 2 * (weight[:, :size].square().sum() + bias.square().sum()))
        (gradient,) = torch.autograd.grad(total, flat)
        return float(total.detach()), gradient.numpy()

    assert sum(param.numel() for param in model.parameters()) == 18
    result = minimize(objective, np.zeros(18), jac=True, method="L-BFGS-B", options={"ftol": 1e-15, "gtol": 1e-10})
    return result.x, lambda flat: objective(flat)[0]


@pytest.mark.heavy
@pytest.mark.parametrize("probabilities", [[[1, 0], [1, 0], [0, 1]], [[1, 0], [1, 0], [0.3, 0.7]]])
def test_on_a_convex_problem_it_reaches_the_minimiser_of_the_weighted_loss(probabilities):
    """With the theorem's step sizes; and it is the minimiser for these weights, not for others."""
    split, l2 = gaussian_split(40, 5, 3, seed=1), 0.3
    model = NestedLinear((2, 5), 3).double()
    smoothness = float(split.inputs.square().sum(1).max() + 1) / 2 + l2  # of softmax cross-entropy on these inputs
    spec = training(
        rounds=700,
        batch_size=8,
        weight_decay=l2,
        server_step="paper",
        local_exits="one",
    )
    num_steps = 4
    trainer = linear_trainer(model, split, HELD, spec, num_steps)
    trainer = replace(trainer, schedule=theorem(l2, smoothness, num_steps))
    plan = make_plan(model, np.array(probabilities, dtype=float), spec)
    start = initial_state(model)
    distances, gaps = [], []
    best, loss = minimiser(split, (0.7, 0.3), probabilities, l2)
    for state, report in run_rounds(plan, start, SerialBackend(trainer)):
        if report.round in (7, 70, 700):
            found = torch.cat([state.params["weight"].flatten(), state.params["bias"]]).numpy()
            distances.append(np.linalg.norm(found - best))
            gaps.append(loss(found) - loss(best))
    assert gaps[2] < gaps[1] / 3 < gaps[0] / 9
    assert distances[2] < 0.05 * np.linalg.norm(best)
    others = [minimiser(split, weights, probabilities, l2)[0] for weights in ((0.5, 0.5), (0.3, 0.7))]
    assert all(np.linalg.norm(found - other) > 2 * distances[2] for other in others)
