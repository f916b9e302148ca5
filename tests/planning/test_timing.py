import numpy as np
import pytest

from exitflow.errors import ConfigError
from exitflow.planning.timing import erlang_c, is_timed, timing
from exitflow.topology.graph import Link, Node, Tier, Topology, expand_tiers
from exitflow.topology.rates import serving_plan
from tests.oracles.queues import latencies


def one_node(rate=10.0, service_ms=20.0, cores=None):
    return Topology((Node("n", 1, rate, service_ms=service_ms, cores=cores),))


def times(topology):
    return timing(topology, serving_plan(topology))


def test_without_waiting_an_answer_takes_service_and_round_trips():
    nodes = (
        Node("d", 1, 1e-6, (Link("c", round_trip_ms=30.0, bandwidth_mbps=8.0, request_bytes=5000),), service_ms=2.0),
        Node("c", 2, service_ms=10.0),
    )
    found = times(Topology(nodes))
    assert found.latency.p50 == pytest.approx(2 + 30 + 5 + 10, abs=0.1)  # 5,000 bytes at 8 megabits/s: 5 ms
    assert found.exit_latency[0] is None  # all goes up


def test_the_mean_wait_of_one_core_is_that_of_the_textbook():
    # M/D/1 at 50 %: the mean wait is rho * D / (2 (1 - rho)) = 10 ms of 20; the median answer waits for less.
    found = times(one_node(rate=25.0))
    assert found.utilisation["n"] == pytest.approx(0.5)
    assert 20.0 < found.latency.p50 < 30.0 < found.latency.p90 < found.latency.p99


@pytest.mark.parametrize(("servers", "busy", "expected"), [(1, 0.3, 0.3), (2, 0.5, 1 / 3), (3, 2 / 3, 4 / 9)])
def test_erlang_c_has_the_values_of_the_tables(servers, busy, expected):
    assert erlang_c(servers, busy) == pytest.approx(expected)


@pytest.mark.parametrize("cores", [1, 2, 4])
@pytest.mark.parametrize("busy", [0.3, 0.7])
def test_one_queue_is_as_simulated(cores, busy):
    topology = one_node(rate=busy * cores / 0.02, cores=cores)
    simulated = np.percentile(latencies(topology, 8000.0 / cores, seed=1)[1], [50, 90, 99])
    found = times(topology).latency
    assert [found.p50, found.p90, found.p99] == pytest.approx(simulated, rel=0.1)


@pytest.mark.parametrize("seed", range(8))
def test_a_tree_at_random_is_as_simulated(seed):
    """The queues are taken for independent, which costs some percent where little load waits behind much."""
    rng = np.random.default_rng(seed)
    counts = sorted(rng.integers(1, 7, size=rng.integers(1, 4)), reverse=True)
    times_of = {"service_ms": 10.0, "round_trip_ms": 20.0}
    tiers = [
        Tier(
            f"tier{depth}",
            int(count),
            depth + 1,
            10.0 if depth == 0 else 0.0,
            10.0 * float(rng.uniform(0.3, 0.6) ** (depth + 1) * counts[0] / count),
            **{key: least + float(rng.uniform(0, 15)) for key, least in times_of.items()},
        )
        for depth, count in enumerate(counts)
    ]
    topology = Topology(expand_tiers([*tiers, Tier("root", 1, len(tiers) + 1, service_ms=12.0)]))
    found, simulated = times(topology), latencies(topology, 400.0, seed)
    assert found.bottleneck[1] < 0.7
    all_of_them = np.percentile(np.concatenate(list(simulated.values())), [50, 90, 99])
    assert [found.latency.p50, found.latency.p90, found.latency.p99] == pytest.approx(all_of_them, rel=0.1)


def test_a_tree_is_as_simulated():
    tiers = [
        Tier("device", 6, 1, 10.0, 6.0, service_ms=30.0, round_trip_ms=8.0, bandwidth_mbps=2.0, request_bytes=3000),
        Tier("edge", 2, 2, 0.0, 9.0, service_ms=25.0, round_trip_ms=40.0),
        Tier("cloud", 1, 3, service_ms=35.0, cores=2),
    ]
    topology = Topology(expand_tiers(tiers))
    found, simulated = times(topology), latencies(topology, 600.0, seed=2)
    for exit, expected in enumerate(found.exit_latency, start=1):
        here = np.percentile(simulated[exit], [50, 90, 99])
        assert [expected.p50, expected.p90, expected.p99] == pytest.approx(here, rel=0.08)
    all_of_them = np.percentile(np.concatenate(list(simulated.values())), [50, 90, 99])
    assert [found.latency.p50, found.latency.p90, found.latency.p99] == pytest.approx(all_of_them, rel=0.08)


def test_a_dag_with_two_ways_up_is_as_simulated():
    nodes = (
        Node(
            "d", 1, 20.0, (Link("near", 8.0, round_trip_ms=2.0), Link("far", 8.0, round_trip_ms=60.0)), service_ms=15.0
        ),
        Node("near", 2, 0.0, (Link("far", 4.0, round_trip_ms=30.0),), service_ms=40.0),
        Node("far", 3, service_ms=30.0),
    )
    topology = Topology(nodes)
    found, simulated = times(topology), latencies(topology, 3000.0, seed=3)
    all_of_them = np.percentile(np.concatenate(list(simulated.values())), [50, 90, 99])
    assert [found.latency.p50, found.latency.p90, found.latency.p99] == pytest.approx(all_of_them, rel=0.08)


def test_a_queue_that_grows_without_end_has_no_latency_and_is_the_bottleneck():
    found = times(one_node(rate=60.0))
    assert found.latency is None
    assert found.bottleneck == ("node n", pytest.approx(1.2))


def test_bytes_and_prices_are_counted_by_hand():
    nodes = (Node("d", 1, 10.0, (Link("c", 4.0, request_bytes=100, price=50.0),)), Node("c", 2))
    found = times(Topology(nodes))
    assert found.links["d", "c"].bytes_per_second == 400.0
    assert found.cost_per_million == pytest.approx(20.0)  # 4 of 10 requests, 50 a million


def test_only_a_system_that_says_something_of_time_is_timed():
    assert is_timed(one_node())
    assert not is_timed(Topology((Node("n", 1, 1.0),)))


def test_ten_thousand_devices_take_as_long_as_ten():
    tiers = [Tier("d", 10, 1, 10.0, 5.0, service_ms=20.0), Tier("c", 1, 2, service_ms=10.0)]
    few = times(Topology(expand_tiers(tiers)))
    tiers = [Tier("d", 3000, 1, 10.0, 5.0, service_ms=20.0), Tier("c", 300, 2, service_ms=10.0)]
    many = times(Topology(expand_tiers(tiers))).latency
    assert [many.p50, many.p90, many.p99] == pytest.approx([few.latency.p50, few.latency.p90, few.latency.p99])


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"service_ms": -1.0}, "service_ms"),
        ({"cores": 0}, "cores"),
        ({"round_trip_ms": -2.0}, "round_trip_ms"),
        ({"bandwidth_mbps": 0.0, "request_bytes": 1}, "bandwidth_mbps"),
        ({"bandwidth_mbps": 1.0}, "request_bytes"),
        ({"price": float("nan")}, "price"),
    ],
)
def test_what_makes_no_sense_is_refused(fields, key):
    with pytest.raises(ConfigError) as refused:
        Tier("t", 1, 1, **fields)
    assert refused.value.key == key
