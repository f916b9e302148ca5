import math

import numpy as np
import pytest
from hypothesis import given

from exitflow.errors import ConfigError
from exitflow.topology.graph import Link, Node, Topology
from exitflow.topology.rates import serving_plan
from tests.oracles import rates as oracle
from tests.small import topologies


@given(topologies())
def test_rates_equal_the_equations_of_the_paper(topology):
    plan = serving_plan(topology)
    for (child, parent), rate in oracle.transfer_rates(topology).items():
        assert plan.nodes[child].parents[parent] == pytest.approx(rate, rel=1e-9, abs=1e-9)
    np.testing.assert_allclose(plan.exit_serve_rate, oracle.exit_serve_rates(topology), rtol=1e-9, atol=1e-6)


@given(topologies())
def test_flow_is_conserved_at_every_node(topology):
    plan = serving_plan(topology)
    from_children = dict.fromkeys(plan.nodes, 0.0)
    for rates in plan.nodes.values():
        for parent, rate in rates.parents.items():
            from_children[parent] += rate
    for name, rates in plan.nodes.items():
        assert rates.received_rate == pytest.approx(rates.arrival_rate + from_children[name], rel=1e-12)
        assert rates.received_rate == pytest.approx(rates.serve_rate + rates.transfer_rate, rel=1e-12)
        assert rates.transfer_rate == pytest.approx(math.fsum(rates.parents.values()), rel=1e-12, abs=1e-12)
        assert 0 <= rates.serve_fraction <= 1
    arriving = math.fsum(node.arrival_rate for node in topology.nodes)
    assert plan.exit_serve_rate.sum() == pytest.approx(arriving, rel=1e-9)


@given(topologies())
def test_transfer_never_exceeds_the_limit_of_a_link(topology):
    plan = serving_plan(topology)
    for node in topology.nodes:
        for link in node.parents:
            if link.max_transfer_rate is not None:
                assert plan.nodes[node.name].parents[link.name] <= link.max_transfer_rate * (1 + 1e-12)


def test_the_papers_example_of_80_15_5_by_hand():
    devices = tuple(Node(f"d{i}", 1, 25.0, (Link(f"e{i // 2}", 5.0),)) for i in range(4))
    edges = tuple(Node(f"e{i}", 2, parents=(Link("c", 2.5),)) for i in range(2))
    plan = serving_plan(Topology((*devices, *edges, Node("c", 3))))
    assert plan.exit_share.tolist() == [0.8, 0.15, 0.05]
    assert plan.nodes["e0"].received_rate == 10.0
    assert plan.nodes["e0"].serve_rate == 7.5
    assert plan.nodes["e0"].serve_fraction == 0.75


def test_several_parents_share_in_proportion_to_their_limits():
    camera = Node("camera", 1, 40.0, (Link("a", 10.0), Link("b", 5.0)))
    plan = serving_plan(Topology((camera, Node("a", 2), Node("b", 2))))
    assert plan.nodes["camera"].parents == {"a": 10.0, "b": 5.0}
    plan = serving_plan(Topology((Node("camera", 1, 6.0, camera.parents), Node("a", 2), Node("b", 2))))
    assert plan.nodes["camera"].parents == {"a": 4.0, "b": 2.0}


def test_links_without_a_limit_take_everything_in_equal_parts():
    links = (Link("a"), Link("b", 5.0), Link("c"))
    plan = serving_plan(Topology((Node("n", 1, 8.0, links), Node("a", 2), Node("b", 2), Node("c", 2))))
    assert plan.nodes["n"].parents == {"a": 4.0, "b": 0.0, "c": 4.0}
    assert plan.nodes["n"].serve_rate == 0.0


def test_a_node_whose_links_may_carry_nothing_serves_everything():
    plan = serving_plan(Topology((Node("n", 1, 8.0, (Link("a", 0.0),)), Node("a", 2))))
    assert plan.nodes["n"].serve_fraction == 1.0
    assert plan.nodes["a"].received_rate == 0.0


def test_a_system_without_requests_has_no_plan():
    with pytest.raises(ConfigError, match="no requests arrive"):
        serving_plan(Topology((Node("a", 1),)))


def test_a_node_that_nothing_reaches_would_forward_if_it_could():
    """The fraction is the limit of ever less traffic: all goes up a link with room, nothing up one without."""
    idle = [Node("open", 1, 0.0, (Link("root", 1.0),)), Node("shut", 1, 0.0, (Link("root", 0.0),))]
    plan = serving_plan(Topology((*idle, Node("root", 2, 1.0))))
    assert plan.nodes["open"].serve_fraction == 0.0
    assert plan.nodes["shut"].serve_fraction == 1.0


def test_what_just_fits_into_a_link_leaves_nothing_to_serve():
    """0.1 + 0.2 is a little more than 0.3 in floats."""
    devices = (Node("a", 1, 0.1, (Link("edge"),)), Node("b", 1, 0.2, (Link("edge"),)))
    plan = serving_plan(Topology((*devices, Node("edge", 2, 0.0, (Link("cloud", 0.3),)), Node("cloud", 3))))
    assert plan.nodes["edge"].serve_rate == plan.nodes["edge"].serve_fraction == 0.0
