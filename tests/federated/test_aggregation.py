import functools
import itertools

import numpy as np
import pytest
import torch

from exitflow.federated.aggregation import Aggregation, aggregate
from exitflow.federated.types import ServerState, Task, Update
from exitflow.models.build import build_model
from exitflow.models.specs import DepthWidthResNet, EarlyExitResNet, SlimResNet
from tests.oracles import aggregation as oracle
from tests.small import NestedLinear, initial_state

WEIGHTS = (0.5, 0.3, 0.2)


def sliced_model():
    return NestedLinear((1, 3, 4), 2).double()


def early_exit_model():
    spec = EarlyExitResNet(width=1, blocks=(1, 1, 1), strides=(1, 2, 2), exit_blocks=(1, 2, 3), heads="gap")
    return build_model(spec.resolve(3), (1, 8, 8), 2, seed=0).double()


def slim_model():
    spec = SlimResNet(width=3, blocks=(1,), strides=(1,), widths=(0.3, 0.6, 1.0))
    return build_model(spec.resolve(3), (1, 8, 8), 2, seed=0).double()


def depth_width_model():
    spec = DepthWidthResNet(width=2, blocks=(3,), strides=(1,), widths=(0.4, 0.5, 1.0), heads="gap")
    return build_model(spec.resolve(3), (1, 8, 8), 2, seed=0).double()


MODELS = [sliced_model, early_exit_model, slim_model, depth_width_model]


def mixed_updates(model):
    return [
        random_update(model, "a", 1, probability=1.0, num_samples=5, seed=1),
        random_update(model, "b", 2, probability=0.4, num_samples=7, seed=2),
        random_update(model, "c", 1, probability=0.2, num_samples=9, seed=3),
        random_update(model, "c", 3, probability=0.6, num_samples=9, seed=4),
        random_update(model, "d", 1, 3, probability=0.9, num_samples=2, seed=5),
        random_update(model, "e", 1, 2, 3, probability=0.9, num_samples=3, seed=6),
    ]


def random_update(model, node, *exits, probability, num_samples, seed):
    generator = torch.Generator().manual_seed(seed)
    state = initial_state(model)
    covered = model.coverage(*exits)

    def like(tensor, part):
        return torch.randn(tensor[part].shape, dtype=torch.float64, generator=generator)

    delta = {name: like(state.params[name], part) for name, part in covered.items() if name in state.params}
    buffers = {name: like(state.buffers[name], part) for name, part in covered.items() if name in state.buffers}
    return Update(Task(1, node, exits, (1.0,), probability, 0), delta, buffers, num_samples, 1, (0.0,))


def rule_for(model, samples, *, weights=WEIGHTS, step="paper", server_learning_rate=1.0):
    return Aggregation(
        np.array(weights),
        np.array(samples, dtype=float),
        model.coverage,
        step=step,
        server_learning_rate=server_learning_rate,
    )


@pytest.mark.parametrize("make_model", MODELS)
@pytest.mark.parametrize("step", ["paper", "coverage"])
@pytest.mark.parametrize("weights", [WEIGHTS, (1.0, 0.0, 0.0), (0.0, 0.0, 1.0)])
def test_a_step_equals_the_loop_over_elements(make_model, step, weights):
    model = make_model()
    updates = mixed_updates(model)
    samples = (14, 7, 9)
    before = initial_state(model)
    after = aggregate(before, updates, rule_for(model, samples, weights=weights, step=step, server_learning_rate=0.7))
    coverage = functools.cache(model.coverage)
    for name, value in before.params.items():
        expected = oracle.step(value, name, updates, coverage, weights, samples, 0.7, step == "coverage")
        torch.testing.assert_close(after.params[name], expected, rtol=1e-12, atol=1e-14)
    for name, value in before.buffers.items():
        expected = oracle.statistic(value, name, updates, coverage, weights, samples)
        torch.testing.assert_close(after.buffers[name], expected, rtol=1e-12, atol=1e-14)
    assert after.round == before.round + 1


@pytest.mark.parametrize("make_model", MODELS)
@pytest.mark.parametrize("step", ["sample-mean", "node-mean"])
@pytest.mark.parametrize("count", [6, 1])
def test_a_mean_over_the_nodes_equals_the_loop_over_elements(make_model, step, count):
    """FjORD's and HeteroFL's average; one node of exit 1 leaves what it does not hold as it was."""
    model = make_model()
    updates = mixed_updates(model)[:count]
    before = initial_state(model)
    after = aggregate(before, updates, rule_for(model, (14, 7, 9), step=step, server_learning_rate=0.7))
    coverage = functools.cache(model.coverage)
    for name, value in before.params.items():
        expected = oracle.mean_over_nodes(value, name, updates, coverage, step == "sample-mean", 0.7)
        torch.testing.assert_close(after.params[name], expected, rtol=1e-12, atol=1e-14)
    for name, value in before.buffers.items():
        holding = [update for update in updates if name in update.buffers]
        weights = [update.num_samples if step == "sample-mean" else 1 for update in holding]
        values = [weight * update.buffers[name] for weight, update in zip(weights, holding, strict=True)]
        torch.testing.assert_close(after.buffers[name], sum(values) / sum(weights) if holding else value)


@pytest.mark.parametrize("make_model", [sliced_model, early_exit_model])
@pytest.mark.parametrize("step", ["paper", "coverage"])
def test_over_all_draws_the_expected_step_is_that_of_full_participation(make_model, step):
    """Every node draws one exit, or none; each possible outcome is weighed by its probability."""
    model = make_model()
    samples = {"device": 3, "edge": 4, "cloud": 8}
    probabilities = {
        "device": {1: 0.5, None: 0.5},
        "edge": {1: 0.2, 2: 0.7, None: 0.1},
        "cloud": {1: 0.25, 2: 0.25, 3: 0.5},
    }
    pairs = [(node, exit) for node, row in probabilities.items() for exit in row if exit]
    exit_samples = [sum(samples[node] for node, trained in pairs if trained == exit) for exit in (1, 2, 3)]
    rule = rule_for(model, exit_samples, step=step)
    before = initial_state(model)

    def update(node, exit, probability):
        seed = 10 * list(samples).index(node) + exit
        return random_update(model, node, exit, probability=probability, num_samples=samples[node], seed=seed)

    expected = {name: torch.zeros_like(value) for name, value in before.params.items()}
    chance_in_all = 0.0
    for draw in itertools.product(*(row.items() for row in probabilities.values())):
        chance = float(np.prod([probability for _, probability in draw]))
        chance_in_all += chance
        drawn = zip(probabilities, draw, strict=True)
        after = aggregate(before, [update(node, exit, p) for node, (exit, p) in drawn if exit], rule)
        for name in expected:
            expected[name] += chance * after.params[name]
    full = aggregate(before, [update(node, exit, 1.0) for node, exit in pairs], rule)
    assert chance_in_all == pytest.approx(1.0, abs=1e-15)
    for name in expected:
        torch.testing.assert_close(expected[name], full.params[name], rtol=1e-12, atol=1e-12)


def test_a_round_without_updates_changes_nothing():
    model = early_exit_model()
    before = initial_state(model)
    after = aggregate(before, [], rule_for(model, (1, 1, 1), step="coverage"))
    assert all(torch.equal(before.tensors[name], after.tensors[name]) for name in before.tensors)


def test_the_state_before_stays_as_it_was():
    model = sliced_model()
    before = initial_state(model)
    kept = {name: value.clone() for name, value in before.params.items()}
    aggregate(
        before, [random_update(model, "a", 3, probability=1.0, num_samples=1, seed=0)], rule_for(model, (1, 1, 1))
    )
    assert all(torch.equal(before.params[name], kept[name]) for name in kept)


def test_projection_scales_onto_the_ball():
    state = ServerState(0, {"w": torch.tensor([3.0, 4.0])}, {})
    coverage = lambda *exits: {"w": ()}  # noqa: E731
    rule = Aggregation(np.ones(1), np.ones(1), coverage, projection_radius=2.5)
    assert aggregate(state, [], rule).params["w"].tolist() == [1.5, 2.0]
    rule = Aggregation(np.ones(1), np.ones(1), coverage, projection_radius=5.0)
    assert aggregate(state, [], rule).params["w"].tolist() == [3.0, 4.0]


def test_noise_carries_no_variance_to_0_or_below():
    """What is divided by its root must stay positive; a mean may be anything."""
    model = early_exit_model()
    state = initial_state(model)

    def far_below(sums):
        for value in sums.values():
            value.fill_(-100.0)

    rule = rule_for(model, [10.0] * 3, step="coverage")
    after = aggregate(state, iter(()), Aggregation(**{**vars(rule), "noise": far_below})).buffers
    variances = [name for name, value in state.buffers.items() if (value > 0).all()]
    assert variances
    for name in variances:
        torch.testing.assert_close(after[name], state.buffers[name] / 10)
    assert all((after[name] < 0).all() for name in after if name not in variances)
