"""Alone, a request is computed in the event loop; under load others gather while a thread computes; the queue is bounded."""

import asyncio
import threading
import time
from dataclasses import dataclass

import pytest

from exitflow.routing.clock import VirtualClock
from exitflow.routing.queueing import QueueLimits
from exitflow.serving.node import batching
from exitflow.serving.node.batching import ALONE_AFTER, INLINE_SECONDS, LOOK_EVERY, Batcher, OverloadedError


@dataclass(eq=False)
class Job:
    size: int = 1
    key: object = None
    expired: bool = False


class Harness:
    def __init__(self, **options):
        self.batches, self.delivered, self.inline, self.release = [], [], [], threading.Event()
        self.release.set()
        self.computing = threading.Event()
        self.clock, self.pause, self.undeliverable = VirtualClock(), 0, False
        limits = QueueLimits(options.pop("queue_size", 20), options.pop("queue_seconds", 60))
        defaults = {"max_batch": 8, "limits": limits}
        self.batcher = Batcher(self.compute, self.deliver, clock=self.clock, **defaults | options)

    def compute(self, jobs):
        self.computing.set()
        self.release.wait(60)
        self.clock.advance(self.pause)
        self.batches.append([job.size for job in jobs])
        self.inline.append(threading.current_thread() is threading.main_thread())
        if any(job.key == "bad" for job in jobs):
            raise RuntimeError("engine")
        return "done"

    def deliver(self, jobs, result):
        if self.undeliverable and result == "done":
            raise ValueError
        self.delivered.append((list(jobs), result))

    async def ask(self, count=1):
        """One after the other."""
        for _ in range(count):
            self.batcher.submit(Job())
            await self.rest()

    async def hold(self):
        """A job, in the thread until `release`."""
        self.release.clear()
        self.computing.clear()
        first = Job()
        self.batcher.submit(first)
        while not self.computing.is_set():
            await asyncio.sleep(0.001)
        return first

    async def rest(self):
        while not self.batcher.idle:
            await asyncio.sleep(0.001)

    async def finish(self):
        await self.rest()
        self.batcher.close()


def run(scenario):
    asyncio.run(scenario())


def test_a_request_alone_is_computed_alone():
    async def scenario():
        harness = Harness()
        await harness.ask(3)
        await harness.finish()
        assert harness.batches == [[1], [1], [1]]

    run(scenario)


def test_those_that_come_meanwhile_form_the_next_batch_in_their_order():
    async def scenario():
        harness = Harness()
        first = await harness.hold()
        others = [Job() for _ in range(10)]
        for job in others:
            harness.batcher.submit(job)
        harness.release.set()
        await harness.finish()
        assert harness.batches == [[1], [1] * 8, [1] * 2]
        assert [job for jobs, _ in harness.delivered for job in jobs] == [first, *others]

    run(scenario)


def test_the_queue_is_bounded_in_samples_and_takes_more_when_it_has_emptied():
    async def scenario():
        harness = Harness(queue_size=5)
        await harness.hold()
        harness.batcher.submit(Job(size=3))
        harness.batcher.submit(Job(size=2))
        with pytest.raises(OverloadedError):
            harness.batcher.submit(Job())
        assert harness.batcher.queued == 5
        harness.release.set()
        await harness.finish()
        harness = Harness(queue_size=5)
        harness.batcher.submit(Job(size=50))  # larger than any batch: computed alone
        await harness.finish()
        assert harness.batches == [[50]]

    run(scenario)


def test_the_queue_is_bounded_in_seconds_too():
    async def scenario():
        harness = Harness(queue_seconds=2.0)
        harness.pause = 1.0  # a batch, here a sample
        await harness.ask()
        await harness.hold()
        for _ in range(3):
            harness.batcher.submit(Job())  # behind none, one and two others
        with pytest.raises(OverloadedError):
            harness.batcher.submit(Job())
        harness.release.set()
        await harness.finish()

    run(scenario)


def test_what_nobody_waits_for_is_not_computed():
    async def scenario():
        harness = Harness()
        await harness.hold()
        given_up = Job(size=2)
        harness.batcher.submit(given_up)
        harness.batcher.submit(Job(size=3))
        given_up.expired = True
        harness.release.set()
        await harness.finish()
        assert harness.batches == [[1], [3]]
        assert harness.batcher.queued == 0

    run(scenario)


def test_different_bundles_are_not_mixed():
    async def scenario():
        harness = Harness()
        await harness.hold()
        for key in ("a", "a", "b", "a"):
            harness.batcher.submit(Job(key=key))
        harness.release.set()
        await harness.finish()
        assert [[job.key for job in jobs] for jobs, _ in harness.delivered] == [[None], ["a", "a"], ["b"], ["a"]]

    run(scenario)


@pytest.mark.parametrize("inline", [False, True])
def test_a_batch_that_fails_does_not_stop_the_next(inline):
    async def scenario():
        harness = Harness()
        await harness.ask(int(inline))
        harness.delivered.clear()
        harness.batcher.submit(Job(key="bad"))
        await harness.rest()
        await harness.ask()
        await harness.finish()
        (_, error), (_, result) = harness.delivered
        assert harness.inline[-2] is inline
        assert isinstance(error, RuntimeError)
        assert result == "done"

    run(scenario)


def test_who_seems_alone_is_computed_in_the_event_loop_and_now_and_then_in_the_thread():
    async def scenario():
        harness = Harness()
        await harness.ask(2 * LOOK_EVERY + 3)
        await harness.finish()
        assert harness.inline == [False, *[True] * LOOK_EVERY, False, *[True] * LOOK_EVERY, False]

    run(scenario)


def test_when_others_came_meanwhile_the_thread_computes_until_nobody_does_for_long():
    async def scenario():
        harness = Harness()
        await harness.hold()
        harness.batcher.submit(Job())
        harness.release.set()
        await harness.rest()
        await harness.ask(ALONE_AFTER + 2)
        await harness.finish()
        assert harness.inline == [False] * (ALONE_AFTER + 1) + [True] * 3

    run(scenario)


def test_what_takes_long_never_holds_up_the_event_loop():
    async def scenario():
        harness = Harness(max_batch=1000, queue_size=1000)
        harness.pause = INLINE_SECONDS / 50  # of any batch
        await harness.ask(2)
        harness.batcher.submit(Job(size=100))  # usually it would take twice as long as the event loop may be held up
        await harness.rest()
        await harness.ask()
        harness.batcher.submit(Job(size=50))  # and by now it is known that many take no longer than one
        await harness.finish()
        assert harness.inline == [False, True, False, True, True]

    run(scenario)


def test_several_at_once_are_not_alone():
    async def scenario():
        harness = Harness()
        await harness.ask(2)
        for _ in range(3):
            harness.batcher.submit(Job())
        await harness.finish()
        assert harness.batches == [[1], [1], [1, 1, 1]]
        assert harness.inline == [False, True, False]

    run(scenario)


@pytest.mark.parametrize("inline", [False, True])
def test_what_cannot_be_delivered_is_a_failure_and_the_next_is_computed(inline):
    async def scenario():
        harness = Harness()
        await harness.ask(int(inline))
        harness.undeliverable = True
        await harness.ask()
        harness.undeliverable = False
        await harness.ask()
        await harness.finish()
        assert harness.inline[-2] is inline
        assert [type(result) for _, result in harness.delivered[-2:]] == [ValueError, str]

    run(scenario)


def test_a_job_that_comes_while_the_thread_finds_the_queue_empty_is_computed(monkeypatch):
    """Without a lock, the thread would go to sleep on it."""

    async def scenario():
        harness = Harness()
        take, submitted = batching.take_batch, asyncio.Event()
        loop = asyncio.get_running_loop()

        def slow_take(*queue):
            jobs, left = take(*queue)
            if not jobs and not submitted.is_set():
                loop.call_soon_threadsafe(submit)
                time.sleep(0.05)  # time enough for it to be queued
            return jobs, left

        def submit():
            submitted.set()
            harness.batcher.submit(Job())

        monkeypatch.setattr(batching, "take_batch", slow_take)
        harness.batcher.submit(Job())
        await submitted.wait()
        await asyncio.wait_for(harness.finish(), 30)
        assert harness.batches == [[1], [1]]

    run(scenario)


def test_the_thread_goes_on_while_the_event_loop_is_busy():
    async def scenario():
        harness = Harness(max_batch=1)
        for _ in range(3):
            harness.batcher.submit(Job())
        await asyncio.sleep(0)  # the thread begins
        while len(harness.batches) < 3:
            time.sleep(0.001)  # and this is the event loop
        assert harness.delivered == []
        assert not harness.batcher.idle
        await harness.finish()
        assert len(harness.delivered) == 3

    run(scenario)
