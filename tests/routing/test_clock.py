"""A virtual clock does what a real one does, at once."""

import asyncio
import doctest

from exitflow.routing import clock as clock_module
from exitflow.routing.clock import RealClock, VirtualClock, sleep


def test_what_is_due_happens_in_its_order_and_so_does_what_that_sets_in_motion():
    clock, seen = VirtualClock(10.0), []

    def note(name):
        seen.append((name, clock.now()))
        if name == "first":
            clock.call_later(1.0, note, "child")

    clock.call_later(2.0, note, "last")
    clock.call_later(1.0, note, "first")
    clock.call_later(2.0, note, "also last")
    clock.call_later(0.5, note, "cancelled").cancel()
    clock.call_later(9.0, note, "too late")
    clock.advance(5.0)
    assert seen == [("first", 11.0), ("last", 12.0), ("also last", 12.0), ("child", 12.0)]
    assert clock.now() == 15.0


def test_a_sleeper_wakes_when_its_time_has_come_and_not_before():
    async def scenario():
        clock = VirtualClock()
        sleeper = asyncio.create_task(sleep(clock, 3.0))
        await asyncio.sleep(0)
        clock.advance(2.9)
        await asyncio.sleep(0)
        assert not sleeper.done()
        clock.advance(0.1)
        await asyncio.wait_for(sleeper, 30)

    asyncio.run(scenario())


def test_the_real_clock_wakes_sleepers_too():
    async def scenario():
        clock = RealClock()
        before = clock.now()
        await asyncio.wait_for(sleep(clock, 0.01), 30)
        assert clock.now() > before

    asyncio.run(scenario())


def test_the_example_is_true():
    assert doctest.testmod(clock_module).failed == 0
