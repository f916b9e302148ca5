"""What a node logs about its callers: who, which request, and never more than it can bear."""

import json
import signal
import socket
import subprocess
import sys

import pytest

from exitflow import logs
from exitflow.free_ports import free_ports
from tests.serving.small import chain, make_bundle

HEAD = b"POST /v2/models/small/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"


@pytest.fixture
def node(tmp_path):
    """(its HTTP port, stop): `stop` returns what it has logged."""
    make_bundle(tmp_path / "b", chain())
    listen, http = free_ports(2)
    command = [sys.executable, "-m", "exitflow", "serve", tmp_path / "b", "--node=cloud", "--log-format=json"]
    command += [f"--listen=127.0.0.1:{listen}", f"--http=127.0.0.1:{http}"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
    assert process.stdout.readline()

    def stop():
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        return (tmp_path / "log").read_text(encoding="utf-8").splitlines()

    yield http, stop
    process.kill()
    process.stdout.close()
    process.wait()


def send(port, data):
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(data)
        return connection.getsockname(), connection.recv(65536)


@pytest.mark.heavy
def test_invalid_http_is_logged_with_its_peer_and_not_without_limit(node):
    port, stop = node
    for _ in range(2 * logs.BURST):
        _, answer = send(port, b"\xff\x00nonsense\x1b[2J\r\n\r\n")
        assert b" 400 " in answer
    lines = [json.loads(line) for line in stop()]
    found = [line for line in lines if "Invalid HTTP" in line["message"]]
    assert logs.BURST <= len(found) <= logs.BURST + 10
    assert found[0]["peer"].startswith("127.0.0.1:")
    assert "more_left_out" in found[logs.BURST - 1]


@pytest.mark.heavy
def test_a_refused_request_is_logged_with_peer_and_code(node):
    port, stop = node
    (host, own_port), _ = send(port, b"GET /v2/models/who%0Aknows HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    found = [line for line in map(json.loads, stop()) if "refused" in line["message"]]
    assert [(line["peer"], line["code"]) for line in found] == [(f"{host}:{own_port}", "NOT_FOUND")]


@pytest.mark.heavy
def test_a_client_that_stalls_until_the_node_stops_leaves_no_traceback(node):
    port, stop = node
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(HEAD + b"{")
        lines = stop()
        assert b" 503 " in connection.recv(65536)
    assert "traceback" not in "\n".join(lines)
