"""Requests over one stream: together when they wait, answered in any order, refused one by one."""

import asyncio
from dataclasses import replace

import pytest

from exitflow.serving.wire.frames import frame, frames
from tests.serving.inprocess import EAGER, ask, running, until


def test_frames_come_out_as_they_went_in():
    wanted = [(1, 0.5, b"one"), (2**32 - 1, float("inf"), b""), (7, 14.0, b"x" * 1000)]
    assert list(frames(b"".join(frame(*each) for each in wanted))) == wanted
    assert list(frames(b"")) == []


@pytest.mark.parametrize("cut", [1, 15, 17])
def test_a_frame_that_is_cut_off_is_none(cut):
    with pytest.raises(ValueError, match="cut off"):
        list(frames(frame(1, 0.0, b"data")[:cut]))


def test_a_real_parent_is_asked_over_one_stream_and_by_no_calls(eager, monkeypatch):
    async def scenario():
        async with (
            running(eager, "edge") as (_, place),
            running(eager, "device", {"edge": place}, spec=EAGER) as (
                device,
                _,
            ),
        ):
            link = device.links["edge"]
            monkeypatch.setattr(link, "_infer", None)  # the call of its own
            found = await asyncio.gather(*(ask(device, eager) for _ in range(40)))
            assert {node for answers in found for node in answers.nodes} == {"edge"}
            stream = link._stream
            await ask(device, eager)
            assert link._stream is stream
            assert stream.idle

    asyncio.run(scenario())


def test_what_a_parent_refuses_is_refused_alone(eager):
    """The others of the same stream are answered."""

    async def scenario():
        async with (
            running(eager, "edge", spec=replace(EAGER, queue_size=1)) as (edge, place),
            running(eager, "device", {"edge": place}, spec=EAGER) as (device, _),
        ):
            found = await asyncio.gather(*(ask(device, eager) for _ in range(200)))
            nodes = [answers.nodes[0] for answers in found]
            assert set(nodes) <= {"edge", "device"}
            assert nodes.count("edge") > 0
            assert nodes.count("device") == device.counts.fallbacks["overloaded"]
            assert device.links["edge"].state.open
            assert edge.counts.failed == 0

    asyncio.run(scenario())


def test_a_stream_that_is_cut_is_made_anew(eager):
    async def scenario():
        async with (
            running(eager, "edge") as (_, place),
            running(eager, "device", {"edge": place}, spec=EAGER) as (
                device,
                _,
            ),
        ):
            await ask(device, eager)
            link = device.links["edge"]
            cut = link._stream
            cut._call.cancel()
            await until(lambda: cut.ended)
            assert (await ask(device, eager)).nodes == ["edge"]
            assert link._stream is not cut
            assert link.state.in_air.count == 0

    asyncio.run(scenario())
