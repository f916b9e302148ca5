"""Ports for programs that are started here."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from exitflow import free_ports as module
from exitflow.free_ports import free_ports

pytestmark = pytest.mark.heavy

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
    taken, free = _range_of(2, monkeypatch)
    with socket.create_server(("127.0.0.1", taken)):
        assert free_ports(2) == [free]


def test_a_port_that_another_process_was_given_is_not_given_until_that_has_ended(monkeypatch):
    first, second = _range_of(2, monkeypatch)
    code = f"from exitflow import free_ports as module; module._RANGE = [{first}]; print(module.free_ports(1), flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], text=True, **pipes) as other:
        assert other.stdout.readline() == f"[{first}]\n"
        assert free_ports(2) == [second]
        other.kill()
    monkeypatch.setattr(module, "_RANGE", [first])
    assert free_ports(1) == [first]


def test_so_many_ports_are_reserved_at_a_time(monkeypatch):
    monkeypatch.setattr(module, "_MOST_RESERVED", 3)
    first, *others = _range_of(4, monkeypatch)
    monkeypatch.setattr(module, "_RANGE", [first])
    assert free_ports(1) == [first]
    assert free_ports(1) == []
    monkeypatch.setattr(module, "_RANGE", others)
    assert sorted(free_ports(3)) == sorted(others)
    monkeypatch.setattr(module, "_RANGE", [first])
    assert free_ports(1) == [first]


def _range_of(count, monkeypatch):
    """So many ports that are free, and from now on the only ones."""
    found = free_ports(count)
    while module._reserved:
        os.close(module._reserved.popleft())
    monkeypatch.setattr(module, "_RANGE", found)
    return found
