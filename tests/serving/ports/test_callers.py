"""How much a child may forward: the receiver counts too."""

import asyncio
import random
from collections import Counter

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exitflow.routing.clock import VirtualClock
from exitflow.routing.rate_control import TokenBucket
from exitflow.serving.ports.callers import BUNCHED, allowance
from exitflow.serving.wire.messages import SERVICE
from tests.serving.asking import message
from tests.serving.inprocess import running
from tests.serving.small import chain, make_bundle

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def limited(tmp_path_factory):
    return make_bundle(tmp_path_factory.mktemp("limited") / "b", chain(limits=(20.0, 5.0)))


def test_a_child_that_sends_more_than_its_link_may_carry_is_refused_what_is_too_much(limited):
    clock = VirtualClock(100.0)

    async def scenario():
        async with running(limited, "edge", clock=clock) as (node, place), grpc.aio.insecure_channel(place) as channel:
            request = message(limited)
            request.parameters["exitflow_from"].string_param = "device"
            call = channel.unary_unary(f"/{SERVICE}/ModelInfer")

            async def code():
                try:
                    await call(request.SerializeToString())
                except grpc.aio.AioRpcError as error:
                    return error.code().name
                return "OK"

            async def codes(count):
                return Counter(await asyncio.gather(*(code() for _ in range(count))))

            assert await codes(100) == {"OK": 40, "RESOURCE_EXHAUSTED": 60}  # 2 s of 20/s
            clock.advance(1.0)
            assert await codes(100) == {"OK": 20, "RESOURCE_EXHAUSTED": 80}
            assert node.counts.over_limit == {"device": 140}
            assert node.counts.from_children == {"device": 60}

    asyncio.run(scenario())


@given(rate=st.floats(0.05, 500.0), burst_seconds=st.floats(0.0, 3.0), seed=st.integers(0, 2**32))
def test_who_keeps_the_limit_is_never_refused_however_forwards_bunch_on_their_way(rate, burst_seconds, seed):
    chance = random.Random(seed)
    own = TokenBucket(rate, rate * burst_seconds, 0.0)
    sent = [number * 0.2 / rate for number in range(1000) if own.take(number * 0.2 / rate)]
    arrivals = [moment + chance.uniform(0.0, BUNCHED) for moment in sent]
    bucket = allowance(rate, burst_seconds, 0.0)
    assert all(bucket.take(now) for now in sorted(arrivals))
