"""Updates that do not come: strict, skip and reweight."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from exitflow.errors import TrainingError
from exitflow.federated.loop import run_rounds
from exitflow.federated.options.around import Options
from exitflow.federated.options.faults import Attendance
from exitflow.federated.options.federation_spec import FederationSpec
from exitflow.federated.plan import TrainingPlan
from exitflow.federated.training_spec import OptimiserSpec, TrainingSpec
from exitflow.federated.types import Missing, ServerState, Update
from exitflow.federated.weighting import ExitProfile
from tests.oracles import aggregation as oracle
from tests.small import NestedLinear, task_of

NODES = ["never-fails", "often-fails", "deep"]
ANSWERS = {"never-fails": 1.0, "often-fails": 0.4, "deep": 0.7}  # q
MODEL = NestedLinear((1, 2), 2).double()
COVERAGE = MODEL.coverage
DELTAS = {"never-fails": 1.0, "often-fails": 3.0, "deep": 2.0}


class Unreliable:
    """Every node sends the same update again and again, when it sends one."""

    def __init__(self, answers=ANSWERS, seed=0):
        self.random = np.random.default_rng(seed)
        self.answers = answers

    def update(self, task):
        width = {1: 1, 2: 2}[task.deepest]
        value = DELTAS[task.node]
        delta = {
            "weight": torch.full((2, width), value, dtype=torch.float64),
            "bias": torch.full((2,), value / 2, dtype=torch.float64),
        }
        return Update(task, delta, {}, 10, 1, (0.0,))

    def run(self, state, tasks):
        for task in tasks:
            if self.random.random() < self.answers[task.node]:
                yield self.update(task)
            else:
                yield Missing(task, "no answer within 5 s", wire_bytes=(100, 0))


def plan(rounds, probabilities=((1.0, 0.0), (1.0, 0.0), (0.3, 0.7))):
    profile = ExitProfile(
        serve_share=np.array([0.75, 0.25]),
        multiply_adds=np.ones(2),
        samples=np.array([10.0, 10.0, 10.0]),
        probabilities=np.array(probabilities),
        num_rounds=rounds,
    )
    spec = TrainingSpec(rounds=rounds, server_step="paper", local_exits="one")
    return TrainingPlan(NODES, profile, lambda profile, round: profile.serve_share, COVERAGE, spec)


def train(rule, plan, backend):
    return run_rounds(plan, zero_state(), backend, Options(FederationSpec(on_missing=rule)))


def zero_state():
    return ServerState(0, {name: param.detach().clone() for name, param in MODEL.named_parameters()}, {})


def full_step():
    """By the oracle: the mean over the draws of `deep`, with everybody answering."""
    total = {name: torch.zeros_like(value) for name, value in zero_state().params.items()}
    chosen = plan(1)
    for exit, chance in ((1, 0.3), (2, 0.7)):
        tasks = [
            task_of(1, "never-fails", 1, 1.0, 0),
            task_of(1, "often-fails", 1, 1.0, 0),
            task_of(1, "deep", exit, chance, 0),
        ]
        updates = [Unreliable().update(task) for task in tasks]
        for name, value in zero_state().params.items():
            weights, samples = [0.75, 0.25], chosen.profile.exit_samples.tolist()
            total[name] += chance * oracle.step(value, name, updates, COVERAGE, weights, samples, 1.0, divide=False)
    return total


def mean_step(rule, rounds=4000):
    state = zero_state()
    for state, report in train(rule, plan(rounds), Unreliable()):
        pass
    return {name: value / rounds for name, value in state.params.items()}


@pytest.mark.heavy
def test_reweighted_sums_are_those_of_full_participation_in_expectation():
    expected, found = full_step(), mean_step("reweight")
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0.06)


def test_skipped_sums_are_short_by_what_is_missing():
    expected, found = full_step(), mean_step("skip")
    assert (found["weight"][:, 1] - 0.7 * expected["weight"][:, 1]).abs().max() < 0.02  # only `deep` covers it
    assert (found["weight"][:, 0] - expected["weight"][:, 0]).abs().max() > 0.3  # so this test can tell


def test_the_lost_weight_of_each_exit_is_reported():
    only_deep_fails = {"never-fails": 1.0, "often-fails": 1.0, "deep": 0.0}
    certain = ((1.0, 0.0), (1.0, 0.0), (0.0, 1.0))
    ((_, report),) = train("skip", plan(1, certain), Unreliable(only_deep_fails))
    assert report.missing == {"deep": "no answer within 5 s"}
    assert report.lost_weight.tolist() == [0.0, 1.0]
    assert report.wire_bytes == {"deep": (100, 0)}
    one_of_two = {"never-fails": 1.0, "often-fails": 0.0, "deep": 1.0}
    ((_, report),) = train("skip", plan(1, certain), Unreliable(one_of_two))
    assert report.lost_weight.tolist() == [0.5, 0.0]
    in_half_of_the_rounds = ((0.5, 0.0), (1.0, 0.0), (0.0, 1.0))
    chosen = plan(8, in_half_of_the_rounds)
    lost = [
        report.lost_weight[0]
        for _, report in train("skip", chosen, Unreliable(one_of_two))
        if any(task.node == "never-fails" for task in report.tasks)
    ]
    assert lost == [pytest.approx(1 / 3)] * len(lost)  # who trains in half of the rounds counts twice
    assert lost


def test_nothing_is_lost_where_all_arrive():
    everybody = dict.fromkeys(NODES, 1.0)
    ((_, report),) = train("skip", plan(1), Unreliable(everybody))
    assert report.lost_weight is None
    assert not report.missing


def test_strict_stops_and_names_the_node():
    with pytest.raises(
        TrainingError, match=r"round 1: the update of node 'often-fails' is missing: no answer within 5 s"
    ):
        list(train("strict", plan(1), Unreliable({**dict.fromkeys(NODES, 1.0), "often-fails": 0.0})))


def test_arrival_is_estimated_from_earlier_rounds_only():
    attendance = Attendance()
    assert attendance.probability("a") == 1.0
    attendance.add({"a": False, "b": True})
    assert attendance.probability("a") == 1 / 2
    assert attendance.probability("b") == 1.0
    attendance.add({"a": True})
    assert attendance.probability("a") == 2 / 3


def test_attendance_is_read_back_from_records():
    nobody = {"missing": {}, "dropped": []}
    records = [
        SimpleNamespace(round=1, attendance={"a": True}, **nobody),
        SimpleNamespace(round=2, attendance={"a": False}, **(nobody | {"missing": {"a": "x"}})),
    ]
    attendance = Attendance.of(records)
    assert attendance.probability("a") == 2 / 3
    attendance.add_trained([task_of(1, "a", 1, 1.0, 0), task_of(2, "a", 1, 1.0, 0)])
    assert attendance.last_trained(task_of(3, "a", 1, 1.0, 0)) == 1
    assert attendance.last_trained(task_of(3, "a", 2, 1.0, 0)) == 0


def test_a_node_that_lost_its_momentum_is_named():
    class Forgetful(Unreliable):
        def run(self, state, tasks):
            for task in tasks:
                update = self.update(task)
                kept = task.round - 1 if task.node != "deep" else None
                yield Update(
                    *(
                        getattr(update, name)
                        for name in ("task", "delta", "buffers", "num_samples", "num_steps", "losses")
                    ),
                    state_round=kept or None,
                )

    chosen = plan(3, ((1.0, 0.0), (1.0, 0.0), (0.0, 1.0)))
    chosen = TrainingPlan(
        *(getattr(chosen, name) for name in ("nodes", "profile", "weighting", "coverage")),
        TrainingSpec(rounds=3, optimiser=OptimiserSpec(momentum_between_rounds="keep"), local_exits="one"),
    )
    lost = [report.state_lost for _, report in train("skip", chosen, Forgetful())]
    assert lost == [[], ["deep"], ["deep"]]


def test_nodes_fail_as_often_as_they_should_in_these_tests():
    backend = Unreliable()
    count = Counter(
        type(each).__name__ for _ in range(1000) for each in backend.run(None, [task_of(1, "often-fails", 1, 1.0, 0)])
    )
    assert 350 < count["Update"] < 450
