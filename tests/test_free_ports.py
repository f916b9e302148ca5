"""Ports for programs that are started here."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from exitflow.free_ports import FreePorts, free_ports

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


@pytest.fixture
def some():
    """Gives so many ports that are free, and nobody's any more."""

    def find(count):
        ports = FreePorts()
        found = ports(count)
        ports.give_back()
        return found

    return find


def test_a_port_that_is_taken_is_not_given(some):
    taken, free = some(2)
    with socket.create_server(("127.0.0.1", taken)):
        assert FreePorts([taken, free])(2) == [free]


def test_a_port_that_another_process_was_given_is_not_given_until_that_has_ended(some):
    first, second = some(2)
    code = (
        f"from exitflow.free_ports import FreePorts; ports = FreePorts([{first}]); print(ports(1), flush=True); input()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], text=True, **pipes) as other:
        assert other.stdout.readline() == f"[{first}]\n"
        assert FreePorts([first, second])(2) == [second]
        other.kill()
    assert FreePorts([first])(1) == [first]


def test_so_many_ports_are_reserved_at_a_time(some):
    ports = FreePorts(some(4), most_reserved=3)
    first, others = ports(1), ports(3)
    assert len({*first, *others}) == 4
    assert ports(1) == first  # which was given back when the fourth was reserved


def test_a_port_is_given_once(some):
    ports = FreePorts(some(2))
    assert len(ports(3)) == 2
    assert ports(1) == []
