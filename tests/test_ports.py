"""Ports for programs that are started here."""

import socket
from pathlib import Path

import pytest

from exitflow import ports
from exitflow.ports import free_ports

OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_ports_differ_and_can_be_listened_on():
    found = free_ports(50)
    assert len(set(found)) == 50
    servers = [socket.create_server(("127.0.0.1", port)) for port in found]
    for server in servers:
        server.close()


@pytest.mark.skipif(not OUTGOING.exists(), reason="only Linux tells")
def test_no_port_is_one_that_an_outgoing_connection_may_get():
    first, last = map(int, OUTGOING.read_text().split())
    assert not any(first <= port <= last for port in free_ports(200))


def test_a_port_that_is_taken_is_not_given(monkeypatch):
    taken, free = free_ports(2)
    monkeypatch.setattr(ports, "_RANGE", [taken, free])
    with socket.create_server(("127.0.0.1", taken)):
        for _ in range(10):
            assert free_ports(1) == [free]
