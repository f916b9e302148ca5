import logging

import pytest

from exitflow.system.system import load_system
from exitflow.topology.doubts import doubts
from exitflow.topology.graph import Tier, Topology, expand_tiers
from exitflow.topology.settings import PAPER_SETTINGS, parse_setting


def tree(*, edges=2, device_limit=2.0, edge_limit=1.0):
    device, edge = Tier("d", 2, 1, 5.0, device_limit), Tier("e", edges, 2, max_transfer_rate=edge_limit)
    return Topology(expand_tiers([device, edge, Tier("c", 1, 3)]))


def test_a_plan_that_makes_sense_raises_no_doubt():
    assert list(doubts(tree())) == []


def test_nodes_without_children_are_named():
    assert list(doubts(tree(edges=4))) == [
        "no requests reach e-1, e-3: none arrive there, and no node stands below",
    ]


def test_links_that_carry_nothing_are_seen_where_they_lead():
    assert list(doubts(tree(device_limit=0.0))) == [
        "no requests reach e-0, e-1, c-0: none arrive there, and the nodes below send none up",
    ]


def test_an_exit_that_answers_nothing_is_named():
    assert list(doubts(tree(device_limit=None))) == [
        "exit 1 answers 0 % of the requests: d-0, d-1 may send up all that arrives",
    ]
    without_edges = Topology(expand_tiers([Tier("d", 2, 1, 5.0, 1.0), Tier("c", 1, 3)]))
    assert list(doubts(without_edges)) == ["exit 2 answers 0 % of the requests: no node stands there"]


def test_many_nodes_are_counted_and_not_all_named():
    assert next(doubts(tree(edges=100))) == (
        "no requests reach e-1, e-2, e-3, e-4, e-5 and 93 more: none arrive there, and no node stands below"
    )


@pytest.mark.parametrize("setting", [*PAPER_SETTINGS, "0.8-0.15-0.05"])
def test_settings_that_add_up_are_no_matter_for_a_warning(setting, caplog):
    parse_setting(setting)
    assert caplog.messages == []


def test_a_setting_that_does_not_add_up_is_said_with_what_it_becomes(caplog):
    parse_setting("60-60-10")
    assert caplog.messages == ["serving setting '60-60-10' adds up to 130 %, so the exits serve 46.2-46.2-7.69 %"]


def test_loading_a_system_tells_the_log_what_is_doubtful(caplog):
    load_system("paper-7:50-0-50")
    doubt = "exit 2 answers 0 % of the requests: edge-0, edge-1 may send up all that arrives"
    assert caplog.record_tuples == [("exitflow.system", logging.WARNING, f"paper-7:50-0-50: {doubt}")]
