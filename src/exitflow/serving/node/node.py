"""A serving node: it answers what it is sure of, and asks a parent about the rest.

The own answer to every sample is kept until the request is answered; a parent's answer overwrites it. So whatever
happens to a parent, every request has an answer, and exactly one.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from exitflow.errors import BundleError, ConfigError, suggestion
from exitflow.routing import confidence
from exitflow.routing.clock import Clock, RealClock
from exitflow.routing.decisions import Decision, Router, Rules
from exitflow.routing.queueing import QueueLimits
from exitflow.routing.rate_control import ForwardControl
from exitflow.serving.bundle.bundle import DATATYPES, Bundle, load_bundle
from exitflow.serving.bundle.engine import Engine, give_back_memory
from exitflow.serving.node.batching import INLINE_SECONDS, Batcher, OverloadedError
from exitflow.serving.node.counts import NodeCounts
from exitflow.serving.node.jobs import Array, Asked, Computed, Job, Loaded, Question
from exitflow.serving.node.node_settings import ServingSpec, check_links
from exitflow.serving.node.payload import choose_payload
from exitflow.serving.wire.answers import Answers, BadRequestError, Expected
from exitflow.serving.wire.security import Security

if TYPE_CHECKING:
    from exitflow.serving.node.links import ParentLink

log = logging.getLogger("exitflow.serving")

IN_FLIGHT = 4  # times the queue: requests that wait for a parent hold memory too
NEVER = float("inf")
TOO_LARGE = "the input holds numbers too large for the network"


class ExpiredError(Exception):
    """The request's deadline passed before it was computed."""


class UnknownVersionError(Exception):
    """A request names a bundle that is not loaded here."""


class Node:
    """It asks its parents, and takes requests to be put into batches, in the event loop in which it was started.

    Besides, any thread may compute what that same thread has to answer (`infer_here`).
    """

    def __init__(
        self,
        bundle: Bundle,
        name: str,
        spec: ServingSpec,
        parents: Mapping[str, str],
        *,
        security: Security | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`parents`: name -> address, of those that the bundle's topology gives this node. Alone it needs no gRPC."""
        self.name, self.spec, self.clock = name, spec, clock or RealClock()
        self.counts = NodeCounts()
        self.started = self.loaded_at = time.time()
        self.reload_failed = False
        self._lock = Lock()  # of the counts and of the router
        self._check_parents(bundle, parents)
        self.links: Mapping[str, ParentLink] = {}
        if parents:
            from exitflow.serving.node.links import ParentLink

            access, trip = security or Security(), spec.round_trip_ms / 1e3
            self.links = {name: ParentLink(name, place, access, self.clock, trip) for name, place in parents.items()}
        self.current = self._load(bundle)
        self.max_message = bundle.manifest.largest_request(self.exit)  # bytes
        self.previous: Loaded | None = None
        states = {parent: link.state for parent, link in self.links.items()}
        rules = Rules(spec.forward_timeout, spec.audit_share if spec.control == "rate" else 0.0)
        self.router = Router(name, rules, self._control(bundle), states, bundle.manifest.nodes[name].cut)
        self._expect(bundle)
        self.in_flight = 0
        self.draining = False  # it says that it is not ready
        self.stopping = False  # no more requests come over the streams of children
        self._reloading = Lock()
        self._forwarder = None
        if parents:
            from exitflow.serving.node.forwarding import Forwarder

            self._forwarder = Forwarder(name, spec, self.links, self.counts, self.router, self.clock, self._lock)
        self._batcher: Batcher[Job, Computed] = Batcher(
            self._compute,
            self._deliver,
            max_batch=1 if spec.service_ms else spec.max_batch,
            inline_seconds=0.0 if spec.service_ms else INLINE_SECONDS,  # the event loop must not sleep
            limits=QueueLimits(spec.queue_size, spec.queue_seconds),
            clock=self.clock,
        )

    def start(self) -> None:
        """Connect to the parents, from the event loop that will ask them."""
        for link in self.links.values():
            link.connect()

    @property
    def now(self) -> float:
        """The time by the clock that deadlines are in."""
        return self.clock.now()

    @property
    def control(self) -> ForwardControl:
        """The threshold and the budgets of the newest bundle."""
        return self.router.control

    @property
    def queued(self) -> int:
        """Samples that wait to be computed."""
        return self._batcher.queued

    @property
    def exit(self) -> int:
        """The exit it answers with."""
        return self.current.engine.exit

    @property
    def loaded(self) -> list[Loaded]:
        """The bundles that are answered with, the newest first."""
        return [self.current, self.previous] if self.previous else [self.current]

    def version(self, wanted: str, among: Sequence[Loaded] = ()) -> Loaded:
        """The loaded bundle, of some or of all, that a request names; "": the newest."""
        for loaded in among or self.loaded:
            if wanted in ("", loaded.bundle.version, loaded.bundle.hash):
                return loaded
        raise UnknownVersionError(f"node {self.name!r} serves bundle {self.current.bundle.version}, not {wanted[:12]}")

    async def infer(
        self,
        loaded: Loaded,
        carry: Array,
        *,
        start: int = 0,
        before: Array | None = None,
        deadline: float = NEVER,
        child: str | None = None,
    ) -> Answers:
        """The answers to (N, ...) samples that stand behind exit `start`, which said `before`, (N, C) logits.

        Raises OverloadedError or ExpiredError.
        """
        now = self.clock.now()
        size = len(carry)
        if child is None:
            self.counts.arrived += size
        else:
            self.counts.from_children[child] += size
        if deadline <= now:
            self.counts.expired += 1
            raise ExpiredError
        if self.in_flight + size > IN_FLIGHT * self.spec.queue_size and self.in_flight:
            self.counts.rejected += 1
            raise OverloadedError
        future: asyncio.Future[Answers] = asyncio.get_running_loop().create_future()
        job = Job(loaded, carry, start, deadline, child, now, future, before, waits=self.spec.wait == "parent")
        try:
            self._batcher.submit(job)
        except OverloadedError:
            self.counts.rejected += 1
            raise
        timer = self.clock.call_later(deadline - now, self._expire, job) if deadline < NEVER else None
        self.in_flight += size
        try:
            answers = await future
        finally:
            self.in_flight -= size
            if timer:
                timer.cancel()
        self._count_answered(job)
        return answers

    def infer_here(
        self,
        carry: Array,
        *,
        deadline: float = NEVER,
        waits: bool = True,
        deeper: Callable[[int, Answers, int], None] | None = None,
    ) -> tuple[Job, Callable[[], None] | None]:
        """Compute the answers to (N, ...) inputs in the caller's thread.

        What comes second asks the parents, where some are to be asked; call it in the event loop, and the job's future
        has the answers in the end. Else the job has them by now. Raises BadRequestError or ExpiredError.
        """
        now = self.clock.now()
        future: concurrent.futures.Future[Answers] = concurrent.futures.Future()
        job = Job(self.current, carry, 0, deadline, None, now, future, waits=waits, deeper=deeper)
        with self._lock:
            self.counts.arrived += job.size
            if deadline <= now:
                self.counts.expired += 1
                raise ExpiredError
        computed = self._compute((job,))
        self._count_batch(computed)
        if not (np.isfinite(computed.scores).all() and np.isfinite(computed.confidences).all()):
            with self._lock:
                self.counts.invalid += 1
            raise BadRequestError(TOO_LARGE)
        asked = self._route(computed, self.clock.now())
        if not job.pending:
            self._count_answered(job)
        if not asked:
            return job, None
        return job, lambda: self._ask_for(job, asked, computed)

    def _ask_for(self, job: Job, asked: Asked, computed: Computed) -> None:
        """What one request of another thread needs of parents."""
        assert self._forwarder is not None
        if job.pending:
            job.future.add_done_callback(lambda _: self._count_answered(job))
            if job.deadline < NEVER:
                timer = self.clock.call_later(job.deadline - self.clock.now(), self._expire, job)
                job.future.add_done_callback(lambda _: timer.cancel())
        self._forwarder.ask(asked, computed)

    def _count_answered(self, job: Job) -> None:
        assert job.answers
        with self._lock:
            self.counts.answered[int(job.answers.exits.max())] += 1
            self.counts.request_seconds.add(self.clock.now() - job.arrived)

    def _expire(self, job: Job) -> None:
        """The local answer if there is one by now, else none."""
        if job.future.done():
            return
        if job.answers is not None:
            with self._lock:
                self.counts.fallbacks["deadline"] += job.pending
                self.counts.served += job.pending
            job.future.set_result(job.answers)
        else:
            self.counts.expired += 1
            job.future.set_exception(ExpiredError())

    # computing: in the event loop or in the engine's thread

    def _compute(self, jobs: Sequence[Job]) -> Computed:
        loaded = jobs[0].key
        started = time.perf_counter()
        if len(jobs) == 1:
            (job,) = ordered = jobs
            parts, before = {job.start: job.carry}, {} if job.before is None else {job.start: job.before}
        else:
            ordered = sorted(jobs, key=lambda job: -job.start)
            parts = _by_start(ordered, lambda job: job.carry)
            before = _by_start(ordered, lambda job: job.before)
        features, logits = loaded.engine.run(parts, before)
        with np.errstate(invalid="ignore"):  # what is no number is refused in `_deliver`
            scores, sure = _softmax(logits), confidence(logits, *loaded.bundle.manifest.ranking(self.exit))
        if self.spec.service_ms:
            time.sleep(max(self.spec.service_ms / 1e3 - (time.perf_counter() - started), 0.0))
        return Computed(ordered, features, logits, scores, sure, time.perf_counter() - started)

    def _deliver(self, jobs: Sequence[Job], computed: Computed | Exception) -> None:
        if isinstance(computed, Exception):
            self._fail(jobs, computed)
            return
        self._count_batch(computed)
        fine = np.isfinite(computed.scores).all(axis=1) & np.isfinite(computed.confidences)
        if not fine.all() or any(job.future.done() for job in computed.jobs):
            computed = _still_wanted(computed, fine)
        asked = self._route(computed, self.clock.now())
        for job in computed.jobs:
            if not job.pending:
                assert job.answers is not None
                job.future.set_result(job.answers)
        if asked and self._forwarder:
            self._forwarder.ask(asked, computed)

    def _route(self, computed: Computed, now: float) -> Asked:
        """Every job gets the own answers; what parents are asked about is returned."""
        deadlines = [job.deadline for job in computed.jobs for _ in range(job.size)]
        with self._lock:
            decision = self.router.decide(computed.confidences, deadlines, now)
            self._count_decision(decision)
            asked = self._asked(computed, decision, now)
            self.counts.served += sum(job.size - job.pending for job in computed.jobs)
        return asked

    def _asked(self, computed: Computed, decision: Decision, now: float) -> Asked:
        questions: dict[tuple[str, Job | None, bool], list[Question]] = defaultdict(list)
        audits: dict[tuple[str, bool], list[Question]] = defaultdict(list)
        audited = dict(decision.audits)
        exits = np.full(len(computed.scores), self.exit, dtype=np.int32)
        confidences = computed.confidences.astype(np.float32)
        first = 0
        for job in computed.jobs:
            part = slice(first, first + job.size)
            first += job.size
            job.answers = Answers(computed.scores[part], exits[part], [self.name] * job.size, confidences[part])
            hurried = job if self.router.is_in_a_hurry(job.deadline, now) else None  # asks with its own deadline
            for row in range(job.size):
                batch_row = part.start + row
                parent = decision.parents[batch_row]
                if parent is not None and job.waits:
                    questions[parent, hurried, job.sends_input(parent)].append(Question(job, row, batch_row))
                    job.pending += 1
                elif (parent := parent or audited.get(batch_row)) is not None:
                    audits[parent, job.sends_input(parent)].append(Question(job, row, batch_row))
        return Asked(questions, audits)

    def _fail(self, jobs: Sequence[Job], error: Exception) -> None:
        log.error("a batch failed: %s", error)
        self.counts.failed += len(jobs)
        for job in jobs:
            if not job.future.done():
                job.future.set_exception(RuntimeError("the engine failed"))

    def _count_batch(self, computed: Computed) -> None:
        """All that was computed, also for those who are refused or have gone."""
        counts, now = self.counts, self.clock.now()
        with self._lock:
            counts.batches[len(computed.scores)] += 1
            counts.compute_seconds += computed.seconds
            counts.queue_seconds += sum(now - job.arrived - computed.seconds for job in computed.jobs)
            counts.last_inference_ms = int(time.time() * 1000)

    def _count_decision(self, decision: Decision) -> None:
        self.counts.out_of_tokens += decision.out_of_tokens
        for reason, count in (("deadline", decision.no_time), ("parent-down", decision.cut_off)):
            if count:
                self.counts.fallbacks[reason] += count

    # bundles

    def _check_parents(self, bundle: Bundle, parents: Iterable[str]) -> None:
        known = [link.name for link in bundle.node(self.name).parents]
        for parent in parents:
            if parent not in known:
                problem = f"{parent!r} is no parent of node {self.name!r}{suggestion(parent, known)}"
                raise ConfigError(problem, key="--parent")
        check_links(self.spec, bundle)

    def _load(self, bundle: Bundle) -> Loaded:
        entry = bundle.node(self.name)
        manifest = bundle.manifest
        engine = Engine(bundle.segments[: entry.exit], blends=manifest.blends, threads=self.spec.threads)
        seconds = _warm_up(engine, bundle)
        payloads = {}
        for parent in self.links:
            payloads[parent], why = choose_payload(manifest, entry.exit, self.spec.link(parent), seconds)
            log.info("node %s sends %s %s: %s", self.name, parent, payloads[parent], why)
        give_back_memory()
        expected = {
            parent: Expected(manifest.name, bundle.version, manifest.num_classes, bundle.topology.exits_from(parent))
            for parent in self.links
        }
        return Loaded(replace(bundle, segments=()), engine, payloads, expected)

    def _control(self, bundle: Bundle) -> ForwardControl:
        entry = bundle.node(self.name)
        return ForwardControl(
            [link for link in entry.parents if link.name in self.links],
            bundle.manifest.nodes[self.name],
            planned_rate=bundle.plan.nodes[self.name].received_rate,
            burst_seconds=self.spec.burst_seconds,
            now=self.clock.now(),
            limited=self.spec.control == "rate",
            in_air={parent: link.state.in_air for parent, link in self.links.items()},
        )

    def _expect(self, bundle: Bundle) -> None:
        for link in self.links.values():
            link.expect(bundle.manifest.name, bundle.hash)

    async def reload(self) -> Bundle:
        """Read the bundle's directory again; requests under way end with the bundle that they began with."""
        return await asyncio.to_thread(self.load_again)

    def load_again(self, path: str | Path | None = None) -> Bundle:
        """The same in the caller's thread; `path` is another directory with a bundle for the same node."""
        with self._reloading:
            self.reload_failed = True  # unless the end is reached
            path, exit = path or self.current.bundle.path, self.exit
            bundle = load_bundle(path, max_exit=exit)
            if bundle.hash == self.current.bundle.hash:
                self.loaded_at, self.reload_failed = time.time(), False
                return bundle
            if bundle.topology.by_name.get(self.name) is None or bundle.node(self.name).exit != exit:
                raise BundleError(
                    f"{path}: the new bundle has no node {self.name!r} with exit {exit}; restart the node"
                )
            self._check_parents(bundle, self.links)
            if bundle.manifest.largest_request(exit) > self.max_message:
                raise BundleError(f"{path}: the new bundle takes larger requests; restart the node")
            loaded, control = self._load(bundle), self._control(bundle)
            with self._lock:  # from here on nothing fails
                self.previous, self.current = self.current, loaded
                self.router.adopt(control, bundle.manifest.nodes[self.name].cut)
                self._expect(bundle)
                self.loaded_at, self.reload_failed = time.time(), False
            log.info("node %s now serves bundle %s", self.name, bundle.version)
            return bundle

    def connect_anew(self) -> None:
        """To the parents, with the renewed certificate."""
        for link in self.links.values():
            link.connect_anew()

    async def close(self) -> None:
        """After what is under way has ended."""
        self.draining = True
        while (self._forwarder and not self._forwarder.idle) or not self._batcher.idle:
            await asyncio.sleep(0.01)
        for link in self.links.values():
            await link.close()
        self._batcher.close()


def _warm_up(engine: Engine, bundle: Bundle) -> float:
    """Seconds that a sample takes; it also shows whether the segments are what the manifest says."""
    manifest = bundle.manifest
    try:
        example = np.zeros((1, *manifest.input_shape), dtype=DATATYPES[manifest.input_datatype])
        outputs = engine.trace(example)
    except Exception as error:  # ONNX Runtime raises types of its own, all bare
        raise BundleError(f"{bundle.path}: its segments do not take what the manifest says: {error}") from None
    for entry, (features, logits) in zip(manifest.segments, outputs, strict=False):
        fits = features is None or features.shape[1:] == entry.feature_shape  # the deepest exit has none
        if not fits or logits.shape[1:] != (manifest.num_classes,):
            raise BundleError(f"{bundle.path}: {entry.file} gives other shapes than the manifest says")
    return engine.seconds_per_batch(example)


def _still_wanted(computed: Computed, fine: npt.NDArray[np.bool_]) -> Computed:
    """What is left without callers who have gone, and when requests with too huge numbers are refused."""
    jobs: list[Job] = []
    rows: list[int] = []
    first = 0
    for job in computed.jobs:
        part = range(first, first + job.size)
        first += job.size
        if job.future.done():
            continue
        if fine[part].all():
            jobs.append(job)
            rows.extend(part)
        else:
            job.future.set_exception(BadRequestError(TOO_LARGE))
    features = None if computed.features is None else computed.features[rows]
    return Computed(
        jobs,
        features,
        computed.logits[rows],
        computed.scores[rows],
        computed.confidences[rows],
        computed.seconds,
    )


def _by_start(jobs: Sequence[Job], values: Callable[[Job], Array | None]) -> dict[int, Array]:
    """Some arrays of all jobs that stand behind the same exit, put together."""
    groups: dict[int, list[Array]] = defaultdict(list)
    for job in jobs:
        if (array := values(job)) is not None:
            groups[job.start].append(array)
    return {start: np.concatenate(arrays) for start, arrays in groups.items()}


def _softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    result: npt.NDArray[np.float32] = powers / powers.sum(axis=1, keepdims=True)
    return result
