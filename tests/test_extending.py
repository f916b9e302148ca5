"""Every part of docs/extending.md works as it stands there: named in a system, or given from Python."""

import importlib
import json
import logging
import re
import sys
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from exitflow import Dataset, OptimiserSpec, TrainingSpec, aggregate, evaluate
from exitflow.data.partition import own_partition
from exitflow.errors import ConfigError, MissingExtraError, RunError
from exitflow.federated.local import LocalTrainer
from exitflow.federated.schedules import make_schedule
from exitflow.runs.runs import Run
from exitflow.runs.training import resume, train
from exitflow.system.assembly import Assembly, dataset_of
from exitflow.system.system import own_parts
from tests.command import call
from tests.runs.cut_off import Stop, same_weights, stop_at
from tests.small import image_dataset, tiny_system

PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text()
DATA = image_dataset(96)


@pytest.fixture(scope="module", autouse=True)
def parts(tmp_path_factory):
    """The module my_parts, as the page has it."""
    folder = tmp_path_factory.mktemp("own")
    blocks = re.findall(r'^```python title="my_parts.py"\n(.*?)^```', PAGE, flags=re.DOTALL | re.MULTILINE)
    (folder / "my_parts.py").write_text("\n".join(blocks))
    sys.path.insert(0, str(folder))
    yield importlib.import_module("my_parts")
    sys.path.remove(str(folder))
    del sys.modules["my_parts"]


def trained(path, *overrides, **options):
    return train(tiny_system(*overrides), path, dataset=DATA, **options)


def test_a_weighting_of_ones_own_decides_the_weights(parts, tmp_path):
    run = trained(tmp_path / "run", "training.weighting=my_parts:by_need")
    profile = Assembly(run.system, DATA).profile
    assert run.records[0].exit_weights == tuple(parts.by_need(profile, 1).tolist())
    assert run.system.training.weighting == "my_parts:by_need"


def test_a_function_from_python_is_known_by_its_name(parts):
    assert TrainingSpec(weighting=parts.by_need) == TrainingSpec(weighting="my_parts:by_need")
    with pytest.raises(ConfigError, match=r"weighting: .* is not found under a name of its module"):
        TrainingSpec(weighting=lambda profile, round: profile.serve_share)


@pytest.mark.parametrize("name", ["nothing_here:by_need", "my_parts:nothing", "my_parts:np"])
def test_a_part_that_is_not_there_is_one_sentence_before_a_run_is_begun(tmp_path, name):
    with pytest.raises(ConfigError, match=r"training\.weighting: .*(cannot import|must be a function)"):
        trained(tmp_path / "run", f"training.weighting={name}")
    assert not (tmp_path / "run").exists()


def test_a_schedule_and_an_optimiser_of_ones_own_make_the_steps(parts, tmp_path):
    system = tiny_system("training.schedule.name=my_parts:stairs", "training.optimiser.name=my_parts:adam")
    schedule = make_schedule(replace(system.training, rounds=10), 2)
    assert [schedule(round, 0) for round in (1, 8, 9)] == pytest.approx([0.1, 0.1, 0.01])
    trainer: LocalTrainer = Assembly(system, DATA).trainer(tmp_path)
    state = Assembly(system, DATA).initial_state()
    task = next(task for task in _tasks(system) if task.node == "cloud-0")
    found = trainer.train(state, task).delta
    network = trainer.model.submodel(3).train()
    rate = schedule(1, 0)
    optimiser = torch.optim.Adam(network.parameters(), lr=rate, weight_decay=5e-4)
    batches = trainer.data.batches("cloud-0", 8, seed=task.seed)
    for _ in range(2):
        batch = next(batches)
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(network(trainer.data.preparation(batch.tensor))[0], batch.labels).backward()
        optimiser.step()
    for name, param in network.named_parameters():
        torch.testing.assert_close(found[name], param.detach() - state.params[name], rtol=1e-3, atol=1e-5)


def _tasks(system):
    plan = Assembly(system, DATA)
    from exitflow.federated.sampling import sample_tasks

    return sample_tasks(list(plan.samples), plan.profile.probabilities, round=1, seed=system.training.seed)


def test_an_optimiser_of_ones_own_keeps_no_momentum_between_rounds():
    with pytest.raises(ConfigError, match="momentum_between_rounds: can be kept of 'sgd' alone"):
        OptimiserSpec(name="my_parts:adam", momentum_between_rounds="keep")


def test_an_objective_of_ones_own_is_what_exits_learn_from(tmp_path):
    plain, smoothed = (
        trained(tmp_path / str(place), *overrides).records[0].losses
        for place, overrides in enumerate([(), ("training.objective.name=my_parts:smoothed",)])
    )
    assert plain.keys() == smoothed.keys()
    assert plain != smoothed


def test_a_server_step_of_ones_own_remembers_also_when_a_run_is_cut_off(parts, tmp_path):
    system = tiny_system("training.server_step=my_parts:with_momentum", "training.rounds=4")
    whole = train(system, tmp_path / "whole", dataset=DATA)
    with pytest.raises(Stop):
        train(system, tmp_path / "cut", dataset=DATA, observer=stop_at(2.5))
    assert same_weights(whole, resume(tmp_path / "cut", dataset=DATA))
    assert not same_weights(whole, trained(tmp_path / "plain", "training.rounds=4"))


def test_what_a_server_step_gives_must_be_the_next_state(tmp_path):
    for name in ("nothing", "stale"):
        with pytest.raises(ConfigError, match=r"server_step: .* must give the ServerState of round 1"):
            trained(tmp_path / name, f"training.server_step=tests.test_extending:{name}")


def nothing(state, updates, rule):
    list(updates)


def stale(state, updates, rule):
    return replace(aggregate(state, updates, rule), round=state.round)


def test_metrics_stand_in_the_records(parts, tmp_path):
    run = trained(tmp_path / "run", "training.metrics=['my_parts:worst_class']")
    expected = parts.worst_class(run.validation_outputs(DATA))
    assert run.records[-1].validation.metrics == {"my_parts:worst_class": pytest.approx(expected)}


def test_a_confidence_of_ones_own_ranks(parts, tmp_path):
    run = trained(tmp_path / "run")
    found = evaluate(run, confidence=parts.second_best, dataset=DATA)
    assert found.confidence == "my_parts:second_best"
    assert found == evaluate(run, confidence="my_parts:second_best", dataset=DATA)
    with pytest.raises(ConfigError, match="confidence: there is no confidence 'entrpy'; did you mean 'entropy'"):
        evaluate(run, confidence="entrpy", dataset=DATA)


def test_a_partition_of_ones_own_says_what_each_node_holds(tmp_path):
    dataset = image_dataset(200, num_classes=14)
    system = tiny_system("data.partition=my_parts:by_label", "training.batch_size=4")
    assembly = Assembly(train(system, tmp_path / "run", dataset=dataset).system, dataset)
    labels = dataset.train.labels.numpy()
    for place, node in enumerate(assembly.system.topology.by_name):
        assert (labels[assembly.held[node]] % 7 == place).all()
    assert sum(assembly.samples.values()) == len(labels)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({}, "must name every node of the system, and no other"),
        ({"here": [0]}, "must name every node"),
        ({"all": [0, 0]}, "expected different whole numbers from 0 to 95"),
        ({"all": [96]}, "expected different whole numbers"),
        ({"all": [0.5]}, "expected different whole numbers"),
    ],
)
def test_a_partition_that_is_none_is_refused(given, sentence):
    topology = tiny_system().topology
    rows = dict.fromkeys(topology.by_name, given["all"]) if "all" in given else given
    with pytest.raises(ConfigError, match=sentence):
        own_partition(rows, topology, 96)


@pytest.mark.heavy
def test_a_data_set_of_pytorch_is_read_when_it_is_asked_for(parts, tmp_path, monkeypatch):
    system = tiny_system("data.name=my_parts:stripes", "training.rounds=1")
    dataset = dataset_of(system)
    assert isinstance(dataset, Dataset)
    read = []
    original = parts.Stripes.__getitem__
    monkeypatch.setattr(
        parts.Stripes, "__getitem__", lambda self, number: read.append(number) or original(self, number)
    )
    one = train(system, tmp_path / "one", dataset=dataset)
    assert len(read) < 200 + 40 + 7 * 2 * 8
    torch.manual_seed(5)  # what a process has drawn before makes no difference
    assert same_weights(one, train(system, tmp_path / "two", backend="processes", workers=2))
    assert evaluate(one, dataset=dataset).accuracy >= 0


def test_a_callback_sees_every_round_and_may_end_the_training(tmp_path):
    seen = []

    def stop_after_two(done):
        seen.append((done.round, done.record.round, done.state.round, done.run.finished))
        return done.round == 2

    run = trained(tmp_path / "run", "training.rounds=4", callbacks=[stop_after_two])
    assert seen == [(1, 1, 1, False), (2, 2, 2, False)]
    assert not run.finished
    assert evaluate(run, dataset=DATA).accuracy >= 0
    assert same_weights(resume(run.path, dataset=DATA), trained(tmp_path / "whole", "training.rounds=4"))


def test_callbacks_by_name_and_a_start_from_the_command_line(tmp_path):
    options = ["--backend", "serial", "--set", "training.local_steps=1", "--set", "model.width=2", "--rounds", "2"]
    callback = ["--callback", "tests.test_extending:stop_at_once"]
    said = call("train", "paper-7", "--out", tmp_path / "one", *options, *callback).stdout
    assert f"A callback has ended it before round 2; exitflow train --resume {tmp_path / 'one'} goes on." in said
    call("train", "paper-7", "--out", tmp_path / "two", *options, "--start", tmp_path / "one")
    assert Run(tmp_path / "two").finished
    call("train", "paper-7", "--out", tmp_path / "three", *options, "--callback", "tensorbord", code=2)


def stop_at_once(done):
    return True


@pytest.mark.heavy
def test_training_begins_with_the_weights_of_another_run(tmp_path):
    first = trained(tmp_path / "first")
    begun = []
    more = trained(tmp_path / "more", start=first, callbacks=[begun.append])
    assert same_weights(more, trained(tmp_path / "again", start=first.path))
    assert not same_weights(more, first)
    weights = {name: tensor.contiguous() for name, tensor in first.state().tensors.items()}
    save_file(weights, tmp_path / "weights.safetensors")
    assert same_weights(more, trained(tmp_path / "file", start=tmp_path / "weights.safetensors"))
    with pytest.raises(Stop):
        trained(tmp_path / "cut", start=first, observer=stop_at(0.5))
    assert same_weights(more, resume(tmp_path / "cut", dataset=DATA))


def test_weights_of_another_model_are_refused_before_a_run_is_begun(tmp_path):
    first = trained(tmp_path / "first")
    with pytest.raises(RunError, match="first: the weights to start with do not fit the model"):
        trained(tmp_path / "wider", "model.width=3", start=first)
    assert not (tmp_path / "wider").exists()


def test_a_run_shows_itself_in_a_notebook_and_as_a_table(tmp_path):
    run = trained(tmp_path / "run", "training.weighting=serving-rate")
    shown = run._repr_html_()
    assert "<th>weighting</th><td>serving-rate</td>" in shown
    assert "<td>3 of 3</td>" in shown
    table = run.to_pandas()
    assert table.index.tolist() == [1, 2, 3]
    assert table.loc[3, "validation/accuracy as served"] == run.records[-1].validation.accuracy
    assert np.isnan(table.loc[1, "validation/accuracy as served"])
    assert table["loss/exit 2"].tolist() == [record.losses["2"] for record in run.records]


def test_rounds_are_told_through_logging(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="exitflow"):
        trained(tmp_path / "run")
    told = [record.getMessage() for record in caplog.records if record.name == "exitflow.runs"]
    assert re.match(r"round 2 of 3 took [\d.]+ s; [\d.]+ % right as served, on validation data", told[0])
    assert told[-1].endswith("training has ended after 3 rounds")


def test_trackers_get_the_figures_of_every_round(tmp_path, monkeypatch):
    written, logged = [], []

    class Writer:
        def __init__(self, folder):
            assert folder == str(tmp_path / "run" / "tensorboard")

        def add_scalar(self, name, value, step):
            written.append((name, value, step))

        def close(self):
            pass

    active = []
    tracking = types.SimpleNamespace(
        active_run=lambda: active[-1] if active else None,
        start_run=lambda run_name: active.append(run_name),
        log_params=lambda params: logged.append(params),
        log_metrics=lambda metrics, step: logged.append((step, metrics)),
    )
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    monkeypatch.setitem(sys.modules, "mlflow", tracking)
    run = trained(tmp_path / "run", callbacks=["tensorboard", "mlflow"])
    assert [each for each in written if each[0] == "loss/exit 1"] == [
        ("loss/exit 1", record.losses["1"], record.round) for record in run.records
    ]
    assert active == ["run"]
    assert logged[0] == {"system": run.system.name, "weighting": run.system.training.weighting_name}
    step, metrics = logged[-1]
    assert (step, len(metrics)) == (3, len(dict(run.records[-1].figures())))
    assert all(re.fullmatch(r"[\w.]+", name) for name in metrics)


def test_a_tracker_that_is_not_installed_is_one_sentence(tmp_path, monkeypatch):
    for name, module in (("tensorboard", "torch.utils.tensorboard"), ("mlflow", "mlflow")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(MissingExtraError, match=rf"pip install .*\[{name}\]'"):
            trained(tmp_path / name, callbacks=[name])


def test_a_node_of_a_federation_knows_what_a_system_would_call():
    system = tiny_system(
        "training.weighting=my_parts:by_need",
        "training.optimiser.name=my_parts:adam",
        "training.metrics=['my_parts:worst_class']",
        "data.partition=my_parts:by_label",
    )
    expected = {f"my_parts:{name}" for name in ("by_need", "adam", "worst_class", "by_label")}
    assert own_parts(system) == expected
    assert json.loads(json.dumps(sorted(expected))) == sorted(own_parts(system))
