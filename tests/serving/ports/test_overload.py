"""More requests than a node can answer, and less time than it needs: each is answered or refused at once."""

import asyncio
import json
import re
import threading
import time
from collections import Counter

import grpc
import pytest

from exitflow.serving.node.batching import OverloadedError
from exitflow.serving.node.node import ExpiredError, Node
from exitflow.serving.node.node_settings import ServingSpec
from exitflow.serving.ports.http_server import start_rest
from exitflow.serving.wire.messages import SERVICE, ModelInferResponse
from tests.serving.asking import message
from tests.serving.inprocess import EAGER, PATIENT, FakeParent, ask, fake_parent, http, running, until
from tests.serving.small import INPUT_SHAPE, NUM_CLASSES, chain, make_bundle

pytestmark = pytest.mark.heavy


def test_a_crowd_that_comes_at_once_is_answered_or_refused_and_never_cancelled(eager):
    async def scenario():
        async with running(eager, "cloud") as (node, address), grpc.aio.insecure_channel(address) as channel:
            data, call = message(eager).SerializeToString(), channel.unary_unary(f"/{SERVICE}/ModelInfer")

            async def code():
                try:
                    await call(data)
                except grpc.aio.AioRpcError as error:
                    return error.code().name
                return "OK"

            codes = Counter(await asyncio.gather(*(code() for _ in range(6000))))
            assert set(codes) <= {"OK", "RESOURCE_EXHAUSTED"}
            assert codes["OK"] >= node.spec.queue_size

    asyncio.run(scenario())


def test_the_deadline_is_passed_on_and_the_local_answer_comes_before_it(eager):
    async def scenario():
        parent = FakeParent(NUM_CLASSES, delay=PATIENT)
        async with (
            fake_parent(parent) as address,
            running(eager, "device", {"edge": address}, spec=EAGER) as (_, place),
            grpc.aio.insecure_channel(place) as channel,
        ):
            request = message(eager)
            raw = await channel.unary_unary(f"/{SERVICE}/ModelInfer")(request.SerializeToString(), timeout=3)
            response = ModelInferResponse.FromString(raw)
            assert b"device" in response.raw_output_contents[2]

    asyncio.run(scenario())


def test_a_request_that_waited_too_long_in_the_queue_is_not_computed(eager):
    async def scenario():
        node = Node(eager, "cloud", ServingSpec(), {})
        with pytest.raises(ExpiredError):
            await ask(node, eager, deadline=asyncio.get_running_loop().time() - 1)
        assert node.counts.expired == 1
        await node.close()

    asyncio.run(scenario())


def test_beyond_the_queue_requests_are_refused_at_once_and_it_recovers(eager):
    async def scenario():
        node = Node(eager, "cloud", ServingSpec(queue_size=4), {})
        asked = [asyncio.ensure_future(ask(node, eager)) for _ in range(40)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        refused = [each for each in found if isinstance(each, OverloadedError)]
        assert refused
        assert len(refused) == node.counts.rejected
        assert len(found) - len(refused) == node.counts.requests >= 4
        assert node.counts.arrived == 40  # or who plans for what was observed would plan for too little
        assert (await ask(node, eager)).nodes == ["cloud"]
        assert node.in_flight == 0
        await node.close()

    asyncio.run(scenario())


def test_over_http_a_full_queue_is_429_and_a_cut_link_is_told(eager, monkeypatch):
    async def scenario():
        async with (
            fake_parent(FakeParent(NUM_CLASSES, behaviour="UNAVAILABLE")) as address,
            running(eager, "device", {"edge": address}, spec=EAGER) as (node, _),
        ):
            server = await start_rest(node, "127.0.0.1:0")
            place = f"127.0.0.1:{server.port}"
            tensor = {"name": "input", "datatype": "UINT8", "shape": [1, *INPUT_SHAPE], "data": [0] * 16}
            body = json.dumps({"inputs": [tensor]})
            path = f"/v2/models/{eager.manifest.name}/infer"
            assert (await asyncio.to_thread(http, place, "POST", path, body))[0] == 200
            status, _, text = await asyncio.to_thread(http, place, "GET", "/readyz")
            assert status == 200
            assert json.loads(text)["degraded"]
            assert "edge" in json.loads(text)["problems"][0]
            metrics = (await asyncio.to_thread(http, place, "GET", "/metrics"))[2]
            assert re.search(r'^exitflow_fallbacks_total\{.*reason="unreachable".*\} 1', metrics, re.MULTILINE)

            def full(job):
                raise OverloadedError

            monkeypatch.setattr(node._batcher, "submit", full)
            status, _, text = await asyncio.to_thread(http, place, "POST", path, body)
            assert status == 429
            assert "full queue" in json.loads(text)["error"]
            node.draining = True
            for ready in ("/v2/health/ready", f"/v2/models/{eager.manifest.name}/ready"):
                status, _, text = await asyncio.to_thread(http, place, "GET", ready)
                assert (status, json.loads(text)["ready"]) == (503, False)
            await server.close()

    asyncio.run(scenario())


def test_bodies_that_are_too_large_too_many_or_never_end_hold_no_memory(eager, monkeypatch):
    path, opened = f"/v2/models/{eager.manifest.name}/infer", []

    async def post(port, length, body=b""):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        opened.append(writer)
        writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode() + body)
        return reader

    async def status(reader):
        return int((await reader.readline()).split()[1])

    async def scenario():
        async with running(eager, "cloud") as (node, _):
            server = await start_rest(node, "127.0.0.1:0")
            reader = await post(server.port, 5 * 2**20)  # refused by its head, before any of it comes
            assert await status(reader) == 413
            monkeypatch.setattr("exitflow.serving.ports.rest.MAX_HELD", 2**20)
            for _ in range(2):
                await post(server.port, 2**20, bytes(2**19 - 1))
            await asyncio.sleep(0.2)
            reader = await post(server.port, 1000, bytes(1000))
            assert await status(reader) == 429
            assert node.counts.rejected == 1
            monkeypatch.setattr("exitflow.serving.ports.rest.BODY_SECONDS", 0.1)
            for writer in opened:
                writer.close()
            await asyncio.sleep(0.2)
            reader = await post(server.port, 1000, bytes(999))
            assert await status(reader) == 400
            assert b"did not come within 0.1 s" in await reader.read(1000)
            opened[-1].close()
            await server.close()

    asyncio.run(scenario())


def test_connections_on_which_no_request_comes_are_closed_and_the_others_kept(eager, monkeypatch):
    monkeypatch.setattr("exitflow.serving.ports.http_server.HEADER_SECONDS", 0.3)

    async def dribble(port, *parts):
        """What the node says to a request that comes bit by bit."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for part in parts:
            if not reader.at_eof():
                writer.write(part)
                await asyncio.sleep(0.15)
        try:
            return await asyncio.wait_for(reader.read(), PATIENT)
        except ConnectionError:  # it was closed while more was on its way
            return b""
        finally:
            writer.close()

    async def scenario():
        async with running(eager, "cloud") as (node, _):
            server = await start_rest(node, "127.0.0.1:0")
            head = b"GET /healthz HTTP/1.1\r\n"
            silent, begun, again, whole = await asyncio.gather(
                dribble(server.port),
                dribble(server.port, head, *[b"X: 1\r\n"] * 6),
                dribble(server.port, head + b"Host: x\r\n\r\n", head),
                dribble(server.port, head + b"Host: x\r\nConnection: close\r\n\r\n"),
            )
            assert silent == begun == b""
            assert again.count(b"200 OK") == whole.count(b"200 OK") == 1
            await server.close()

    asyncio.run(scenario())


def test_a_request_that_takes_its_time_to_compute_is_still_answered_over_http(eager, monkeypatch):
    monkeypatch.setattr("exitflow.serving.ports.http_server.HEADER_SECONDS", 0.2)

    async def scenario():
        async with (
            fake_parent(FakeParent(NUM_CLASSES, delay=0.8)) as address,
            running(eager, "device", {"edge": address}, spec=EAGER) as (node, _),
        ):
            server = await start_rest(node, "127.0.0.1:0")
            tensor = {"name": "input", "datatype": "UINT8", "shape": [1, *INPUT_SHAPE], "data": [0] * 16}
            path = f"/v2/models/{eager.manifest.name}/infer"
            body = json.dumps({"inputs": [tensor]})
            status, _, text = await asyncio.to_thread(http, f"127.0.0.1:{server.port}", "POST", path, body)
            assert (status, json.loads(text)["outputs"][2]["data"]) == (200, ["edge"])
            await server.close()

    asyncio.run(scenario())


def test_who_has_gone_takes_no_tokens(tmp_path):
    bundle = make_bundle(tmp_path / "b", chain(limits=(20.0, 5.0)))

    async def scenario():
        async with (
            fake_parent(FakeParent(NUM_CLASSES)) as address,
            running(bundle, "device", {"edge": address}, spec=EAGER) as (node, _),
        ):
            compute = node._batcher._compute
            computing = threading.Event()

            def slowly(jobs):
                computing.set()
                time.sleep(0.3)
                return compute(jobs)

            node._batcher._compute = slowly
            bucket = node.control._buckets["edge"]
            bucket._tokens = before = bucket.burst
            asked = [asyncio.create_task(ask(node, bundle, 100)) for _ in range(2)]  # two, so that a thread computes
            await asyncio.to_thread(computing.wait, PATIENT)
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            await until(lambda: node._batcher.idle)
            assert bucket._tokens == before
            assert (node.counts.served, node.counts.out_of_tokens) == (0, 0)

    asyncio.run(scenario())


def test_who_has_no_time_left_for_a_parent_takes_no_token(tmp_path, monkeypatch):
    bundle = make_bundle(tmp_path / "b", chain(limits=(20.0, 5.0)))
    monkeypatch.setattr("exitflow.routing.decisions.LEAST_TIME", PATIENT)

    async def scenario():
        async with (
            fake_parent(FakeParent(NUM_CLASSES)) as address,
            running(bundle, "device", {"edge": address}, spec=EAGER) as (node, _),
        ):
            bucket = node.control._buckets["edge"]
            bucket.rate, bucket._tokens = 1e-9, bucket.burst
            node.control.threshold = node.control._hard = float("inf")
            answers = await ask(node, bundle, 4, deadline=node.now + PATIENT / 2)
            assert answers.nodes == ["device"] * 4
            assert node.counts.fallbacks == {"deadline": 4}
            assert bucket._tokens == bucket.burst

    asyncio.run(scenario())
