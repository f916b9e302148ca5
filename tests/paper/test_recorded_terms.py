"""What other weights would have cost, from what one training measured."""

import json

import pytest

from exitflow.errors import RunError
from exitflow.runs.explanation import explain
from exitflow.runs.runs import Run
from exitflow.runs.training import train
from paper.recorded_terms import recorded_terms
from tests.small import image_dataset, tiny_system

DATA = image_dataset(96)
NAMES = ("equal-weight", "flops-prop", "serving-rate", "balanced-adj", "bound-min")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    system = tiny_system("training.weighting=balanced-adj", "training.help_probability=0.2")
    return train(system, tmp_path_factory.mktemp("run") / "run", dataset=DATA)


def test_they_are_what_the_training_says_of_itself_and_what_explain_says_of_all(run):
    found = recorded_terms(run, NAMES)
    assert found["balanced-adj"].to_json() == run.profile.error_terms
    explained = explain(run.system, dataset=DATA).terms
    assert found == {name: explained[name] for name in NAMES}


def test_a_training_that_measured_nothing_tells_nothing(tmp_path):
    run = train(tiny_system("training.weighting=serving-rate"), tmp_path / "run", dataset=DATA)
    assert recorded_terms(run, NAMES) == {}


EMPTIED = ("node_samples", "serve_share", "multiply_adds", "num_parameters")


@pytest.mark.parametrize(
    "damage",
    [
        {"gradients": 1},
        {"gradients": {"x": []}},
        {"num_steps": 0},
        {"num_steps": 10**400},
        {"num_parameters": [10**400] * 3},
        *({key: []} for key in EMPTIED),
    ],
)
def test_damage_is_one_sentence(run, tmp_path, damage):
    profile = json.loads((run.path / "profile.json").read_text())
    (tmp_path / "spec.toml").write_text((run.path / "spec.toml").read_text())
    (tmp_path / "profile.json").write_text(json.dumps(profile | damage))
    with pytest.raises(
        RunError,
        match=r"its profile is not as exitflow writes it|profile.json: is damaged, or was not written by exitflow",
    ):
        recorded_terms(Run(tmp_path), NAMES)
