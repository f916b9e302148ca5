import numpy as np
import pytest

from exitflow.federated.weighting import WEIGHTINGS
from exitflow.runs.explanation import explain
from exitflow.runs.training import train
from exitflow.theory.bound import error_bound
from exitflow.theory.error_costs import calibrated_costs
from tests.small import image_dataset, tiny_system

DATA = image_dataset(96)


@pytest.fixture(scope="module")
def explanation():
    return explain(tiny_system("training.help_probability=0.2"), dataset=DATA)


def test_every_weighting_has_its_weights_and_their_cost(explanation):
    assert set(explanation.weights) == set(explanation.terms) == {*WEIGHTINGS, "bound-min"}
    for name, weights in explanation.weights.items():
        assert sum(weights) == pytest.approx(1)
        assert explanation.terms[name] == calibrated_costs(explanation.inputs[name]).terms(np.array(weights))
    assert explanation.terms["serving-rate"].bias == 0
    assert explanation.terms["equal-weight"].bias > 0


def test_bound_min_costs_least(explanation):
    totals = {name: terms.total for name, terms in explanation.terms.items()}
    assert totals["bound-min"] == min(totals.values())
    assert explanation.terms[explanation.cheapest].total == pytest.approx(totals["bound-min"])


def test_among_equals_the_simplest_is_named():
    """With every node in every round and many rounds, bound-min is serving-rate."""
    found = explain(tiny_system("training.rounds=100000"), dataset=DATA)
    assert found.weights["bound-min"] == pytest.approx(found.weights["serving-rate"])
    assert found.cheapest == "serving-rate"


@pytest.mark.parametrize("weighting", ["balanced-adj", "bound-min", "flops-prop"])
def test_the_weights_are_those_of_a_training(explanation, tmp_path, weighting):
    name = "exitflow.federated.weighting:bound_min" if weighting == "bound-min" else weighting
    system = tiny_system("training.help_probability=0.2", f"training.weighting={name}")
    run = train(system, tmp_path / "run", dataset=DATA)
    assert run.records[-1].exit_weights == tuple(explanation.weights[weighting])


@pytest.mark.parametrize("own", ["auto", "serving-rate"])
def test_each_weighting_is_explained_as_its_own_training(own, tmp_path):
    """Nodes train all their exits under auto, and only their own under the others."""
    found = explain(tiny_system(f"training.weighting={own}"), dataset=DATA)
    json = found.to_json()
    for weighting in ("auto", "balanced-adj"):
        run = train(tiny_system(f"training.weighting={weighting}"), tmp_path / weighting, dataset=DATA)
        assert run.records[-1].exit_weights == tuple(found.weights[weighting])
        assert list(run.profile.exit_samples) == json["weightings"][weighting]["exit_samples"]
        assert found.inputs[weighting].joint_exits == (weighting == "auto")
        bound = error_bound(found.inputs[weighting], np.array(found.weights[weighting]))
        assert json["weightings"][weighting]["bound"]["total"] == bound.total
    assert found.weights["serving-rate"] == pytest.approx((0.8, 0.15, 0.05))
    assert json["exit_samples"] == json["weightings"][own]["exit_samples"]


def test_weights_that_the_system_names_are_explained_too(tmp_path):
    system = tiny_system("training.weighting=serving-rate", "training.exit_weights=[5,3,2]")
    found = explain(system, dataset=DATA)
    assert found.weights["exit_weights"] == pytest.approx((0.5, 0.3, 0.2))
    assert found.weights["serving-rate"] == pytest.approx((0.8, 0.15, 0.05))
    assert found.weighting == found.to_json()["weighting"] == "exit_weights"
    run = train(system, tmp_path / "run", dataset=DATA)
    assert run.records[-1].exit_weights == tuple(found.weights["exit_weights"])


def test_a_weighting_that_would_leave_an_exit_without_data_is_left_out():
    found = explain(tiny_system("training.weighting=auto", "data.layer_shares=[0,0,1]"), dataset=DATA)
    assert set(found.weights) == set(found.terms) == {"auto"}


@pytest.mark.heavy
def test_all_backends_explain_alike(explanation):
    system = tiny_system("training.help_probability=0.2")
    assert explain(system, dataset=DATA, backend="processes", workers=2).to_json() == explanation.to_json()


def test_json_has_the_theorems_own_constants_too(explanation):
    found = explanation.to_json()
    assert found["cheapest"] == explanation.cheapest
    assert found["constants"]["condition"] >= 1
    assert found["constants"]["num_rounds"] == 3
