from dataclasses import replace

from hypothesis import given, settings

from exitflow.planning.classes import node_classes
from exitflow.topology.graph import Link, Node, Tier, Topology, expand_tiers
from tests.small import topologies


def test_a_tier_is_one_class():
    tiers = [Tier("device", 12, 1, 5.0, 4.0), Tier("edge", 4, 2, 0.0, 3.0), Tier("cloud", 1, 3)]
    classes = node_classes(Topology(expand_tiers(tiers)))
    assert [node.name for node in classes.representatives] == ["device-0", "edge-0", "cloud-0"]
    assert dict(classes.size) == {"device-0": 12, "edge-0": 4, "cloud-0": 1}


def test_a_parent_with_more_children_is_another_class_and_so_are_they():
    nodes = [Node(f"d{index}", 1, 1.0, (Link("a" if index else "b", 1.0),)) for index in range(3)]
    classes = node_classes(Topology((*nodes, Node("a", 2), Node("b", 2))))
    assert classes.class_of["a"] != classes.class_of["b"]
    assert classes.class_of["d0"] != classes.class_of["d1"] == classes.class_of["d2"]


@settings(max_examples=50, deadline=None)
@given(topologies())
def test_nodes_of_a_class_have_the_same_links_to_and_from_each_class(topology):
    classes = node_classes(topology)

    def seen(node):
        outgoing = sorted(map(repr, map(classes.kind, node.parents)))
        links = [(child, link) for child in topology.nodes for link in child.parents if link.name == node.name]
        incoming = sorted(repr((classes.class_of[child.name], replace(link, name=""))) for child, link in links)
        return node.exit, node.arrival_rate, outgoing, incoming

    for node in topology.nodes:
        assert seen(node) == seen(topology.by_name[classes.class_of[node.name]])
