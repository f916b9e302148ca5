"""The peers on one bench: what each of them makes of a system, and that nothing else changes."""

import tomllib
from dataclasses import replace

import numpy as np
import pytest
import torch

from exitflow.errors import ConfigError
from exitflow.evaluation.accuracy import evaluate_plan
from exitflow.federated.sampling import sample_tasks
from exitflow.federated.training_spec import DistillationSpec, ObjectiveSpec
from exitflow.federated.weighting import WEIGHTINGS
from exitflow.models.specs import DepthWidthResNet, SeparateNetworks, SlimResNet
from exitflow.runs.comparison import compare
from exitflow.runs.methods import METHODS, apply_method, serving_setting
from exitflow.runs.runs import evaluate
from exitflow.runs.training import train
from exitflow.system.assembly import Assembly
from exitflow.system.system import System, decode_system, load_system
from exitflow.tensors import num_bytes, take
from exitflow.topology.graph import Link, Node, Topology
from exitflow.topology.rates import serving_plan
from paper.tables import NEUTRAL_SETTING, TABLES, distinct_trainings
from tests.small import image_dataset, tiny_system

DATA = image_dataset(96)
BASE = tiny_system("training.rounds=2", "model.width=3")


@pytest.mark.parametrize("name", METHODS)
def test_a_method_leaves_equal_what_has_to_be_equal(name):
    system = apply_method(name, BASE)
    assert decode_system(tomllib.loads(system.to_toml())) == system
    kept = ("rounds", "local_steps", "batch_size", "learning_rate", "schedule", "optimiser", "seed")
    assert [getattr(system.training, key) for key in kept] == [getattr(BASE.training, key) for key in kept]
    assert [node.name for node in system.topology.nodes] == [node.name for node in BASE.topology.nodes]
    assert system.data.name == BASE.data.name
    if name != "branchynet":  # which has all data in one place
        assert Assembly(system, DATA).samples == Assembly(BASE, DATA).samples


@pytest.mark.parametrize("name", METHODS)
def test_no_exit_costs_more_than_in_the_system_itself(name):
    system = load_system("paper-7:80-15-5")
    assert_within_budget(apply_method(name, system), system, DATA, tolerance=0.02)


@pytest.mark.heavy
@pytest.mark.parametrize(("dataset", "num_classes"), [("cifar10", 10), ("cifar100", 100)])
def test_no_exit_of_the_table_of_peers_costs_more_than_in_ours(dataset, num_classes):
    cells = [cell for cell in TABLES["peers"].cells([dataset]) if cell.setting == NEUTRAL_SETTING]
    ours, *peers = (cell.system(9, "small") for cell in cells)
    images = image_dataset(96, channels=3, size=32, num_classes=num_classes)
    for system in peers:
        assert_within_budget(system, ours, images, tolerance=0.01)


def assert_within_budget(system, ours, dataset, *, tolerance):
    budget = [cost.multiply_adds for cost in Assembly(ours, dataset).exit_costs]
    costs = [cost.multiply_adds for cost in Assembly(system, dataset).exit_costs]
    exits = system.model.exits if system.model.family == "separate" else (1, 2, 3)
    for exit, cost in zip(exits, costs, strict=True):
        assert cost <= budget[exit - 1] * (1 + tolerance), (system.model, exit, cost, budget)


PLAIN = {
    "weighting": "equal-weight",
    "exit_weights": (),
    "help_probability": 0.0,
    "sampling": {},
    "local_exits": "one",
    "objective": ObjectiveSpec("labels", joint_loss="element-mean", proximal_weight=0.0),
    "distillation": DistillationSpec(weight=1.0, temperature=1.0, start=0.0, ramp=0.0),
    "server_step": "sample-mean",
}
SUM = ObjectiveSpec(joint_loss="sum")
OURS = {"weighting": "auto", "local_exits": "all", "server_step": "coverage"}
SCALEFL = {
    "weighting": "linear-depth",
    "local_exits": "all",
    "objective": ObjectiveSpec("from-deepest", joint_loss="mean"),
    "distillation": DistillationSpec(weight=0.05, temperature=3.0, start=0.25),
    "server_step": "node-mean",
}
EARLY_EXITS = {"family": "early-exit-resnet", "exit_blocks": (1, 2, 3), "heads": ("grid", "gap", "gap")}
SLIM = {"family": "slim-resnet", "widths": (1 / 3, 2 / 3, 1.0), "head": "gap", "scaler": False}
DEFINITIONS = {  # what each method trains beside PLAIN, by its paper, and with which network
    "exitflow": (OURS, EARLY_EXITS),
    "algorithm-1": ({"weighting": "serving-rate", "server_step": "paper"}, EARLY_EXITS),
    "fjord": ({"local_exits": "each-step"}, SLIM),
    "fjord-kd": ({"local_exits": "each-step", "objective": ObjectiveSpec("soft-labels")}, SLIM),
    "heterofl": ({"server_step": "node-mean"}, SLIM | {"scaler": True}),
    "depthfl": (
        {
            "local_exits": "all",
            "objective": ObjectiveSpec("mutual", joint_loss="sum"),
            "distillation": DistillationSpec(ramp=0.3),
            "server_step": "node-mean",
        },
        EARLY_EXITS,
    ),
    "scalefl": (SCALEFL, EARLY_EXITS | {"family": "depth-width", "widths": (1 / 3, 2 / 3, 1.0), "scaler": False}),
    "fedavg": ({}, {"family": "common", "exit": 1}),
    "fedprox": ({"objective": ObjectiveSpec(proximal_weight=0.01)}, {"family": "common", "exit": 1}),
    "branchynet": ({"local_exits": "all", "objective": SUM, "exit_weights": (1.0, 2.0, 3.0)}, EARLY_EXITS),
    "local-only": ({}, {"family": "separate", "exits": (1, 1, 1, 1, 2, 2, 3)}),
    "all-local": (OURS, EARLY_EXITS),
    "all-cloud": (OURS, EARLY_EXITS),
}
SERVED = {"all-local": "100-0-0", "all-cloud": "0-0-100"}  # the others: as the system is


@pytest.mark.parametrize("name", METHODS)
def test_what_defines_a_method(name):
    """Whatever the system says of it."""
    odd = replace(
        BASE,
        model=replace(BASE.model, heads=("grid", "gap", "gap")),
        training=replace(
            BASE.training,
            weighting="balanced-adj",
            exit_weights=(1.0, 2.0, 3.0),
            help_probability=0.1,
            sampling={node.name: (1 / node.exit,) * node.exit for node in BASE.topology.nodes},
            local_exits=None,
            objective=ObjectiveSpec("mutual", joint_loss="mean"),
            distillation=DistillationSpec(weight=0.7, temperature=2.0, start=0.1, ramp=0.2),
            server_step="paper",
        ),
    )
    system = apply_method(name, odd)
    training, model = DEFINITIONS[name]
    assert {key: getattr(system.training, key) for key in PLAIN} == PLAIN | training
    assert {key: getattr(system.model, key) for key in model} == model
    assert getattr(system.model, "network", odd.model) == odd.model
    served = SERVED.get(name, "80-15-5")
    if name != "local-only":  # where exits are nodes
        assert serving_plan(system.topology).exit_share * 100 == pytest.approx([float(x) for x in served.split("-")])
    assert serving_setting(name, "80-15-5") == served
    assert METHODS[name].knows_serving_rates == (name in ("exitflow", "algorithm-1"))


def test_the_proximal_term_of_the_system_stays_with_every_method():
    held = tiny_system("training.objective.proximal_weight=0.3")
    assert {apply_method(name, held).training.objective.proximal_weight for name in METHODS} == {0.3}


def test_a_family_that_fits_already_is_kept():
    slim = replace(BASE, model=SlimResNet(width=4, widths=(0.2, 0.4, 1.0)))
    assert apply_method("fjord", slim).model == slim.model
    both = replace(BASE, model=DepthWidthResNet(width=4))
    assert apply_method("scalefl", both).model == both.model
    with pytest.raises(ConfigError, match=r"method 'fjord': needs model family 'slim-resnet', .* got 'depth-width'"):
        apply_method("fjord", both)


def test_local_only_is_every_node_on_its_own(tmp_path):
    """Against training each node's network round by round, with no server in between."""
    system = apply_method("local-only", BASE)
    run = train(system, tmp_path / "run", dataset=DATA)
    assembly = Assembly(system, DATA)
    trainer, state = assembly.trainer(tmp_path / "unused"), run.state()
    base = Assembly(BASE, DATA).trainer(tmp_path / "unused")
    assert all(torch.equal(trainer.data.indices[node], base.data.indices[node]) for node in base.data.indices)
    for node in system.topology.nodes:
        own = assembly.initial_state()
        for round in (1, 2):
            tasks = sample_tasks([node.name], np.eye(7)[[node.exit - 1]], round=round, seed=system.training.seed)
            update = trainer.train(own, tasks[0])
            params = {
                name: value + update.delta[name] if name in update.delta else value
                for name, value in own.params.items()
            }
            own = replace(own, round=round, params=params, buffers={**own.buffers, **update.buffers})
        for name in assembly.model.coverage(node.exit):
            torch.testing.assert_close(state.tensors[name], own.tensors[name], rtol=1e-5, atol=1e-6)
    assert run.costs.bytes_sent == 0


CHAIN = Topology(
    (Node("device-0", 1, 1.0, (Link("edge-0"),)), Node("edge-0", 2, 0.0, (Link("cloud-0"),)), Node("cloud-0", 3))
)


@pytest.mark.parametrize(
    ("topology", "local_exits", "sent"),
    [
        (BASE.topology, "one", {"device-0->edge-0": (1,), "edge-0->cloud-0": (1, 1, 2)}),
        (CHAIN, "one", {}),
        (CHAIN, "all", {"device-0->edge-0": (1,), "edge-0->cloud-0": (1, 1, 2)}),
    ],
)
def test_separate_networks_are_sent_where_several_nodes_train_one(tmp_path, topology, local_exits, sent):
    training = replace(BASE.training, weighting="equal-weight", local_exits=local_exits, rounds=1)
    system = replace(BASE, topology=topology, model=SeparateNetworks(network=BASE.model), training=training)
    run = train(system, tmp_path / "run", dataset=DATA)
    tensors = run.state().tensors
    size = {exit: num_bytes(take(tensors, Assembly(system, DATA).model.coverage(exit))) for exit in (1, 2, 3)}
    found = run.records[0].link_bytes
    expected = {link: sum(size[exit] for exit in exits) for link, exits in sent.items()}
    assert {link: found[link] for link in expected} == expected
    assert bool(found) == bool(sent)


def test_a_separate_system_is_served_by_layers(tmp_path):
    run = train(apply_method("local-only", BASE), tmp_path / "run", dataset=DATA)
    found = evaluate(run, serving="20-30-50", dataset=DATA)
    rates = {name: served.rate for name, served in found.nodes.items()}
    assert sum(rate for name, rate in rates.items() if name.startswith("device")) == pytest.approx(20)
    assert sum(rate for name, rate in rates.items() if name.startswith("edge")) == pytest.approx(30)
    assert rates["cloud-0"] == pytest.approx(50)


def test_the_two_ends_are_what_one_exit_answers_alone(tmp_path):
    for name, exit in (("all-local", 0), ("all-cloud", 2)):
        run = train(apply_method(name, BASE), tmp_path / name, dataset=DATA)
        outputs = run.outputs(DATA)
        found = evaluate_plan(outputs, run.system.topology)
        assert found.accuracy == pytest.approx(outputs.exit_accuracy[exit])
    assert serving_setting("all-local", "80-15-5") == "100-0-0"
    assert serving_setting("all-cloud", "80-15-5") == "0-0-100"
    assert serving_setting("fjord", "80-15-5") == "80-15-5"


def test_branchynet_needs_one_place():
    assert apply_method("branchynet", BASE).data.layer_shares == (0.0, 0.0, 1.0)
    pair = System("pair", Topology((Node("a", 1, 1.0), Node("b", 1, 1.0))))
    with pytest.raises(ConfigError, match="method 'branchynet': trains in one place, but 2 nodes stand at the deepest"):
        apply_method("branchynet", pair)


@pytest.mark.heavy
def test_a_comparison_tells_accuracy_and_costs(tmp_path):
    methods = ["exitflow", "fjord", "local-only"]
    result = compare(BASE, ["equal-weight"], [1], methods=methods, out=tmp_path, dataset=DATA)
    assert list(result.evaluations) == ["equal-weight", *methods]
    assert [len(result.exit_accuracy(name)) for name in result.evaluations] == [3, 3, 3, 3]
    assert result.bytes_sent("local-only") == 0 < result.bytes_sent("exitflow")
    found = result.to_json()
    assert set(found["methods"]) == set(methods)
    assert set(found["weightings"]) == {"equal-weight"}
    own = evaluate(tmp_path / "local-only-seed-1", dataset=DATA).exit_accuracy
    assert result.exit_accuracy("local-only")[0].mean == pytest.approx(np.mean(own[:4]))


def test_costs_by_hand(tmp_path):
    """FedAvg: every node gets and returns exit 1 each round, and computes it for every sample of its batches."""
    run = train(apply_method("fedavg", BASE), tmp_path / "run", dataset=DATA)
    assembly = Assembly(run.system, DATA)
    size = sum(tensor.numel() * 4 for tensor in assembly.initial_state().tensors.values())
    hops = 4 * 2 + 2 * 1  # devices are two links from the cloud, edge servers one
    assert run.costs.bytes_sent == 2 * 2 * hops * size
    batches = sum(min(8, samples) for samples in assembly.samples.values())
    assert run.costs.multiply_adds == 2 * 2 * batches * assembly.exit_costs[0].multiply_adds


def test_the_table_of_peers_holds_every_method_and_trains_what_ignores_the_setting_once():
    jobs = distinct_trainings([TABLES["peers"]], [9], "small", ["cifar10"])
    names = [job.name for job in jobs]
    assert len(names) == len(set(names)) == 2 * 7 + len(METHODS) - 2  # depthfl once, however it answers
    others = {job.name for job in distinct_trainings([TABLES["table1"], TABLES["ours"]], [9], "small", ["cifar10"])}
    assert len(set(names) & others) == 2 * 7  # auto and serving-rate
    served = {job.cells[0].row.method: job.served_as["80-15-5"] for job in jobs}
    assert served["all-cloud"] == "0-0-100"
    assert served["fjord"] == "80-15-5"


def test_auto_follows_the_data_under_coverage_and_the_traffic_under_the_papers_step():
    """Exit 1 serves almost nothing here, and all data can train it."""
    changes = ("training.weighting=auto", "training.local_exits=all")
    weights = {
        step: WEIGHTINGS["auto"](
            Assembly(tiny_system(*changes, f"training.server_step={step}", source="paper-7:5-15-80"), DATA).profile, 1
        )
        for step in ("coverage", "paper")
    }
    assert weights["coverage"].argmax() == 0
    assert weights["paper"].argmax() == 2
