import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from exitflow.errors import TrainingError
from exitflow.federated.loop import run_rounds
from exitflow.federated.options.around import Options
from exitflow.federated.options.federation_spec import FederationSpec
from exitflow.federated.places.serial import SerialBackend
from exitflow.federated.plan import TrainingPlan
from exitflow.federated.training_spec import TrainingSpec
from exitflow.federated.types import Missing
from exitflow.federated.weighting import ExitProfile
from tests.small import NestedLinear, gaussian_split, initial_state, linear_trainer


def plan_and_backend(split, **fields):
    model = NestedLinear((2, 4), 2).double()
    spec = TrainingSpec(rounds=2, batch_size=4, **fields)
    held = {"good": list(range(8)), "bad": list(range(8, 16))}
    trainer = linear_trainer(model, split, held, spec, 2)
    profile = ExitProfile(
        serve_share=np.array([0.5, 0.5]),
        multiply_adds=np.ones(2),
        samples=np.array([8.0, 8.0]),
        probabilities=np.array([[1.0, 0.0], [0.0, 1.0]]),
        num_rounds=2,
    )
    plan = TrainingPlan(["good", "bad"], profile, lambda profile, round: profile.serve_share, model.coverage, spec)
    return plan, SerialBackend(trainer), initial_state(model)


def split_with(value):
    split = gaussian_split(16, 4, 2)
    split.inputs[8:, 3] = value
    return split


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_node_that_returns_no_numbers_is_named_and_dropped(value):
    plan, backend, state = plan_and_backend(split_with(value))
    for state, report in run_rounds(plan, state, backend):
        assert report.dropped == ["bad"]
        assert set(report.losses) == {1}
    assert all(tensor.isfinite().all() for tensor in state.params.values())
    assert float(state.params["weight"][:, :2].abs().sum()) > 0  # the other node's update counted
    assert float(state.params["weight"][:, 2:].abs().sum()) == 0


def test_a_loss_that_is_no_number_drops_the_update():
    plan, backend, state = plan_and_backend(split_with(0.0))
    run = backend.run
    bad = {"bad": (math.inf,)}
    backend.run = lambda state, tasks: (
        replace(update, losses=bad.get(update.task.node, update.losses)) for update in run(state, tasks)
    )
    reports = [report for _, report in run_rounds(plan, state, backend)]
    assert [report.dropped for report in reports] == [["bad"]] * 2
    assert [report.num_updates for report in reports] == [1, 1]


def test_a_round_that_has_lost_every_update_stops_the_run():
    plan, backend, state = plan_and_backend(split_with(0.0))
    run = backend.run
    backend.run = lambda state, tasks: (replace(update, losses=(math.nan,)) for update in run(state, tasks))
    with pytest.raises(TrainingError, match=r"round 1: no update can be used \(node 'bad': its update held NaN"):
        list(run_rounds(plan, state, backend))


def test_a_node_that_is_lost_alone_stops_nobody_and_two_in_a_row_do():
    """In each round one node is drawn: `bad` fails for ever, `good` only in the third round."""
    plan, backend, state = plan_and_backend(split_with(0.0))
    drawn, asked = ["bad", "good", "good", "bad"], []
    run = backend.run

    def lose(state, tasks):
        for update in run(state, [task for task in tasks if task.node == drawn[state.round]]):
            lost = drawn[state.round] == "bad" or state.round == 2
            yield Missing(update.task, "no answer within 5 s") if lost else update

    class OneByOne(type(plan)):
        def tasks(self, round, exit_weights):
            asked.append(round)
            return [task for task in super().tasks(round, exit_weights) if task.node == drawn[round - 1]]

    backend.run = lose
    fields = {field: getattr(plan, field) for field in ("nodes", "profile", "weighting", "coverage")}
    spec, skip = replace(plan.spec, rounds=4), Options(FederationSpec(on_missing="skip"))
    with pytest.raises(TrainingError, match=r"round 4: no update can be used .*node 'bad'"):
        list(run_rounds(OneByOne(**fields, spec=spec), state, backend, skip))
    assert asked == [1, 2, 3, 4]


def test_whoever_watches_is_told_of_every_answer_also_of_updates_that_do_not_count():
    plan, backend, state = plan_and_backend(split_with(0.0))
    run, told = backend.run, []
    backend.run = lambda state, tasks: (
        Missing(update.task, "gone") if update.task.node == "bad" else update for update in run(state, tasks)
    )
    options = Options(FederationSpec(on_missing="skip"), progress=lambda *counts: told.append(counts))
    list(run_rounds(plan, state, backend, options))
    assert told == [(1, 1, 2), (1, 2, 2), (2, 1, 2), (2, 2, 2)]


def test_a_global_model_that_overflows_stops_the_run():
    plan, backend, state = plan_and_backend(split_with(0.0), learning_rate=1e30)
    plan = replace(plan, server_learning_rate=1e30)
    state = replace(state, params={name: value.float() for name, value in state.params.items()})
    with pytest.raises(TrainingError, match="round 1: the global model is not finite any more"):
        list(run_rounds(plan, state, backend))


def test_values_whose_sums_and_squares_overflow_are_still_numbers():
    from exitflow.tensors import all_finite

    assert all_finite({"w": torch.tensor([1e30])})
    assert all_finite({"w": torch.tensor([3e38, 3e38])})
    assert not all_finite({"w": torch.tensor([math.inf, -math.inf])})
    assert not all_finite({"w": torch.tensor([1.0]), "v": torch.tensor([[math.inf]])})
    assert not all_finite({"w": torch.tensor([1.0, math.nan])})
