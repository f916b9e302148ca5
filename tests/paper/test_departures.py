"""The departures of the authors' code from Algorithm 1, each alone and all together, against a literal twin."""

import numpy as np
import pytest
import torch

from exitflow.federated.aggregation import Aggregation, aggregate
from exitflow.models.build import build_model
from exitflow.models.specs import EarlyExitResNet
from exitflow.runs.training import train
from exitflow.system.assembly import Assembly
from paper.departures import all_departures, frozen_heads, root_step, times_p
from paper.tables import TABLES, distinct_trainings
from tests.federated.test_aggregation import WEIGHTS, random_update
from tests.oracles import departures as oracle
from tests.small import image_dataset, initial_state, tiny_system

SAMPLES = (21.0, 16.0, 9.0)
WHICH = {
    frozen_heads: (True, False, False),
    times_p: (False, True, False),
    root_step: (False, False, True),
    all_departures: (True, True, True),
}


@pytest.fixture(scope="module")
def model():
    spec = EarlyExitResNet(width=1, blocks=(1, 1, 1), strides=(1, 2, 2), exit_blocks=(1, 2, 3), heads="gap")
    return build_model(spec.resolve(3), (1, 8, 8), 2, seed=0).double()


@pytest.fixture(scope="module")
def updates(model):
    return [
        random_update(model, "a", 1, probability=1.0, num_samples=5, seed=1),
        random_update(model, "b", 2, probability=0.4, num_samples=7, seed=2),
        random_update(model, "c", 1, probability=0.2, num_samples=9, seed=3),
        random_update(model, "c", 3, probability=0.6, num_samples=9, seed=4),
    ]


@pytest.fixture(scope="module")
def rule(model):
    return Aggregation(np.array(WEIGHTS), np.array(SAMPLES), model.coverage, step="coverage")


@pytest.mark.heavy
@pytest.mark.parametrize("step", WHICH, ids=lambda step: step.__name__)
def test_every_departure_is_what_its_literal_twin_does(model, updates, rule, step):
    state = initial_state(model)
    after = step(state, updates, rule)
    assert after.round == 1
    names = ("freezes_heads", "multiplies_by_p", "takes_root_step")
    which = dict(zip(names, WHICH[step], strict=True))
    for name, value in state.params.items():
        expected = oracle.step(value, name, updates, WEIGHTS, SAMPLES, **which)
        torch.testing.assert_close(after.params[name], expected, msg=name)


def test_without_departures_the_twin_is_algorithm_1(model, updates, rule):
    state = initial_state(model)
    after = aggregate(state, updates, Aggregation(rule.exit_weights, rule.exit_samples, rule.coverage, step="paper"))
    none = dict.fromkeys(("freezes_heads", "multiplies_by_p", "takes_root_step"), False)
    for name, value in state.params.items():
        torch.testing.assert_close(after.params[name], oracle.step(value, name, updates, WEIGHTS, SAMPLES, **none))


def test_each_departure_touches_what_it_is_about_and_nothing_else(model, updates, rule):
    state = initial_state(model)
    as_written = aggregate(state, updates, Aggregation(rule.exit_weights, rule.exit_samples, rule.coverage))
    shallow_heads = {name for name in state.params if name.startswith(("heads.1.", "heads.2."))}
    root_only = {name for name in state.params if name.startswith(("heads.3.", "stages.3."))}
    for step, touched in ((frozen_heads, shallow_heads), (root_step, root_only)):
        after = step(state, updates, rule)
        differs = {name for name in state.params if not torch.equal(after.params[name], as_written.params[name])}
        assert differs == touched
    after = frozen_heads(state, updates, rule)
    assert all(torch.equal(after.params[name], state.params[name]) for name in shallow_heads)


def test_where_every_node_trains_in_every_round_p_makes_no_difference(model, rule):
    state = initial_state(model)
    updates = [random_update(model, "a", exit, probability=1.0, num_samples=5, seed=exit) for exit in (1, 2, 3)]
    as_written = aggregate(state, updates, Aggregation(rule.exit_weights, rule.exit_samples, rule.coverage))
    assert times_p(state, updates, rule).params.keys() == as_written.params.keys()
    for name, value in times_p(state, updates, rule).params.items():
        torch.testing.assert_close(value, as_written.params[name])


def test_the_bench_trains_them_by_name_and_the_heads_stay_at_their_start(tmp_path):
    system = tiny_system("training.server_step=paper.departures:all_departures", "training.weighting=serving-rate")
    dataset = image_dataset(96)
    start = Assembly(system, dataset).initial_state().params
    after = train(system, tmp_path / "run", dataset=dataset).model(dataset).state_dict()
    same = {name for name in start if torch.equal(start[name], after[name])}
    heads = {name for name in start if name.startswith(("heads.1.", "heads.2."))}
    assert heads <= same
    assert not any(name in same for name in start if name.startswith("heads.3."))


def test_the_tables_ask_for_each_alone_and_all_together():
    equal = distinct_trainings([TABLES["departures"]], [9], "small", ["cifar10"])
    biased = distinct_trainings([TABLES["departures-highly-biased"]], [9], "small", ["cifar10"])
    steps = [[job.system.training.server_step.partition(":")[2] for job in jobs] for jobs in (equal, biased)]
    names = ("frozen_heads", "root_step", "times_p", "all_departures")
    assert [[each.count(name) for name in names] for each in steps] == [[4, 4, 0, 4], [2, 2, 1, 2]]
    known = {job.training for job in distinct_trainings([TABLES["table1"], TABLES["table6"]], [9], "small")}
    as_written = [job.training for job in (*equal, *biased) if job.system.training.server_step == "paper"]
    assert set(as_written) <= known  # which are trained already
