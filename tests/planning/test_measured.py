from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exitflow.errors import ExitflowError
from exitflow.evaluation.accuracy import evaluate_plan
from exitflow.evaluation.outputs import ExitOutputs
from exitflow.planning.measured import measured_plan
from exitflow.routing import confidence
from exitflow.topology.graph import Link, Node, Tier, Topology, expand_tiers
from exitflow.topology.rates import serving_plan
from tests.oracles.planning import best_accuracy
from tests.small import topologies


def made_up(skills, num_samples=2000, num_classes=5, seed=0):
    """Exits of these skills; samples that are hard for one are hard for all."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(num_classes, size=num_samples)
    hard = rng.normal(size=num_samples)
    logits = rng.normal(size=(len(skills), num_samples, num_classes))
    for exit, skill in enumerate(skills):
        logits[exit, np.arange(num_samples), labels] += 1.5 * (skill - 0.7 * hard - 0.3 * rng.normal(size=num_samples))
    return ExitOutputs(logits.astype(np.float32), labels)


def chain(*limits):
    """As many nodes as limits and one more; 10 requests/s arrive at the first."""
    names = [f"n{index}" for index in range(len(limits) + 1)]
    links = [(Link(above, limit),) for above, limit in zip(names[1:], limits, strict=True)]
    rates = [10.0] + [0.0] * len(limits)
    return Topology(
        tuple(
            Node(name, exit, rate, parents)
            for exit, (name, rate, parents) in enumerate(zip(names, rates, [*links, ()], strict=True), start=1)
        )
    )


def tree(limits=(4.0, 3.0)):
    tiers = [Tier("device", 4, 1, 5.0, limits[0]), Tier("edge", 2, 2, 0.0, limits[1]), Tier("cloud", 1, 3)]
    return Topology(expand_tiers(tiers))


def served(outputs, topology):
    return evaluate_plan(outputs, topology).accuracy


def test_where_deeper_is_surely_better_the_plan_is_p2():
    outputs = made_up((0.5, 1.5, 3.0))
    found = measured_plan(outputs, tree())
    assert found.topology == tree()
    assert found.accuracy == pytest.approx(served(outputs, tree()), abs=1e-12)


def test_a_worse_exit_gets_nothing_that_the_one_before_answers_better():
    outputs = made_up((1.0, 2.0, -1.0))
    found = measured_plan(outputs, tree())
    shares = serving_plan(found.topology).exit_share
    assert shares[2] < 0.1 < serving_plan(tree()).exit_share[2]
    assert found.accuracy > found.p2_accuracy + 0.05
    fresh = made_up((1.0, 2.0, -1.0), seed=1)  # and on data that it was not made from
    assert served(fresh, found.topology) > served(fresh, tree()) + 0.05


@pytest.mark.heavy
@pytest.mark.parametrize("skills", [(0.5, 1.5, 3.0), (1.0, 2.0, -1.0), (1.5, 0.2, 2.0)])
@pytest.mark.parametrize("limits", [(None, None), (6.0, 2.0)])
def test_no_grid_of_fractions_beats_the_plan_by_more_than_its_cells_cost(skills, limits):
    outputs = made_up(skills, num_samples=400)
    ranks = [confidence(logits, "entropy") for logits in outputs.logits]
    best = best_accuracy(
        chain(*limits),
        lambda exit, sample: ranks[exit - 1][sample],
        lambda exit, sample: outputs.correct[exit - 1, sample],
        400,
        steps=10,
    )
    found = measured_plan(outputs, chain(*limits))
    assert found.accuracy >= found.p2_accuracy
    assert found.accuracy > best - 0.01  # 25 cells of 16 samples each, and a gain that must be sure


def test_the_values_are_those_of_the_exact_flow():
    outputs = made_up((1.0, 2.0, -1.0))
    found = measured_plan(outputs, tree(), price=0.02)
    assert found.accuracy == pytest.approx(served(outputs, found.topology))
    plan = serving_plan(found.topology)
    sent = sum(node.transfer_rate for node in plan.nodes.values())
    assert found.value == pytest.approx(found.accuracy - 0.02 * sent / plan.exit_serve_rate.sum())


def test_the_higher_the_price_the_less_is_sent():
    outputs = made_up((0.5, 1.5, 3.0))
    sent = []
    for price in (0.0, 0.05, 0.2, 1.5):
        plan = serving_plan(measured_plan(outputs, tree((None, None)), price=price).topology)
        sent.append(sum(node.transfer_rate for node in plan.nodes.values()))
    assert sent == sorted(sent, reverse=True)
    assert sent[0] == pytest.approx(40.0)
    assert sent[-1] == pytest.approx(0.0)  # a right answer is worth less than 1.5


@settings(max_examples=25, deadline=None)
@given(topologies(max_nodes=8, max_exits=3), st.integers(0, 5))
def test_on_any_tree_or_dag_the_plan_keeps_every_limit_and_is_never_worse_than_p2(topology, seed):
    skills = np.random.default_rng(seed).normal(1.0, 1.0, topology.num_exits)
    found = measured_plan(made_up(skills, num_samples=300, seed=seed), topology)
    assert found.value >= found.p2_value - 1e-12
    limits = {(node.name, link.name): link.max_transfer_rate for node in topology.nodes for link in node.parents}
    for name, node in serving_plan(found.topology).nodes.items():
        for parent, rate in node.parents.items():
            limit = limits[name, parent]
            assert limit is None or rate <= limit * (1 + 1e-9)


def test_a_dag_sends_to_the_better_of_two_parents():
    nodes = (
        Node("device", 1, 10.0, (Link("good"), Link("bad"))),
        Node("good", 2),
        Node("bad", 3),
    )
    found = measured_plan(made_up((0.0, 2.0, -1.0)), Topology(nodes))
    rates = serving_plan(found.topology).nodes["device"].parents
    assert rates["bad"] < 0.5 < 5.0 < rates["good"]


def test_two_thousand_devices_are_planned_as_one():
    few, many = tree(), None
    tiers = [Tier("device", 400, 1, 5.0, 4.0), Tier("edge", 200, 2, 0.0, 3.0), Tier("cloud", 100, 3)]
    many = Topology(expand_tiers(tiers))
    tiers = [replace(tier, count=tier.count // 100) for tier in tiers]
    few = Topology(expand_tiers(tiers))
    outputs = made_up((1.5, 0.2, 2.0), num_samples=300)
    one, hundred = measured_plan(outputs, few), measured_plan(outputs, many)
    assert hundred.accuracy == pytest.approx(one.accuracy)


def test_answers_that_are_no_numbers_plan_without_warnings():
    outputs = made_up((1.0, 2.0))
    outputs.logits[1] = np.nan
    found = measured_plan(outputs, chain(5.0))
    assert serving_plan(found.topology).nodes["n0"].transfer_rate == pytest.approx(0.0)


def test_no_validation_data_is_a_sentence():
    empty = ExitOutputs(np.zeros((2, 0, 3), np.float32), np.zeros(0, np.int64))
    with pytest.raises(ExitflowError, match="validation data"):
        measured_plan(empty, chain(5.0))
