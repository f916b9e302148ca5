from itertools import product

import numpy as np
import pytest

from exitflow.errors import ConfigError
from exitflow.evaluation.outputs import ExitOutputs
from exitflow.planning.prospects import best_kept, parse_objective, prospect
from exitflow.topology.graph import Link, Node, Tier, Topology, expand_tiers


def tree(*, devices=4, cores=1):
    return Topology(
        expand_tiers(
            [
                Tier("device", devices, 1, 10.0, 6.0, service_ms=4.0, round_trip_ms=6.0),
                Tier("edge", 2, 2, 0.0, 8.0, service_ms=15.0, round_trip_ms=30.0, price=40.0),
                Tier("cloud", 1, 3, service_ms=30.0, cores=cores),
            ]
        )
    )


def outputs(accuracies, *, num_samples=400, num_classes=4, seed=0):
    """Exits that are right so often, and surer where they are right."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(num_classes, size=num_samples)
    logits = rng.normal(size=(len(accuracies), num_samples, num_classes))
    for exit, accuracy in enumerate(accuracies):
        right = rng.random(num_samples) < accuracy
        answer = np.where(right, labels, (labels + 1) % num_classes)
        logits[exit, np.arange(num_samples), answer] += np.where(right, 6.0, 4.0)
    return ExitOutputs(logits.astype(np.float32), labels)


def by_hand(topology, device, edge):
    """The same tree whose devices and edges send up at most so much."""
    limits = {1: device, 2: edge}
    nodes = [
        Node(
            node.name,
            node.exit,
            node.arrival_rate,
            tuple(Link(link.name, limits[node.exit], link.round_trip_ms, price=link.price) for link in node.parents),
            node.service_ms,
            node.cores,
        )
        for node in topology.nodes
    ]
    return prospect(Topology(tuple(nodes)))


@pytest.mark.parametrize("text", ["p99=60ms", "p99=45ms", "cost=5", "p90=40"])
def test_the_plan_that_keeps_an_objective_is_about_as_deep_as_the_best_of_all(text):
    topology, objective = tree(), parse_objective(text)
    found = best_kept(topology, [objective])
    assert objective.missed(found) == 0
    tried = (by_hand(topology, 6 * a, 8 * b) for a, b in product(np.linspace(0, 1, 13), repeat=2))
    deepest = max(each.depth for each in tried if objective.missed(each) == 0)
    assert found.depth >= deepest - 0.01


def test_an_objective_that_is_kept_anyway_changes_nothing():
    assert best_kept(tree(), [parse_objective("p99=5000ms")]).plan.to_json() == prospect(tree()).plan.to_json()


def test_two_objectives_are_kept_together():
    objectives = [parse_objective("p99=60ms"), parse_objective("cost=3")]
    found = best_kept(tree(), objectives)
    assert [objective.missed(found) for objective in objectives] == [0, 0]


def test_enough_accuracy_is_had_at_less_cost():
    answers = outputs((0.6, 0.8, 0.95))
    everything = best_kept(tree(), [parse_objective("p99=500ms")], answers)
    enough = best_kept(tree(), [parse_objective("accuracy=70%")], answers)
    assert enough.accuracy >= 0.7
    assert enough.timing.cost_per_million < everything.timing.cost_per_million


@pytest.mark.heavy
def test_what_cannot_be_kept_is_said_with_what_would_help_first():
    with pytest.raises(ConfigError, match="no plan keeps p50=1ms: the nearest has p50 4") as refused:
        best_kept(tree(), [parse_objective("p50=1ms")])
    assert refused.value.key == "--slo"
    with pytest.raises(ConfigError, match="what would help first is twice the limit of the links of each of the 2"):
        best_kept(tree(), [parse_objective("accuracy=80%")], outputs((0.1, 0.1, 1.0)))


def test_a_queue_that_grows_without_end_is_relieved():
    topology = tree(devices=8)  # sends 16 requests/s to a cloud for 33, and 24 to each edge: for 66
    busy = Topology(tuple(Node("d", 1, 100.0, (Link("c"),)) if node.name == "x" else node for node in topology.nodes))
    assert best_kept(busy, [parse_objective("p99=100ms")]).timing.latency.p99 <= 100
    lone = Topology((Node("d", 1, 100.0, (Link("c"),), service_ms=1.0), Node("c", 2, service_ms=20.0)))
    assert prospect(lone).timing.latency is None
    assert best_kept(lone, [parse_objective("p99=100ms")]).timing.latency.p99 <= 100


@pytest.mark.parametrize("text", ["p99", "p99=", "p99=-1ms", "p99=nan", "accuracy=101%", "p75=3ms", "cost=1e999"])
def test_objectives_that_make_no_sense_are_refused(text):
    with pytest.raises(ConfigError) as refused:
        parse_objective(text)
    assert refused.value.key == "--slo"


def test_objectives_of_which_nothing_is_known_are_refused():
    plain = Topology((Node("d", 1, 1.0, (Link("c"),)), Node("c", 2)))
    with pytest.raises(ConfigError, match="says nothing of time"):
        best_kept(plain, [parse_objective("p99=3ms")])
    with pytest.raises(ConfigError, match="add --run"):
        best_kept(tree(), [parse_objective("accuracy=50%")])
