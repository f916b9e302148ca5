import pytest

from exitflow.errors import ConfigError
from exitflow.planning.rehearsal import rehearsal
from exitflow.topology.graph import Tier, Topology, expand_tiers

TREE = Topology(
    expand_tiers([Tier("device", 2, 1, 10.0, 5.0, service_ms=7.0, round_trip_ms=9.0, cores=4), Tier("edge", 1, 2)])
)


def test_patterns_and_what_is_declared_become_settings_and_a_system_with_these_times():
    found = rehearsal(TREE, ["declared", "edge-*=20ms"], ["device-1=30"])
    assert found.settings("device-0") == ["service_ms=7.0"]
    assert found.settings("device-1") == ["service_ms=7.0", "round_trip_ms=30.0"]
    assert found.settings("edge-0") == ["service_ms=20.0"]
    devices, edge = found.topology(TREE).nodes[:2], found.topology(TREE).by_name["edge-0"]
    assert [node.parents[0].round_trip_ms for node in devices] == [None, 30.0]
    assert [node.cores for node in devices] == [None, None]  # one at a time
    assert edge.service_ms == 20.0


def test_nothing_is_rehearsed_unless_asked():
    assert rehearsal(TREE, [], []) is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("device-*", "expected NODE=MILLISECONDS"),
        ("device-*=-3", "expected NODE=MILLISECONDS"),
        ("device-*=nan", "expected NODE=MILLISECONDS"),
        ("cloud-*=3", "no node has a name like 'cloud-\\*'"),
    ],
)
def test_what_makes_no_sense_is_refused(text, problem):
    with pytest.raises(ConfigError, match=problem) as refused:
        rehearsal(TREE, [text], [])
    assert refused.value.key == "--service"


def test_what_is_not_declared_cannot_be_rehearsed():
    bare = Topology(expand_tiers([Tier("device", 2, 1, 10.0, 5.0), Tier("edge", 1, 2)]))
    with pytest.raises(ConfigError, match="nothing of that kind is declared"):
        rehearsal(bare, [], ["declared"])
