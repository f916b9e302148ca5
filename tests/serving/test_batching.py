"""Alone, nothing waits; while a batch is computed others gather; the queue is bounded."""

import asyncio
import threading
from dataclasses import dataclass

import pytest

from exitflow.serving import batching
from exitflow.serving.batching import Batcher, OverloadedError


@dataclass(eq=False)
class Job:
    size: int = 1
    key: object = None
    expired: bool = False


class Harness:
    def __init__(self, **options):
        self.batches, self.delivered, self.release = [], [], threading.Event()
        self.release.set()
        defaults = {"max_batch": 8, "max_wait": 0.002, "queue_size": 20}
        self.batcher = Batcher(self.compute, self.deliver, **defaults | options)

    def compute(self, jobs):
        self.release.wait(5)
        self.batches.append([job.size for job in jobs])
        if any(job.key == "bad" for job in jobs):
            raise RuntimeError("engine")
        return "done"

    def deliver(self, jobs, result):
        self.delivered.append((list(jobs), result))

    async def finish(self):
        while not self.batcher.idle:
            await asyncio.sleep(0.001)
        self.batcher.close()


def run(scenario):
    asyncio.run(scenario())


def test_a_request_alone_is_computed_alone():
    async def scenario():
        harness = Harness()
        for _ in range(3):
            harness.batcher.submit(Job())
            while not harness.batcher.idle:
                await asyncio.sleep(0.001)
        await harness.finish()
        assert harness.batches == [[1], [1], [1]]

    run(scenario)


def test_those_that_come_meanwhile_form_the_next_batch_in_their_order():
    async def scenario():
        harness = Harness()
        harness.release.clear()
        first = Job()
        harness.batcher.submit(first)
        await asyncio.sleep(0.01)  # it is being computed
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
        harness.release.clear()
        harness.batcher.submit(Job())
        await asyncio.sleep(0.01)
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


def test_what_nobody_waits_for_is_not_computed():
    async def scenario():
        harness = Harness()
        harness.release.clear()
        harness.batcher.submit(Job())
        await asyncio.sleep(0.01)
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
        harness.release.clear()
        harness.batcher.submit(Job())
        await asyncio.sleep(0.01)
        for key in ("a", "a", "b", "a"):
            harness.batcher.submit(Job(key=key))
        harness.release.set()
        await harness.finish()
        assert [[job.key for job in jobs] for jobs, _ in harness.delivered] == [[None], ["a", "a"], ["b"], ["a"]]

    run(scenario)


def test_a_batch_that_fails_does_not_stop_the_next():
    async def scenario():
        harness = Harness()
        harness.batcher.submit(Job(key="bad"))
        while not harness.delivered:
            await asyncio.sleep(0.001)
        harness.batcher.submit(Job())
        await harness.finish()
        (_, error), (_, result) = harness.delivered
        assert isinstance(error, RuntimeError)
        assert result == "done"

    run(scenario)


def test_under_load_a_quick_batch_waits_until_it_has_its_usual_size(monkeypatch):
    monkeypatch.setattr(batching, "INLINE_SECONDS", 20.0)

    async def scenario():
        harness = Harness(max_wait=10.0)
        harness.batcher._usual_batch, harness.batcher._usual_seconds = 4.0, 10.0
        for _ in range(3):
            harness.batcher.submit(Job())
        await asyncio.sleep(0.02)
        assert harness.batches == []
        harness.batcher.submit(Job())
        await harness.finish()
        assert harness.batches == [[1, 1, 1, 1]]

    run(scenario)


def test_a_slow_batch_begins_at_once_because_the_next_gathers_meanwhile():
    async def scenario():
        harness = Harness(max_wait=10.0)
        harness.batcher._usual_batch, harness.batcher._usual_seconds = 4.0, 10.0
        harness.release.clear()
        for _ in range(3):
            harness.batcher.submit(Job())
        await asyncio.sleep(0.02)
        harness.batcher.submit(Job())  # the fourth comes too late for them
        harness.release.set()
        await harness.finish()
        assert harness.batches == [[1, 1, 1], [1]]

    run(scenario)
