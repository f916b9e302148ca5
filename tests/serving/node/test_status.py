"""What a node says of itself arrives as it was said."""

import asyncio
import json

import pytest

from exitflow.config import decode, encode
from exitflow.errors import ServingError
from exitflow.serving.node.status import NodeStatus, status
from exitflow.serving.traffic.client import NodeClient
from exitflow.serving.wire.security import Security
from tests.serving.inprocess import EAGER, FakeParent, ask, fake_parent, running
from tests.serving.small import NUM_CLASSES


@pytest.mark.heavy
def test_a_status_comes_through_json_as_it_was(eager):
    async def scenario():
        async with (
            fake_parent(FakeParent(NUM_CLASSES)) as address,
            running(eager, "device", {"edge": address}, spec=EAGER) as (node, place),
        ):
            await ask(node, eager, 3)
            said = status(node)
            assert (said.node, said.received, said.links["edge"].answered) == ("device", 3, 3)
            assert said.links["edge"].tokens is None  # the link has no limit
            assert decode(NodeStatus, json.loads(json.dumps(encode(said)))) == said
            async with NodeClient(place, Security()) as client:
                asked = await client.status()
            assert (asked.bundle, asked.batches, asked.links["edge"].address) == (eager.hash, {"3": 1}, address)

    asyncio.run(scenario())


@pytest.mark.heavy
@pytest.mark.parametrize("answer", [{}, {"node": 3}, {"unheard": 1}])
def test_a_status_that_is_none_is_one_sentence(eager, monkeypatch, answer):
    monkeypatch.setattr("exitflow.serving.ports.grpc_server.encode", lambda _: answer)

    async def scenario():
        async with running(eager, "cloud") as (_, place), NodeClient(place, Security()) as client:
            with pytest.raises(ServingError, match=f"{place}: its status cannot be read .*; is it of this version?"):
                await client.status()

    asyncio.run(scenario())
