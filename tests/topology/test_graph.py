import pytest

from exitflow.errors import ConfigError
from exitflow.topology.graph import Link, Node, Tier, Topology, expand_tiers


def test_children_of_a_tier_are_spread_evenly_over_the_next():
    nodes = expand_tiers([Tier("device", 5, 1), Tier("edge", 2, 2), Tier("cloud", 1, 3)])
    parents = {node.name: [link.name for link in node.parents] for node in nodes}
    assert parents == {
        "device-0": ["edge-0"],
        "device-1": ["edge-0"],
        "device-2": ["edge-0"],
        "device-3": ["edge-1"],
        "device-4": ["edge-1"],
        "edge-0": ["cloud-0"],
        "edge-1": ["cloud-0"],
        "cloud-0": [],
    }


def test_tier_nodes_carry_the_rates_of_their_tier():
    device, *_ = expand_tiers([Tier("device", 1, 1, arrival_rate=25.0, max_transfer_rate=5.0), Tier("cloud", 1, 2)])
    assert device == Node("device-0", 1, 25.0, (Link("cloud-0", 5.0),))


def test_a_tier_may_be_smaller_than_the_one_above_it():
    nodes = expand_tiers([Tier("device", 2, 1), Tier("edge", 4, 2)])
    assert [node.parents[0].name for node in nodes[:2]] == ["edge-0", "edge-2"]


def test_children_come_before_parents():
    topology = Topology((Node("c", 3), Node("a", 1, parents=(Link("c"),)), Node("b", 2, parents=(Link("c"),))))
    assert [node.name for node in topology.children_first] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("nodes", "sentence"),
    [
        ((), "the system is empty"),
        ((Node("a", 1), Node("a", 2)), "two nodes have the name 'a'"),
        ((Node("a", 1, parents=(Link("b"),)),), "node 'a': there is no node 'b' to be its parent"),
        ((Node("a", 1, parents=(Link("a"),)),), "the links form a cycle: a -> a"),
        (
            (Node("a", 1, parents=(Link("b"),)), Node("b", 2, parents=(Link("a"),))),
            "the links form a cycle: ",
        ),
        (
            (Node("a", 2, parents=(Link("b"),)), Node("b", 2)),
            "node 'b': exit 2 must exceed the exit of its child 'a' (2)",
        ),
    ],
)
def test_an_invalid_topology_is_refused_with_a_sentence(nodes, sentence):
    with pytest.raises(ConfigError) as caught:
        Topology(nodes)
    assert sentence in str(caught.value)


def test_an_unknown_parent_gets_the_nearest_name():
    with pytest.raises(ConfigError, match="did you mean 'edge-0'"):
        Topology((Node("d", 1, parents=(Link("edge0"),)), Node("edge-0", 2)))


@pytest.mark.parametrize("rate", [-1.0, float("nan"), float("inf")])
def test_rates_must_be_finite_and_not_negative(rate):
    with pytest.raises(ConfigError, match="arrival_rate"):
        Node("a", 1, arrival_rate=rate)
    with pytest.raises(ConfigError, match="max_transfer_rate"):
        Link("a", rate)
    with pytest.raises(ConfigError, match="max_transfer_rate"):
        Tier("a", 1, 1, max_transfer_rate=rate)


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a b", "x" * 101])
def test_names_that_could_not_be_file_names_are_refused(name):
    with pytest.raises(ConfigError, match="name"):
        Node(name, 1)


def test_exits_count_from_one():
    for exit in (0, 1001):
        with pytest.raises(ConfigError, match=f"exits count from 1, up to 1,000, got {exit}"):
            Node("a", exit)


def test_a_node_cannot_have_one_parent_twice():
    with pytest.raises(ConfigError, match="twice"):
        Node("a", 1, parents=(Link("b"), Link("b", 2.0)))
