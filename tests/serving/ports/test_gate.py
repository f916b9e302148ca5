"""Callers that promise a message and do not send it, or do not take their answer, hold nobody else up."""

import asyncio
from contextlib import AsyncExitStack

import grpc
import pytest

from exitflow.serving.node.node_settings import ServingSpec
from exitflow.serving.ports import gate
from exitflow.serving.ports.grpc_server import max_calls
from exitflow.serving.wire.messages import SERVICE
from tests.serving import http2
from tests.serving.asking import message
from tests.serving.inprocess import PATIENT, running, until

pytestmark = pytest.mark.heavy

INFER = f"/{SERVICE}/ModelInfer"


async def infer(address, bundle, **options):
    async with grpc.aio.insecure_channel(address) as channel:
        return await channel.unary_unary(INFER)(message(bundle).SerializeToString(), timeout=PATIENT, **options)


async def status_of(reader, stream):
    """The number that ends a call; -1: the stream was reset."""
    async for kind, flags, number, payload in http2.frames(reader):
        if number == stream and kind == http2.RST_STREAM:
            return -1
        if number == stream and kind == http2.HEADERS and flags & http2.END_STREAM:
            at = payload.index(b"grpc-status") + len(b"grpc-status")
            return int(payload[at + 1 : at + 1 + payload[at]])
    return None


def test_three_thousand_calls_without_a_message_keep_nobody_out(eager):
    async def scenario():
        async with running(eager, "cloud") as (node, address), AsyncExitStack() as stack:
            for _ in range(30):
                _, writer = await stack.enter_async_context(http2.connection(address))
                writer.write(b"".join(http2.head_of_call(2 * call + 1, INFER) for call in range(100)))
                await writer.drain()
            for _ in range(20):
                assert await infer(address, eager)
            await until(lambda: node.counts.abandoned >= 3000 - gate.MAX_WAITING)  # the first that came are given up
            assert await infer(address, eager)

    asyncio.run(scenario())


def test_a_message_that_does_not_come_in_time_ends_its_call(eager, monkeypatch):
    monkeypatch.setattr(gate, "MESSAGE_SECONDS", 0.2)

    async def scenario():
        async with running(eager, "cloud") as (node, address), http2.connection(address) as (reader, writer):
            part = http2.message_of_call(1, bytes(1000))[:500]
            writer.write(http2.head_of_call(1, INFER) + part)
            assert await status_of(reader, 1) == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
            assert node.counts.abandoned == 1

    asyncio.run(scenario())


def test_a_call_that_ends_without_a_message_makes_no_sense(eager):
    async def scenario():
        async with running(eager, "cloud") as (_, address), http2.connection(address) as (reader, writer):
            writer.write(http2.head_of_call(1, INFER) + http2.frame(http2.DATA, http2.END_STREAM, 1))
            assert await status_of(reader, 1) == grpc.StatusCode.INVALID_ARGUMENT.value[0]

    asyncio.run(scenario())


@pytest.mark.parametrize("metadata", [{}, {"authorization": "Bearer wrong"}])
def test_the_token_is_checked_before_the_message(eager, metadata):
    async def scenario():
        async with (
            running(eager, "cloud", token="sesame") as (_, address),
            http2.connection(address) as (reader, writer),
        ):
            writer.write(http2.head_of_call(1, INFER, **metadata))  # and never a message
            assert await status_of(reader, 1) == grpc.StatusCode.UNAUTHENTICATED.value[0]

    asyncio.run(scenario())


def test_an_answer_that_nobody_takes_is_given_up(eager, monkeypatch):
    monkeypatch.setattr(gate, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr("exitflow.serving.ports.grpc_server.server_metadata", lambda: {"name": "x" * 200_000})

    async def scenario():
        async with running(eager, "cloud") as (node, address), http2.connection(address, window=0) as (_, writer):
            method = f"/{SERVICE}/ServerMetadata"
            writer.write(http2.head_of_call(1, method) + http2.message_of_call(1, b""))
            await until(lambda: node.counts.abandoned == 1)

    asyncio.run(scenario())


def test_answers_that_nobody_takes_keep_nobody_out(eager, monkeypatch):
    monkeypatch.setattr(gate, "MAX_WAITING", 20)
    monkeypatch.setattr("exitflow.serving.ports.grpc_server.server_metadata", lambda: {"name": "x" * 200_000})

    async def scenario():
        async with running(eager, "cloud") as (node, address), http2.connection(address, window=0) as (_, writer):
            for call in range(100):
                stream = 2 * call + 1
                writer.write(
                    http2.head_of_call(stream, f"/{SERVICE}/ServerMetadata") + http2.message_of_call(stream, b"")
                )
            await until(lambda: node.counts.abandoned == 80)
            assert await infer(address, eager)

    asyncio.run(scenario())


def test_a_caller_that_goes_away_before_its_answer_leaves_no_traceback(eager, monkeypatch, caplog):
    asked = []
    monkeypatch.setattr(
        "exitflow.serving.ports.grpc_server.server_metadata", lambda: asked.append(1) or {"name": "x" * 200_000}
    )

    async def scenario():
        async with running(eager, "cloud") as (_, address):
            async with http2.connection(address, window=0) as (_, writer):
                method = f"/{SERVICE}/ServerMetadata"
                writer.write(http2.head_of_call(1, method) + http2.message_of_call(1, b""))
                await until(lambda: asked)
                await asyncio.sleep(0.2)
            assert await infer(address, eager)
            await asyncio.sleep(0.2)

    asyncio.run(scenario())
    told = [record for record in caplog.records if record.exc_info]
    # Where several loops have used gRPC in one process, as tests do, each wakes the others' pollers for nothing.
    assert [record for record in told if "PollerCompletionQueue" not in record.getMessage()] == []


def test_one_connection_has_no_more_calls_than_the_node_takes(eager):
    async def scenario():
        spec = ServingSpec(queue_size=2)
        async with running(eager, "cloud", spec=spec) as (_, address), http2.connection(address) as (reader, _):
            async for kind, _, _, payload in http2.frames(reader):
                if kind == http2.SETTINGS and payload:
                    pairs = {payload[at : at + 2]: payload[at + 2 : at + 6] for at in range(0, len(payload), 6)}
                    assert int.from_bytes(pairs[b"\0\3"]) == max_calls(spec)
                    break

    asyncio.run(scenario())
