import numpy as np
import pytest

from exitflow.errors import ConfigError
from exitflow.evaluation.accuracy import evaluate_plan
from exitflow.evaluation.calibration import calibrate
from exitflow.planning.arrivals import Trace, Workload
from exitflow.planning.fluid import aggregated, fluid
from exitflow.planning.simulation import Failure, NodeSettings, parse_failure, simulate
from exitflow.planning.simulation_report import report
from exitflow.planning.timing import timing
from exitflow.routing import confidence
from exitflow.routing.decisions import Rules
from exitflow.routing.queueing import QueueLimits
from exitflow.topology.graph import Link, Node, Tier, Topology, expand_tiers
from exitflow.topology.rates import serving_plan
from tests.planning.test_prospects import outputs

QUIET = NodeSettings(rules=Rules(audit_share=0.0))


def tree(**device):
    options = {"arrival_rate": 40.0, "max_transfer_rate": 20.0} | device
    return Topology(expand_tiers([Tier("d", 4, 1, **options), Tier("e", 2, 2, 0.0, 20.0), Tier("c", 1, 3)]))


def run(topology, seconds=60.0, answers=None, settings=QUIET, failures=(), **options):
    answers = answers or outputs((0.7, 0.8, 0.9), num_samples=1000)
    workload = Workload(topology, confidence(answers.logits[0]), seconds, **options)
    return simulate(workload, answers, calibrate(answers, topology), settings=settings, failures=failures)


def shares(outcome, num_exits=3):
    return np.bincount(outcome.exits, minlength=num_exits + 1)[1:] / len(outcome.exits)


def test_shares_and_accuracy_are_about_as_planned():
    answers = outputs((0.7, 0.8, 0.9), num_samples=1000)
    topology = tree()
    outcome = run(topology, answers=answers)
    assert shares(outcome) == pytest.approx(serving_plan(topology).exit_share, abs=0.02)
    assert outcome.right.mean() == pytest.approx(evaluate_plan(answers, topology).accuracy, abs=0.02)
    assert not outcome.failed


def test_every_request_is_answered_once_and_counted_where_it_was():
    outcome = run(tree(service_ms=5.0, round_trip_ms=3.0))
    assert sum(outcome.served.values()) == len(outcome.exits)
    assert outcome.received["e-0"] == outcome.sent["d-0", "e-0"] + outcome.sent["d-1", "e-0"]
    assert sum(outcome.received[f"d-{n}"] for n in range(4)) == len(outcome.exits)


def test_no_link_carries_more_than_its_limit():
    outcome = run(tree(max_transfer_rate=3.0))
    for (child, _), count in outcome.sent.items():
        assert count <= (3.0 if child.startswith("d") else 20.0) * 60 + 20


def test_times_are_those_of_the_queues():
    topology = Topology(
        expand_tiers(
            [
                Tier("d", 4, 1, 20.0, 10.0, service_ms=10.0, round_trip_ms=6.0),
                Tier("e", 2, 2, 0.0, 10.0, service_ms=12.0, round_trip_ms=20.0),
                Tier("c", 1, 3, service_ms=15.0),
            ]
        )
    )
    outcome, expected = run(topology, 200.0), timing(topology, serving_plan(topology))
    for exit in (1, 2, 3):
        found = np.percentile(1e3 * outcome.latency[outcome.exits == exit], [50, 90, 99])
        times = expected.exit_latency[exit - 1]
        assert [times.p50, times.p90, times.p99] == pytest.approx(found, rel=0.15)
    assert outcome.busy["c-0"] == pytest.approx(expected.utilisation["c-0"], abs=0.03)


def test_a_lone_request_takes_what_can_be_added_by_hand():
    nodes = (
        Node("d", 1, 0.5, (Link("c", round_trip_ms=30.0, bandwidth_mbps=8.0, request_bytes=5000),), service_ms=2.0),
        Node("c", 2, service_ms=10.0),
    )
    outcome = run(Topology(nodes), 100.0, answers=outputs((0.5, 0.9)))
    assert np.median(outcome.latency) == pytest.approx(0.002 + 0.030 + 0.005 + 0.010)


def test_while_a_parent_is_gone_its_children_answer_and_then_ask_again():
    outcome = run(tree(), failures=[Failure("e-0", 20.0, 40.0), Failure("e-1", 20.0, 40.0)])
    parts = [outcome.exits[(outcome.begun >= begin) & (outcome.begun < begin + 15)] for begin in (3, 23, 44)]
    assert [float((part > 1).mean()) for part in parts] == pytest.approx([0.5, 0.0, 0.5], abs=0.05)
    assert outcome.fallbacks["parent-down"] > 0
    assert not outcome.failed


def test_what_a_failed_device_was_asked_is_not_answered():
    outcome = run(tree(), failures=[Failure("d-0", 20.0, 40.0)])
    assert outcome.failed["unreachable"] == pytest.approx(20 * 40, rel=0.15)


def test_a_queue_that_is_full_refuses():
    nodes = (Node("d", 1, 100.0, service_ms=20.0),)  # can do half of it
    settings = NodeSettings(rules=Rules(), limits=QueueLimits(50))
    outcome = run(Topology(nodes), 30.0, answers=outputs((0.5,)), settings=settings)
    assert outcome.failed["overloaded"] / 3000 == pytest.approx(0.5, abs=0.05)
    assert outcome.latency.max() <= 51 * 0.020 + 1e-6
    assert outcome.busy["d"] == pytest.approx(1.0, abs=0.05)


def test_a_slow_parent_is_not_waited_for():
    nodes = (Node("d", 1, 5.0, (Link("c"),)), Node("c", 2, service_ms=3000.0))
    outcome = run(Topology(nodes), 20.0, answers=outputs((0.5, 0.9)))
    assert outcome.latency.max() <= 1.0 + 1e-6
    assert outcome.fallbacks["timeout"] > 0


def test_audits_are_sent_and_nobody_waits_for_them():
    settings = NodeSettings(rules=Rules(audit_share=0.2))
    topology = tree(arrival_rate=20.0)
    outcome = run(topology, settings=settings)
    assert sum(outcome.sent.values()) > sum(run(topology).sent.values())
    assert sum(outcome.received[f"d-{n}"] for n in range(4)) == len(outcome.exits)


def test_the_same_seed_gives_the_same_and_chance_is_fair():
    first, second = run(tree(), 20.0), run(tree(), 20.0)
    assert (first.latency == second.latency).all()
    assert (first.exits == second.exits).all()


def test_a_report_shows_when_something_happened():
    topology = tree()
    found = report(run(topology, drift="difficulty"), topology, serving_plan(topology))
    assert found.windows[0].accuracy > found.windows[-1].accuracy + 0.05
    assert sum(found.exit_share) == pytest.approx(1)
    assert found.to_json()["links"]["e-0 -> c-0"][1] == 20.0


@pytest.mark.heavy
@pytest.mark.parametrize("options", [{}, {"drift": "traffic"}, {"trace": Trace.of([0, 1, 2, 3], [1, 4, 2, 1])}])
@pytest.mark.parametrize("limit", [10.0, 40.0])
def test_the_fluid_agrees_with_every_request_followed(options, limit):
    answers = outputs((0.7, 0.8, 0.9), num_samples=1000)
    topology = Topology(expand_tiers([Tier("d", 4, 1, 2 * limit, limit), Tier("e", 2, 2, 0.0, limit), Tier("c", 1, 3)]))
    workload = Workload(topology, confidence(answers.logits[0]), 2400 / limit, **options)
    exact = simulate(workload, answers, calibrate(answers, topology), settings=QUIET)
    mean = fluid(workload, answers)
    assert mean.requests == pytest.approx(len(exact.exits), rel=0.05)
    assert mean.exit_share == pytest.approx(shares(exact), abs=0.03)  # chance; the mean of many is compared below


@pytest.mark.heavy
def test_the_fluid_agrees_within_half_a_point_on_the_mean():
    answers = outputs((0.7, 0.8, 0.9), num_samples=1000)
    topology = tree()
    found = [shares(run(topology, 120.0, answers=answers, seed=seed)) for seed in range(5)]
    mean = fluid(Workload(topology, confidence(answers.logits[0]), 120.0), answers).exit_share
    assert mean == pytest.approx(np.mean(found, axis=0), abs=0.005)


def test_a_million_devices_are_one_node_to_the_fluid():
    tiers = [Tier("d", 1000, 1, 0.4, 0.2), Tier("e", 10, 2, 0.0, 10.0), Tier("c", 1, 3)]
    system = aggregated(Topology(expand_tiers(tiers)))
    assert len(system.topology.nodes) == 3
    assert serving_plan(system.topology).exit_share == pytest.approx([0.5, 0.25, 0.25])
    many = aggregated(tree(), copies=250_000)
    assert many.size == {"d-0": 1_000_000, "e-0": 2, "c-0": 1}
    assert serving_plan(many.topology).exit_serve_rate == pytest.approx([20e6, 10e6, 10e6])


@pytest.mark.parametrize("text", ["edge-0", "edge-0@5", "edge-0@9s..5s", "@1..2", "e@-1..2", "e@x..2", "e@1..inf"])
def test_failures_that_make_no_sense_are_refused(text):
    with pytest.raises(ConfigError) as refused:
        parse_failure(text)
    assert refused.value.key == "--fail"


def test_a_failure_of_a_node_that_is_not_there_is_refused():
    assert parse_failure("edge-0@60s..90s") == Failure("edge-0", 60.0, 90.0)
    with pytest.raises(ConfigError, match="there is no node 'x'"):
        run(tree(), 1.0, failures=[Failure("x", 0.0, 1.0)])
