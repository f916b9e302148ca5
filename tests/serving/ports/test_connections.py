"""Connections that do nothing keep nobody out."""

import asyncio
import resource
import socket
import ssl
import subprocess
import sys
from contextlib import ExitStack

import grpc
import pytest

from exitflow.free_ports import free_ports
from exitflow.serving.ports import http_server, limits
from exitflow.serving.ports.description import Surroundings
from exitflow.serving.ports.http_server import start_rest
from exitflow.serving.ports.limits import Patience, max_connections, raise_file_limit
from exitflow.serving.wire.messages import SERVICE
from exitflow.serving.wire.node_certificates import make_certificates
from exitflow.serving.wire.own_certificate import OwnCertificate
from exitflow.serving.wire.security import Security
from tests.serving.asking import message
from tests.serving.inprocess import PATIENT, http, running, until
from tests.serving.small import chain, make_bundle

pytestmark = pytest.mark.heavy


def few_files():
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))


@pytest.fixture
def node_with_few_files(tmp_path):
    """(bundle, gRPC, HTTP) of a node that may have 256 files open."""
    bundle = make_bundle(tmp_path / "b", chain())
    places = [f"127.0.0.1:{port}" for port in free_ports(2)]
    command = [sys.executable, "-m", "exitflow", "serve", tmp_path / "b", "--node=cloud"]
    command += [f"--listen={places[0]}", f"--http={places[1]}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=few_files)
    assert process.stdout.readline()
    yield bundle, *places
    process.kill()
    process.stdout.close()
    process.wait()


def connect(place):
    host, port = place.split(":")
    return socket.create_connection((host, int(port)))


@pytest.mark.heavy
def test_three_hundred_idle_connections_do_not_kill_a_node_that_may_have_256_files(node_with_few_files):
    bundle, listen, web = node_with_few_files
    with ExitStack() as stack, grpc.insecure_channel(listen) as channel:
        infer = channel.unary_unary(f"/{SERVICE}/ModelInfer")
        assert infer(message(bundle).SerializeToString(), timeout=PATIENT)
        for _ in range(300):
            stack.enter_context(connect(web))
            stack.enter_context(connect(listen))
        assert http(web, "GET", "/healthz")[0] == 200
        assert infer(message(bundle).SerializeToString(), timeout=PATIENT)
        with grpc.insecure_channel(listen) as other:  # has to wait until those end that never say what they are
            grpc.channel_ready_future(other).result(PATIENT)
            assert other.unary_unary(f"/{SERVICE}/ModelInfer")(message(bundle).SerializeToString(), timeout=PATIENT)


def test_idle_http_connections_make_room_for_those_that_ask(eager, monkeypatch):
    monkeypatch.setattr(http_server, "max_connections", lambda: 50)

    async def scenario():
        async with running(eager, "cloud") as (node, _):
            server = await start_rest(node, "127.0.0.1:0")
            place = ("127.0.0.1", server.port)
            idle = [await asyncio.open_connection(*place) for _ in range(200)]
            half = b"POST /v2/models/small/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n1"
            for _, writer in idle[180:]:  # also those that began a request
                writer.write(half)
            assert (await asyncio.to_thread(http, "{}:{}".format(*place), "GET", "/healthz"))[0] == 200
            await until(lambda: server.connections <= 50)
            assert await idle[0][0].read() == b""
            for _, writer in idle:
                writer.close()
            await server.close()

    asyncio.run(scenario())


def test_connections_that_never_greet_in_tls_make_room_too(eager, monkeypatch, tmp_path):
    monkeypatch.setattr(http_server, "max_connections", lambda: 20)
    make_certificates(tmp_path / "certs", ["cloud"], {}, days=1)
    certificate = OwnCertificate(Security(str(tmp_path / "certs" / "cloud")), "cloud")
    trusted = ssl.create_default_context(cafile=str(tmp_path / "certs" / "ca.pem"))

    async def scenario():
        async with running(eager, "cloud") as (node, _):
            server = await start_rest(node, "127.0.0.1:0", around=Surroundings(certificate=certificate))
            idle = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(60)]
            place = f"127.0.0.1:{server.port}"
            for _ in range(5):
                assert (await asyncio.to_thread(http, place, "GET", "/healthz", context=trusted))[0] == 200
            assert await idle[0][0].read() == b""
            for _, writer in idle:
                writer.close()
            await server.close()

    asyncio.run(scenario())


def test_an_answer_that_is_not_read_does_not_hold_its_connection(eager, monkeypatch):
    monkeypatch.setattr(http_server, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr("exitflow.serving.ports.rest.server_metadata", lambda: {"name": "x" * 30_000_000})

    async def scenario():
        async with running(eager, "cloud") as (node, _):
            server = await start_rest(node, "127.0.0.1:0")
            with connect(f"127.0.0.1:{server.port}") as silent:
                silent.sendall(b"GET /v2 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                await until(lambda: server.connections == 1)
                await until(lambda: server.connections == 0)
            await server.close()

    asyncio.run(scenario())


def test_what_waits_longest_is_given_up_first():
    given_up, patience = [], Patience(2)
    for name in "abc":
        patience.begin(name, lambda name=name: given_up.append(name))
    assert given_up == ["a"]
    patience.end("b")
    patience.begin("d", lambda: given_up.append("d"))
    patience.begin("e", lambda: given_up.append("e"))
    assert given_up == ["a", "c"]


def test_the_limit_of_files_is_raised_and_shared_among_the_ports(monkeypatch):
    limit, infinite = [(1024, 4096)], resource.RLIM_INFINITY
    monkeypatch.setattr(limits.resource, "getrlimit", lambda _: limit[0])
    monkeypatch.setattr(limits.resource, "setrlimit", lambda _, pair: limit.__setitem__(0, pair))
    raise_file_limit()
    assert (limit[0], max_connections()) == ((4096, 4096), 1333)  # (4096 - 96) / 3
    limit[0] = (1024, infinite)
    raise_file_limit()
    assert (limit[0], max_connections()) == ((65536, infinite), 4096)
    limit[0] = (infinite, infinite)
    raise_file_limit()
    assert (limit[0], max_connections()) == ((infinite, infinite), 4096)
