"""What the log of the server tells of its nodes and its certificate."""

import logging

import pytest

pytest.importorskip("flwr")

from exitflow.flower.federation_status import Present
from exitflow.flower.keys import write_authority, write_server_certificate
from exitflow.flower.superlink import Presence, warn_of_end


@pytest.fixture
def told(caplog):
    caplog.set_level(logging.INFO, "exitflow.federation")

    def since():
        found = [(record.levelname, record.getMessage()) for record in caplog.records]
        caplog.clear()
        return found

    return since


def test_nodes_that_come_and_go_are_told_once(told):
    presence = Presence({"device-0": "aa", "device-1": "bb"})

    def see(*connected):
        keys = {"device-0": "aa", "device-1": "bb", "stranger": "cc"}
        presence.see([Present(name, key, name in connected, None) for name, key in keys.items()])
        return told()

    assert see() == []
    assert see("device-0", "stranger") == [("INFO", "node 'device-0' is connected")]
    assert see("device-0") == []
    presence.see(None)  # nobody answered
    assert see("device-1") == [("WARNING", "node 'device-0' is gone"), ("INFO", "node 'device-1' is connected")]
    assert see("device-0", "device-1") == [("INFO", "node 'device-0' is back")]


def test_a_certificate_that_ends_soon_is_warned_of(tmp_path, told):
    authority = write_authority(tmp_path / "authority")
    write_server_certificate(tmp_path, authority, ["localhost"], days=31)
    warn_of_end(tmp_path)
    assert told() == []
    write_server_certificate(tmp_path, authority, ["localhost"], days=10)
    warn_of_end(tmp_path)
    ((level, message),) = told()
    assert level == "WARNING"
    assert message.endswith("in 10 days: exitflow federation renew makes a new one, and nothing need be stopped")
