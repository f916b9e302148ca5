"""Systems of earlier versions: what a run directory or a bundle keeps of them loads, what a person writes is refused."""

import tomllib

import pytest

from exitflow.errors import ConfigError
from exitflow.federated.training_spec import DistillationSpec, ObjectiveSpec, OptimiserSpec, ScheduleSpec
from exitflow.system.older import modernised
from exitflow.system.system import decode_system, load_resolved, load_system, same_training

NODES = """
[[nodes]]
name = "device-0"
exit = 1
arrival_rate = 1.0
parents = [{ name = "cloud-0", max_transfer_rate = 1.0 }]

[[nodes]]
name = "cloud-0"
exit = 2
"""
OLD = (
    """
name = "old"

[training]
weighting = "linear-depth"
exit_weights = []
rounds = 800
local_epochs = 1
local_steps = 3
batch_size = 32
learning_rate = 0.2
final_learning_rate = 0.002
schedule = "constant"
warmup_rounds = 40
momentum = 0.8
momentum_between_rounds = "keep"
weight_decay = 0.0004
help_probability = 0.0
participation = 1.0
local_exits = "all"
joint_loss = "mean"
objective = "from-deepest"
distillation_weight = 0.05
distillation_temperature = 3.0
distillation_start = 0.25
distillation_ramp = 0.1
proximal_weight = 0.3
server_step = "node-mean"
server_learning_rate = 1.0
on_nonfinite = "drop"
evaluate_every = 80
seed = 9

[training.sampling]
"""
    + NODES
)


def old_file(tmp_path, text):
    path = tmp_path / "spec.toml"
    path.write_text(text)
    return path


def test_every_key_of_an_older_training_is_found_in_its_table(tmp_path):
    training = load_resolved(old_file(tmp_path, OLD)).training
    assert training.schedule == ScheduleSpec("constant", final_learning_rate=0.002, warmup_rounds=40)
    assert training.optimiser == OptimiserSpec(momentum=0.8, momentum_between_rounds="keep", weight_decay=0.0004)
    assert training.objective == ObjectiveSpec("from-deepest", joint_loss="mean", proximal_weight=0.3)
    assert training.distillation == DistillationSpec(weight=0.05, temperature=3.0, start=0.25, ramp=0.1)
    assert (training.weighting, training.rounds, training.learning_rate) == ("linear-depth", 800, 0.2)


def test_what_is_modern_stays_as_it_is(tmp_path):
    system = load_resolved(old_file(tmp_path, OLD))
    table = tomllib.loads(system.to_toml())
    assert modernised(table) == table
    assert same_training(decode_system(table), system)
    assert modernised({"name": "no training"}) == {"name": "no training"}


@pytest.mark.parametrize(
    ("weighting", "now"),
    [("adaptive", "removed:adaptive"), ("bound-min", "exitflow.federated.weighting:bound_min")],
)
def test_a_run_with_a_removed_weighting_loads(tmp_path, weighting, now):
    training = load_resolved(old_file(tmp_path, OLD.replace("linear-depth", weighting))).training
    assert training.weighting == now


def test_a_run_with_a_weighting_that_is_gone_cannot_be_gone_on_with(tmp_path):
    training = load_resolved(old_file(tmp_path, OLD.replace("linear-depth", "adaptive"))).training
    with pytest.raises(ConfigError, match=r"training.weighting: 'adaptive' has been removed; .* not be gone on with"):
        _ = training.exit_weighting


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("server_learning_rate = 0.5", "training.server_learning_rate: has been removed: TrainingPlan"),
        ("projection_radius = 3.0", "training.projection_radius: has been removed: TrainingPlan"),
        ("on_nonfinite = 'stop'", "training.on_nonfinite: has been removed: an update that holds NaN"),
        ("strong_convexity = 0.1", "training.strong_convexity: has been removed: explain"),
    ],
)
def test_a_run_that_a_removed_key_has_changed_is_refused(tmp_path, line, sentence):
    """As it was trained cannot be said any more."""
    text = OLD.replace("server_learning_rate = 1.0\n", "").replace('on_nonfinite = "drop"\n', "")
    with pytest.raises(ConfigError) as caught:
        load_resolved(old_file(tmp_path, text.replace("[training]\n", f"[training]\n{line}\n")))
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("momentum = 0.9", "training.momentum: is now momentum in the table [training.optimiser]"),
        ("distillation_ramp = 0.5", "training.distillation_ramp: is now ramp in the table [training.distillation]"),
        ("schedule = 'constant'", "training.schedule: is a table now: write training.schedule.name = 'constant'"),
        ("objective = 'mutual'", "training.objective: is a table now: write training.objective.name = 'mutual'"),
        ("server_learning_rate = 1.0", "training.server_learning_rate: has been removed: TrainingPlan"),
        ("on_nonfinite = 'drop'", "training.on_nonfinite: has been removed: an update that holds NaN or infinity is"),
        ("smoothness = 3.0", "training.smoothness: has been removed: explain(system, curvature=(L, mu))"),
        ("weighting = 'adaptive'", "training.weighting: 'adaptive' has been removed: it did no better"),
        ("weighting = 'bound-min'", "'exitflow.federated.weighting:bound_min'"),
        ("schedule = { name = 'theorem' }", "training.schedule.name: 'theorem' has been removed"),
    ],
)
def test_a_person_is_told_what_stands_there_today(tmp_path, line, sentence):
    with pytest.raises(ConfigError) as caught:
        load_system(old_file(tmp_path, f"[training]\n{line}\n{NODES}"))
    assert sentence in str(caught.value)
    assert "spec.toml" in str(caught.value)


def test_there_are_at_most_twenty_keys_to_choose_from():
    table = tomllib.loads(load_system("paper-7").to_toml())["training"]
    unset = {"local_steps", "local_exits", "answers"}
    assert len({*table, *unset}) <= 20
