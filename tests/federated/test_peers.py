"""What defines each peer's method, against a literal version of it on a tiny case."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn

from exitflow.config import decode
from exitflow.errors import ConfigError
from exitflow.federated.loop import run_rounds
from exitflow.federated.objectives import make_objective
from exitflow.federated.places.serial import SerialBackend
from exitflow.federated.plan import TrainingPlan
from exitflow.federated.sampling import step_exits
from exitflow.federated.training_spec import DistillationSpec, TrainingSpec
from exitflow.federated.types import Task
from exitflow.federated.weighting import ExitProfile, linear_depth
from exitflow.models.nested import EarlyExitNetwork
from tests.oracles import peers
from tests.small import NestedLinear, gaussian_split, initial_state, linear_trainer, training

RATE, STEPS, SIZE = 0.2, 3, 5
DATA = gaussian_split(40, 5, 3)
HELD = {"a": [*range(12)], "b": [*range(12, 20)], "c": [*range(20, 40)]}


def in_depth():
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(size, 4), nn.Tanh()) for size in (5, 4, 4)]
    return EarlyExitNetwork(stages, [nn.Linear(4, 3) for _ in range(3)]).double()


def in_width():
    torch.manual_seed(0)
    model = NestedLinear((1, 3, 5), 3).double()
    for param in model.parameters():
        nn.init.normal_(param)
    return model


def spec_with(**changes):
    return training(**{"learning_rate": RATE, "batch_size": SIZE, "server_step": "node-mean", **changes})


def plan_of(model, spec, exits=(1, 2, 3)):
    """Nodes a, b, c, at these exits."""
    trained = [[exit <= own if spec.trains_all_exits else exit == own for exit in (1, 2, 3)] for own in exits]
    samples = np.array([len(rows) for rows in HELD.values()], dtype=float)
    profile = ExitProfile(np.full(3, 1 / 3), np.ones(3), samples, np.array(trained, dtype=float), spec.rounds)
    return TrainingPlan(list(HELD), profile, spec.exit_weighting, model.coverage, spec)


def tasks_of(plan, round=1):
    return {task.node: task for task in plan.tasks(round, plan.weighting(plan.profile, round))}


def check_steps(model, spec, round, node, literal):
    """A node's update is that of plain SGD on the literal loss, a function of (logits, inputs, labels, step's exits)."""
    trainer = linear_trainer(model, DATA, HELD, spec, STEPS)
    start = initial_state(model)
    task = tasks_of(plan_of(model, spec), round)[node]
    update = trainer.train(start, task)
    batches = itertools.islice(trainer.data.batches(node, SIZE, seed=task.seed), STEPS)
    losses = [
        lambda logits, batch=batch, exits=exits: literal(logits, batch.inputs, batch.labels, exits)
        for batch, exits in zip(batches, step_exits(task, spec, STEPS), strict=True)
    ]
    trained = {name: value for name, value in start.params.items() if name in update.delta}
    rest = {name: value for name, value in start.params.items() if name not in update.delta}
    after = peers.local_sgd(_Frozen(model, rest), trained, losses, RATE, spec.objective.proximal_weight)
    for name, part in model.coverage(*task.exits).items():
        expected = (after[name] - start.params[name])[part]
        torch.testing.assert_close(update.delta[name], expected, rtol=1e-9, atol=1e-12)
    assert max(float(delta.abs().max()) for delta in update.delta.values()) > 1e-3
    return task, update


def _Frozen(model, rest):  # noqa: N802 - what the node does not hold needs no gradient
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in rest)
    return model


PROXIMAL = pytest.mark.parametrize("proximal_weight", [0.0, 0.7])


@PROXIMAL
@pytest.mark.parametrize(("node", "exit"), [("a", 1), ("c", 3)])
def test_fedavg_and_fedprox_train_on_labels_and_the_distance_to_what_was_received(node, exit, proximal_weight):
    def literal(logits, inputs, labels, exits):
        return peers.cross_entropy(logits(inputs, exit), labels)

    check_steps(in_depth(), spec_with(local_exits="one", proximal_weight=proximal_weight), 1, node, literal)


@PROXIMAL
@pytest.mark.parametrize("make_model", [in_depth, in_width])
def test_branchynet_adds_up_the_losses_with_the_given_weights(make_model, proximal_weight):
    weights = (0.5, 0.3, 0.7)

    def literal(logits, inputs, labels, exits):
        return peers.branchynet([logits(inputs, e) for e in (1, 2, 3)], labels, [weight / 0.5 for weight in weights])

    spec = spec_with(local_exits="all", joint_loss="sum", exit_weights=weights, proximal_weight=proximal_weight)
    check_steps(make_model(), spec, 1, "c", literal)


@PROXIMAL
@pytest.mark.parametrize("make_model", [in_depth, in_width])
@pytest.mark.parametrize(("node", "exits"), [("a", (1,)), ("b", (1, 2)), ("c", (1, 2, 3))])
def test_depthfl_lets_all_exits_of_a_node_teach_each_other(make_model, node, exits, proximal_weight):
    spec = spec_with(
        rounds=10,
        weighting="equal-weight",
        local_exits="all",
        joint_loss="sum",
        objective="mutual",
        distillation=DistillationSpec(ramp=0.5),
        proximal_weight=proximal_weight,
    )

    def literal(logits, inputs, labels, drawn):
        return peers.depthfl([logits(inputs, exit) for exit in exits], labels, peers.ramp(4, 5.0))

    task, _ = check_steps(make_model(), spec, 4, node, literal)
    assert task.exits == exits


@PROXIMAL
@pytest.mark.parametrize("make_model", [in_depth, in_width])
@pytest.mark.parametrize(("round", "gamma"), [(2, 0.0), (3, 0.4)])
@pytest.mark.parametrize(("node", "exits"), [("b", (1, 2)), ("c", (1, 2, 3))])
def test_scalefl_weighs_exits_by_depth_and_lets_the_deepest_teach(
    make_model, node, exits, round, gamma, proximal_weight
):
    """From a quarter of the rounds on."""
    spec = spec_with(
        rounds=8,
        weighting="linear-depth",
        local_exits="all",
        joint_loss="mean",
        objective="from-deepest",
        distillation=DistillationSpec(weight=0.4, temperature=3.0, start=0.25),
        proximal_weight=proximal_weight,
    )

    def literal(logits, inputs, labels, drawn):
        return peers.scalefl([logits(inputs, exit) for exit in exits], labels, gamma, 3.0)

    check_steps(make_model(), spec, round, node, literal)


@PROXIMAL
def test_fjord_draws_a_width_for_every_step(proximal_weight):
    def literal(logits, inputs, labels, exits):
        (exit,) = exits
        return peers.cross_entropy(logits(inputs, exit), labels)

    model, spec = in_width(), spec_with(local_exits="each-step", seed=1, proximal_weight=proximal_weight)
    task, update = check_steps(model, spec, 1, "c", literal)
    drawn = {exit for (exit,) in step_exits(task, spec, STEPS)}
    assert 1 < len(drawn) < 4
    assert [loss is None for loss in update.losses] == [exit not in drawn for exit in (1, 2, 3)]
    assert {name: delta.shape for name, delta in update.delta.items()} == {"weight": (3, 5), "bias": (3,)}


@PROXIMAL
def test_fjord_may_distil_from_the_widest_of_the_node(proximal_weight):
    def literal(logits, inputs, labels, exits):
        assert exits[-1] == 3
        return peers.fjord(logits(inputs, 3), logits(inputs, exits[0]), labels)

    spec = spec_with(local_exits="each-step", objective="soft-labels", seed=2, proximal_weight=proximal_weight)
    task, _ = check_steps(in_width(), spec, 1, "c", literal)
    assert any(len(exits) == 2 for exits in step_exits(task, spec, STEPS))


def test_fjord_draws_all_widths_of_a_node_alike():
    tasks = [Task(1, "node", (1, 2, 3), (1.0,) * 3, 1.0, seed) for seed in range(300)]
    drawn = Counter(exit for task in tasks for (exit,) in step_exits(task, spec_with(local_exits="each-step"), 10))
    assert [drawn[exit] / 3000 for exit in (1, 2, 3)] == pytest.approx([1 / 3] * 3, abs=0.03)


def test_fjord_trains_every_width_whatever_it_serves():
    task = tasks_of(plan_of(in_width(), spec_with(local_exits="each-step", exit_weights=(0.0, 0.0, 1.0))))["c"]
    assert task.exits == (1, 2, 3)
    assert task.loss_weights == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("server_step", ["sample-mean", "node-mean"])
def test_fedavg_is_the_mean_of_what_the_nodes_have_trained(server_step):
    """Two rounds of nodes that all hold the whole model, against a literal loop."""
    model, spec = in_width(), spec_with(rounds=2, local_exits="one", server_step=server_step)
    trainer = linear_trainer(model, DATA, HELD, spec, STEPS)
    plan = plan_of(model, spec, exits=(3, 3, 3))
    *_, (state, _) = run_rounds(plan, initial_state(model), SerialBackend(trainer))
    w = initial_state(model).params
    for round in (1, 2):
        local, shares = [], []
        for node, task in tasks_of(plan, round).items():
            batches = itertools.islice(trainer.data.batches(node, SIZE, seed=task.seed), STEPS)
            losses = [
                lambda logits, batch=batch: peers.cross_entropy(logits(batch.inputs, 3), batch.labels)
                for batch in batches
            ]
            local.append(peers.local_sgd(model, w, losses, RATE))
            shares.append(len(HELD[node]) if server_step == "sample-mean" else 1)
        w = {name: sum(s * each[name] for s, each in zip(shares, local, strict=True)) / sum(shares) for name in w}
    for name, value in w.items():
        torch.testing.assert_close(state.params[name], value, rtol=1e-9, atol=1e-12)


def test_weights_linear_in_depth():
    profile = ExitProfile(np.array([0.8, 0.15, 0.05]), np.ones(3), np.ones(1), np.ones((1, 3)), 1)
    assert linear_depth(profile, 1).tolist() == pytest.approx([1 / 6, 2 / 6, 3 / 6])


def test_one_exit_alone_has_nobody_to_learn_from():
    logits, labels = [torch.randn(4, 3)], torch.tensor([0, 1, 2, 0])
    for objective in ("mutual", "from-deepest", "soft-labels"):
        (loss,) = make_objective(spec_with(objective=objective), 5)(logits, labels)
        assert loss == nn.functional.cross_entropy(logits[0], labels)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"objective": {"proximal_weight": -1.0}}, "objective.proximal_weight: must be from 0 to 1e+30, got -1.0"),
        ({"distillation": {"temperature": 0.0}}, "distillation.temperature: must be above 0"),
        ({"distillation": {"start": 1.5}}, "distillation.start: must be from 0 to 1, got 1.5"),
        ({"distillation": {"ramp": -0.5}}, "distillation.ramp: must be from 0 to 1"),
        (
            {"objective": {"name": "soft-labels"}, "distillation": {"weight": 2.0}},
            "distillation.weight: is the share of the soft labels here, 0 to 1",
        ),
        ({"exit_weights": [0.0, 0.0]}, "exit_weights: must be 0 or more, and not all 0"),
        ({"local_exits": "each-step", "help_probability": 0.2}, "help_probability: is about which one exit"),
    ],
)
def test_what_is_not_possible_is_refused_with_a_sentence(fields, sentence):
    with pytest.raises(ConfigError) as caught:
        decode(TrainingSpec, fields)
    assert sentence in str(caught.value)
