import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exitflow.errors import ConfigError
from exitflow.topology.graph import Link, Node, Topology
from exitflow.topology.paper_trees import paper_tree
from exitflow.topology.rates import serving_plan
from exitflow.topology.settings import PAPER_SETTINGS, parse_setting, with_setting


@pytest.mark.parametrize("num_nodes", [7, 17])
@pytest.mark.parametrize("setting", PAPER_SETTINGS)
def test_the_papers_trees_serve_what_their_setting_says(num_nodes, setting):
    topology = paper_tree(num_nodes, setting)
    assert len(topology.nodes) == num_nodes
    np.testing.assert_allclose(serving_plan(topology).exit_share, parse_setting(setting), rtol=1e-12)


def test_all_requests_arrive_at_the_leaves():
    topology = paper_tree(7, "80-15-5")
    assert {node.arrival_rate for node in topology.with_exit(1)} == {25.0}
    assert {node.arrival_rate for node in (*topology.with_exit(2), *topology.with_exit(3))} == {0.0}


@given(st.tuples(*[st.integers(0, 100)] * 3).filter(any))
@example((70, 30, 0))  # rounding alone reaches the cloud
def test_any_setting_can_be_put_on_a_tree_where_all_requests_arrive_at_the_leaves(parts):
    setting = "-".join(map(str, parts))
    topology = with_setting(paper_tree(7, "33-33-33"), setting)
    np.testing.assert_allclose(serving_plan(topology).exit_share, parse_setting(setting), atol=1e-12)


def test_a_setting_on_a_dag_with_uneven_arrivals_keeps_the_split_of_its_links():
    nodes = (
        Node("a", 1, 30.0, (Link("e", 1.0), Link("f", 3.0))),
        Node("b", 1, 10.0, (Link("f"),)),
        Node("e", 2, 0.0, (Link("c"),)),
        Node("f", 2, 0.0, (Link("c"),)),
        Node("c", 3),
    )
    topology = with_setting(Topology(nodes), "50-25-25")
    plan = serving_plan(topology)
    np.testing.assert_allclose(plan.exit_share, [0.5, 0.25, 0.25])
    assert plan.nodes["a"].parents == pytest.approx({"e": 3.75, "f": 11.25})
    assert plan.nodes["b"].serve_fraction == pytest.approx(0.5)


@pytest.mark.parametrize("text", ["", "a-b", "80-15-x", "0-0-0", "nan-1-1", "1e999-1-1", "1e308-1e308-1"])
def test_a_setting_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match="such as 80-15-5"):
        parse_setting(text)


def test_a_setting_must_have_a_part_for_every_exit():
    with pytest.raises(ConfigError, match="2 parts, the system has 3 exits"):
        with_setting(paper_tree(7, "80-15-5"), "50-50")


def test_an_exit_cannot_serve_more_than_reaches_it():
    topology = Topology((Node("d", 1, 10.0, (Link("c"),)), Node("e", 2, 5.0, (Link("c"),)), Node("c", 3)))
    with pytest.raises(ConfigError, match="only 5 reach it"):
        with_setting(topology, "10-80-10")


def test_a_node_without_parents_cannot_pass_requests_on():
    topology = Topology((Node("d", 1, 10.0), Node("c", 2, 10.0)))
    with pytest.raises(ConfigError, match="10 reach nodes without a parent"):
        with_setting(topology, "20-80")
