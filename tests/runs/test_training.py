import json
import math
import subprocess
import sys
import types
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from exitflow.errors import ConfigError, DataError, RunError, TrainingError
from exitflow.evaluation.blending import blended, fit_blends
from exitflow.evaluation.outputs import exit_outputs
from exitflow.federated.weighting import WEIGHTINGS
from exitflow.models.nested import EarlyExitNetwork
from exitflow.runs.runs import Run, evaluate
from exitflow.runs.training import resume, train
from exitflow.system.assembly import Assembly
from exitflow.system.system import load_system
from tests.runs.cut_off import DATA, same_weights, unfinished
from tests.small import TINY, image_dataset, tiny_system


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_a_run_leaves_spec_records_and_model(tmp_path, weighting):
    system = tiny_system(f"training.weighting={weighting}")
    run = train(system, tmp_path / "run", dataset=DATA)
    assert run.finished
    assert run.system == system
    assert {path.name for path in run.path.iterdir()} == {
        ".lock",
        "model.safetensors",
        "profile.json",
        "rounds.jsonl",
        "spec.toml",
    }
    assert [record.round for record in run.records] == [1, 2, 3]
    for record in run.records:
        assert sum(record.exit_weights) == pytest.approx(1.0)
        assert set(record.losses) == {"1", "2", "3"}
        assert record.seconds > 0
        assert record.num_tasks == 7
        assert record.dropped == ()
        assert (record.validation is not None) == (record.round in (2, 3))
    assert all(tensor.isfinite().all() for tensor in run.state().tensors.values())


def test_a_record_counts_the_bytes_of_what_each_exit_covers(tmp_path):
    run = train(tiny_system(), tmp_path / "run", dataset=DATA)
    model = run.model(DATA)
    sizes = [sum(4 * model.state_dict()[name].numel() for name in model.coverage(exit)) for exit in (1, 2)]
    links = run.records[0].link_bytes
    assert links["device-0->edge-0"] == sizes[0]
    assert links["edge-0->cloud-0"] == 2 * sizes[0] + sizes[1]


def test_the_profile_says_what_the_weighting_knew(tmp_path):
    run = train(tiny_system("training.weighting=balanced-adj"), tmp_path / "run", dataset=DATA)
    profile = json.loads((run.path / "profile.json").read_text())
    assert len(profile["gradient_variance"]) == 3
    assert min(profile["gradient_variance"]) > 0
    assert profile["node_samples"]["cloud-0"] == 32
    least_noise = np.array([4.0, 2.0, 1.0]) / np.array(profile["gradient_variance"]) ** 2
    weights = (np.array([0.8, 0.15, 0.05]) + least_noise / least_noise.sum()) / 2
    assert run.records[0].exit_weights == pytest.approx(weights.tolist())


def test_the_profile_of_bound_min_says_what_its_weights_cost(tmp_path):
    run = train(
        tiny_system("training.weighting=exitflow.federated.weighting:bound_min"), tmp_path / "run", dataset=DATA
    )
    profile = json.loads((run.path / "profile.json").read_text())
    assert set(profile["error_terms"]) == {"generalisation", "bias", "noise", "sampling", "total"}
    assert profile["gradients"]["variance"][0][0] > 0
    assert profile["gradients"]["variance"][0][1:] == [None, None]  # a device trains exit 1 only
    assert all(record.exit_weights == run.records[0].exit_weights for record in run.records)


@pytest.mark.heavy
def test_the_seed_decides_everything(tmp_path):
    one, same, other = (
        train(tiny_system(f"training.seed={seed}"), tmp_path / name, dataset=DATA)
        for name, seed in (("one", 1), ("same", 1), ("other", 2))
    )
    assert same_weights(one, same)
    assert (one.path / "model.safetensors").read_bytes() == (same.path / "model.safetensors").read_bytes()
    assert not same_weights(one, other)


def test_every_node_makes_the_steps_that_one_pass_of_the_largest_takes(tmp_path):
    """The cloud has 32 of 96 samples: a pass in batches of 8 is 4 steps, and the devices make 4 as well."""
    system = tiny_system()
    from dataclasses import replace

    system = replace(system, training=replace(system.training, local_steps=None))
    run = train(system, tmp_path / "run", dataset=DATA)
    assert json.loads((run.path / "profile.json").read_text())["num_steps"] == 4


@pytest.mark.heavy
def test_training_does_not_load_the_compiler(tmp_path):
    """Which PyTorch would do unasked, for seconds, in every process that trains."""
    code = f"""
import sys
from exitflow import train
from tests.small import TINY, image_dataset, tiny_system
train(tiny_system("training.weighting=auto"), {str(tmp_path / "run")!r}, dataset=image_dataset(96))
print("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "False\n"


def test_a_directory_that_holds_something_is_never_written_over(tmp_path):
    train(tiny_system(), tmp_path / "run", dataset=DATA)
    with pytest.raises(RunError, match="holds a run already; resume it with --resume"):
        train(tiny_system(), tmp_path / "run", dataset=DATA)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("precious")
    with pytest.raises(RunError, match="is not an empty directory"):
        train(tiny_system(), tmp_path / "other", dataset=DATA)
    assert (tmp_path / "other" / "thesis.txt").read_text() == "precious"
    with pytest.raises(RunError, match="is not an empty directory"):
        train(tiny_system(), tmp_path / "other" / "thesis.txt", dataset=DATA)


def test_a_damaged_model_is_named(tmp_path):
    run = train(tiny_system(), tmp_path / "run", dataset=DATA)
    run.model_file.write_bytes(b"garbage")
    with pytest.raises(RunError, match=r"model.safetensors: cannot be read"):
        evaluate(run, dataset=DATA)


def test_a_model_that_does_not_fit_the_spec_is_named(tmp_path):
    run = train(tiny_system(), tmp_path / "run", dataset=DATA)
    (run.path / "spec.toml").write_text((run.path / "spec.toml").read_text().replace("width = 2", "width = 3"))
    with pytest.raises(RunError, match=r"the weights do not fit the model in spec.toml"):
        evaluate(run.path, dataset=DATA)


def test_data_that_does_not_fit_the_model_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ConfigError, match="does not fit data set 'random'"):
        train(tiny_system(), tmp_path / "run", dataset=image_dataset(96, size=6))
    assert not (tmp_path / "run").exists()


def test_a_run_finds_its_data_from_anywhere(tmp_path, monkeypatch):
    own = tmp_path / "here" / "mine"
    own.mkdir(parents=True)
    (own / "dataset.toml").write_text("num_classes = 3\nmean = [128.0]\nstd = [64.0]\n")
    for part in ("train", "validation", "test"):
        split = getattr(DATA, part)
        np.savez(own / f"{part}.npz", inputs=split.inputs.numpy(), labels=split.labels.numpy())
    monkeypatch.chdir(tmp_path / "here")
    train(tiny_system("data.name=own", "data.dir=mine"), "run")
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    run = Run(tmp_path / "here" / "run")
    assert run.system.data.dir == str(own)
    assert 0 <= evaluate(run).accuracy <= 1


def test_too_few_samples_for_an_exit_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ConfigError, match="exit 1 has no data to train on"):
        train(tiny_system("data.layer_shares=[0.01, 1, 1]"), tmp_path / "run", dataset=DATA)
    assert not (tmp_path / "run").exists()


ENDS_IN_ONE_PLACE = ("model.blocks=[1,1,1,1]", "model.strides=[1,2,2,2]", "model.exit_blocks=[1,2,4]")  # 1x1, of 8x8


@pytest.mark.parametrize(("num_samples", "override"), [(96, "training.batch_size=1"), (9, "data.layer_shares=[4,4,1]")])
def test_one_sample_at_a_time_is_refused_where_batch_norm_needs_two(tmp_path, num_samples, override):
    system = tiny_system(*ENDS_IN_ONE_PLACE, override)
    problem = r"training\.batch_size: node 'cloud-0', with \d+ samples, would train exit 3 on one at a time"
    with pytest.raises(ConfigError, match=problem):
        train(system, tmp_path / "run", dataset=image_dataset(num_samples))
    assert not (tmp_path / "run").exists()


def test_three_samples_are_too_few_to_measure_gradients(tmp_path):
    system = tiny_system(*ENDS_IN_ONE_PLACE, "data.layer_shares=[12,12,3]", "training.weighting=balanced-adj")
    with pytest.raises(TrainingError, match="exit 1: the nodes that train it have too few samples to measure"):
        train(system, tmp_path / "run", dataset=image_dataset(27))


def test_evaluation_at_another_setting_and_confidence(tmp_path):
    run = train(tiny_system(), tmp_path / "run", dataset=DATA)
    outputs = run.outputs(DATA)
    planned = evaluate(run, outputs=outputs)
    assert [served.rate for served in planned.exits] == pytest.approx([80.0, 15.0, 5.0])
    other = evaluate(run, serving="5-15-80", confidence="margin", outputs=outputs)
    assert [served.rate for served in other.exits] == pytest.approx([5.0, 15.0, 80.0])
    assert other.confidence == "margin"
    assert other.exit_accuracy == planned.exit_accuracy


@pytest.mark.parametrize(
    ("overrides", "together"),
    [
        (["training.weighting=auto"], True),
        (["training.weighting=serving-rate"], False),
        (["training.weighting=auto", "training.answers=own"], False),
        (["training.weighting=serving-rate", "training.answers=blended"], True),
    ],
)
def test_exits_answer_together_under_auto_or_when_told_to(tmp_path, overrides, together):
    run = train(tiny_system(*overrides), tmp_path / "run", dataset=DATA)
    model = run.model(DATA)
    on_test, on_validation = (exit_outputs(model, part, DATA.preparation) for part in (DATA.test, DATA.validation))
    expected = blended(on_test, fit_blends(on_validation)) if together else on_test
    assert np.array_equal(run.outputs(DATA).logits, expected.logits)
    assert together != np.array_equal(run.outputs(DATA).logits, on_test.logits)
    on_validation = blended(on_validation, fit_blends(on_validation)) if together else on_validation
    assert run.records[-1].validation.exit_accuracy == tuple(on_validation.exit_accuracy.tolist())


def test_answers_are_never_fitted_to_other_data_than_validation_data(tmp_path):
    run = train(tiny_system("training.weighting=auto"), tmp_path / "run", dataset=DATA)
    lacking = without(DATA, "validation")
    with pytest.raises(DataError, match=r"whose exits answer together .* needs validation data, and there are none"):
        evaluate(run, dataset=lacking)


def without(dataset, part):
    return replace(dataset, **{part: getattr(dataset, part)[torch.arange(0)]}, partial=True)


def test_a_training_without_validation_data_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(DataError, match=r"a training needs validation data, and there are none; .* validation\.npz"):
        train(tiny_system("training.weighting=serving-rate"), tmp_path / "run", dataset=without(DATA, "validation"))
    assert not (tmp_path / "run").exists()


def test_a_training_whose_validation_data_are_gone_is_not_gone_on_with(tmp_path):
    run = unfinished(tmp_path / "run", "training.weighting=serving-rate")
    with pytest.raises(DataError, match="a training needs validation data"):
        resume(run.path, dataset=without(DATA, "validation"))


def test_an_evaluation_without_test_data_is_one_sentence(tmp_path):
    run = train(tiny_system("training.weighting=serving-rate"), tmp_path / "run", dataset=DATA)
    with pytest.raises(DataError, match=r"an evaluation needs test data, and there are none; .* test\.npz"):
        evaluate(run, dataset=without(DATA, "test"))


@pytest.mark.heavy
def test_training_learns_digits(tmp_path):
    """A few seconds of real training: far above the 10 % of guessing, at every exit."""
    system = tiny_system(
        "model.width=6", "training.rounds=6", "training.local_steps=10", "training.batch_size=32", "model.heads=grid"
    )
    result = evaluate(train(system, tmp_path / "run", backend="processes"))
    assert min(result.exit_accuracy) > 0.5
    assert result.accuracy > 0.6


@pytest.fixture
def own(monkeypatch):
    """A module with a network of the user's own."""
    module = types.ModuleType("own_network")
    monkeypatch.setitem(sys.modules, "own_network", module)

    def build(shape, classes):
        first = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 8), nn.ReLU())
        stages = [first, nn.Linear(8, 8), nn.Linear(8, 8)]
        return EarlyExitNetwork(stages, [nn.Linear(8, classes) for _ in stages])

    module.build = build
    return module


OWN = ('model={family="custom",factory="own_network:build"}', *(each for each in TINY if "model" not in each))


@pytest.mark.parametrize("weighting", ["auto", "balanced-adj"])
def test_frozen_parts_of_a_network_stay_as_they_are(own, tmp_path, weighting):
    build = own.build

    def frozen(shape, classes):
        network = build(shape, classes)
        for param in network.stages["1"].parameters():
            param.requires_grad_(False)
        return network

    own.build = frozen
    system = load_system("paper-7", [*OWN, f"training.weighting={weighting}"])
    run = train(system, tmp_path / "run", dataset=DATA)
    begun = Assembly(system, DATA)
    before, after = begun.initial_state().params, run.state().params
    assert not any(name.startswith("stages.1.") for name in before)  # what is frozen does not travel
    assert all(not torch.equal(before[name], after[name]) for name in before)
    for kept, param in zip(run.model(DATA).stages["1"].parameters(), begun.model.stages["1"].parameters(), strict=True):
        assert torch.equal(kept, param)


def test_tensors_that_cannot_be_averaged_are_refused(own, tmp_path):
    build = own.build

    def counting(shape, classes):
        network = build(shape, classes)
        network.stages["1"].register_buffer("count", torch.zeros((), dtype=torch.int64))
        return network

    own.build = counting
    system = load_system("paper-7", OWN)
    with pytest.raises(ConfigError, match=r"model: tensor '.*count' of the network is torch.int64: what is averaged"):
        train(system, tmp_path / "run", dataset=DATA)
    assert not (tmp_path / "run").exists()
