"""A serving node: it answers what it is sure of, and asks a parent about the rest.

The own answer to every sample is kept until the request is answered; a parent's answer overwrites it. So whatever
happens to a parent, every request has an answer, and exactly one.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from exitflow.errors import BundleError, ConfigError, suggestion
from exitflow.routing import confidence
from exitflow.serving.answers import FEATURES, INPUT, Answers, BadAnswerError
from exitflow.serving.batching import Batcher, OverloadedError
from exitflow.serving.bundle import DATATYPES, Bundle, load_bundle
from exitflow.serving.codecs import encode
from exitflow.serving.counts import NodeCounts
from exitflow.serving.engine import Engine
from exitflow.serving.forwarding import choose_payload
from exitflow.serving.links import LinkError, ParentLink
from exitflow.serving.messages import ModelInferRequest
from exitflow.serving.rate_control import ForwardControl
from exitflow.serving.spec import ServingSpec

log = logging.getLogger("exitflow.serving")

Array = npt.NDArray[Any]

IN_FLIGHT = 4  # times the queue: requests that wait for a parent hold memory too
DEADLINE_MARGIN = 0.9  # of the time left is given to a parent; the rest is for answering locally after all
LEAST_TIME = 0.004  # seconds: with less left, a parent is not asked
AUDIT_SPARE = 0.6  # part of the burst that an audit leaves
NEVER = float("inf")


class ExpiredError(Exception):
    """The request's deadline passed before it was computed."""


class UnknownVersionError(Exception):
    """A request names a bundle that is not loaded here."""


@dataclass(frozen=True)
class Loaded:
    """A bundle, ready to compute."""

    bundle: Bundle
    engine: Engine
    payload: str  # what goes to a parent: features or the input


@dataclass(slots=True, eq=False)
class Job:
    """Samples of one request on their way through the node."""

    key: Loaded
    carry: Array  # (N, ...)
    start: int  # the exit behind which the carry stands; 0: the input
    deadline: float  # of the event loop's clock
    child: str | None  # who forwarded it; None: a client
    arrived: float
    future: asyncio.Future[Answers]
    answers: Answers | None = None
    pending: int = 0  # samples that a parent is asked about

    @property
    def size(self) -> int:
        """Samples."""
        return len(self.carry)

    @property
    def expired(self) -> bool:
        """Whether nobody waits for it any more."""
        return self.future.done()


@dataclass(frozen=True, slots=True)
class Computed:
    """A batch behind the engine; rows in the order of the jobs."""

    jobs: Sequence[Job]
    features: Array | None
    scores: npt.NDArray[np.float32]
    confidences: npt.NDArray[np.float64]
    seconds: float


@dataclass(frozen=True, slots=True)
class Question:
    """A sample that a parent is asked about."""

    job: Job
    row: int  # in its job
    batch_row: int


class Node:
    """Made and used inside one event loop."""

    def __init__(
        self,
        bundle: Bundle,
        name: str,
        spec: ServingSpec,
        parents: Mapping[str, str],
        *,
        credentials: Any = None,
    ) -> None:
        """`parents`: name -> address; those that the bundle's topology gives this node."""
        self.name, self.spec = name, spec
        self.counts = NodeCounts()
        self.started = time.time()
        self._loop = asyncio.get_running_loop()
        self._random = random.Random(name)
        self._check_parents(bundle, parents)
        self.links = {parent: ParentLink(parent, address, credentials) for parent, address in parents.items()}
        self.current = self._load(bundle)
        self.previous: Loaded | None = None
        self.control = self._control(bundle)
        self.in_flight = 0
        self.draining = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._batcher: Batcher[Job, Computed] = Batcher(
            self._compute,
            self._deliver,
            max_batch=spec.max_batch,
            max_wait=spec.max_wait_ms / 1000,
            queue_size=spec.queue_size,
        )

    @property
    def now(self) -> float:
        """Of the clock that deadlines are in."""
        return self._loop.time()

    @property
    def queued(self) -> int:
        """Samples that wait to be computed."""
        return self._batcher.queued

    @property
    def exit(self) -> int:
        """The exit it answers with."""
        return self.current.engine.exit

    def version(self, wanted: str) -> Loaded:
        """The loaded bundle that a request names; "": the newest."""
        for loaded in (self.current, self.previous):
            if loaded and wanted in ("", loaded.bundle.version, loaded.bundle.hash):
                return loaded
        raise UnknownVersionError(f"node {self.name!r} serves bundle {self.current.bundle.version}, not {wanted[:12]}")

    async def infer(
        self, loaded: Loaded, carry: Array, *, start: int = 0, deadline: float = NEVER, child: str | None = None
    ) -> Answers:
        """The answers to (N, ...) samples; raises OverloadedError or ExpiredError."""
        now = self._loop.time()
        size = len(carry)
        if deadline <= now:
            self.counts.expired += 1
            raise ExpiredError
        if self.in_flight + size > IN_FLIGHT * self.spec.queue_size and self.in_flight:
            self.counts.rejected += 1
            raise OverloadedError
        job = Job(loaded, carry, start, deadline, child, now, self._loop.create_future())
        try:
            self._batcher.submit(job)
        except OverloadedError:
            self.counts.rejected += 1
            raise
        if child is None:
            self.counts.arrived += size
        else:
            self.counts.from_children[child] += size
        timer = self._loop.call_at(deadline, self._expire, job) if deadline < NEVER else None
        self.in_flight += size
        try:
            return await job.future
        finally:
            self.in_flight -= size
            if timer:
                timer.cancel()
            self.counts.requests += 1
            self.counts.request_seconds.add(self._loop.time() - now)

    def _expire(self, job: Job) -> None:
        """The local answer if there is one by now, else none."""
        if job.future.done():
            return
        if job.answers is not None:
            self._fall_back("deadline", job.pending)
            job.future.set_result(job.answers)
        else:
            self.counts.expired += 1
            job.future.set_exception(ExpiredError())

    # computing: in the event loop or in the engine's thread

    def _compute(self, jobs: Sequence[Job]) -> Computed:
        loaded = jobs[0].key
        started = time.perf_counter()
        if len(jobs) == 1:
            ordered, parts = jobs, {jobs[0].start: jobs[0].carry}
        else:
            ordered = sorted(jobs, key=lambda job: -job.start)
            groups: dict[int, list[Array]] = defaultdict(list)
            for job in ordered:
                groups[job.start].append(job.carry)
            parts = {start: np.concatenate(carries) for start, carries in groups.items()}
        features, logits = loaded.engine.run(parts)
        return Computed(
            ordered,
            features,
            _softmax(logits),
            confidence(logits, loaded.bundle.manifest.confidence),
            time.perf_counter() - started,
        )

    def _deliver(self, jobs: Sequence[Job], computed: Computed | Exception) -> None:
        if isinstance(computed, Exception):
            log.error("a batch failed: %s", computed)
            self.counts.failed += len(jobs)
            for job in jobs:
                if not job.future.done():
                    job.future.set_exception(RuntimeError("the engine failed"))
            return
        now = self._loop.time()
        self._count_batch(computed, now)
        open_parents = [name for name, link in self.links.items() if link.open]
        routing = self.control.route(computed.confidences, open_parents, now)
        if self.links and not open_parents:
            self._count_cut_off(computed.confidences)
        self.counts.out_of_tokens += routing.out_of_tokens
        questions: dict[tuple[str, Job | None, bool], list[Question]] = defaultdict(list)
        first = 0
        exits = np.full(len(computed.scores), self.exit, dtype=np.int32)
        confidences = computed.confidences.astype(np.float32)
        for job in computed.jobs:
            rows = range(first, first + job.size)
            part = slice(first, first + job.size)
            first += job.size
            if job.future.done():
                continue
            job.answers = Answers(computed.scores[part], exits[part], [self.name] * job.size, confidences[part])
            for row, batch_row in enumerate(rows):
                parent = routing.parents[batch_row]
                if parent is None:
                    self._maybe_audit(job, computed, row, batch_row, open_parents, now)
                elif job.deadline - now < LEAST_TIME:
                    self._fall_back("deadline", 1)
                else:
                    alone = job if job.deadline - now < self.spec.forward_timeout else None
                    key = (parent, alone, self._sends_input(job))
                    questions[key].append(Question(job, row, batch_row))
                    job.pending += 1
            if not job.pending:
                job.future.set_result(job.answers)
            self.counts.served += job.size - job.pending
        for (parent, _, as_input), asked in questions.items():
            self._spawn(self._ask_parents(parent, asked, computed, as_input=as_input))

    def _count_batch(self, computed: Computed, now: float) -> None:
        counts = self.counts
        counts.batches[len(computed.scores)] += 1
        counts.compute_seconds += computed.seconds
        counts.queue_seconds += sum(now - job.arrived - computed.seconds for job in computed.jobs)
        counts.last_inference_ms = int(time.time() * 1000)

    def _count_cut_off(self, confidences: npt.NDArray[np.float64]) -> None:
        """All parents are down: what the calibration would have forwarded is answered here, and that is no secret."""
        expected = self.current.bundle.manifest.nodes[self.name].cut
        self._fall_back("parent-down", int((confidences < expected).sum()))

    def _fall_back(self, reason: str, count: int) -> None:
        if count:
            self.counts.fallbacks[reason] += count

    # forwarding

    def _sends_input(self, job: Job) -> bool:
        """Only who has the input can send it."""
        return job.start == 0 and job.key.payload == INPUT

    def _spawn(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask_parents(self, parent: str, asked: list[Question], computed: Computed, *, as_input: bool) -> None:
        """Ask `parent`, and if it fails another that has room; then let every request have its answer."""
        tried: set[str] = set()
        target: str | None = parent
        reason = ""
        while target is not None:
            tried.add(target)
            try:
                answers = await self._ask(self.links[target], asked, computed, as_input=as_input)
            except LinkError as failure:
                reason = failure.reason
                self.links[target].failed(failure, len(asked))
                target = self._another_parent(tried, asked)
            else:
                self.links[target].counts.answered += len(asked)
                self._settle(asked, answers)
                return
        self._fall_back(reason, len(asked))
        self.counts.served += len(asked)
        self._settle(asked, None)

    def _another_parent(self, tried: set[str], asked: list[Question]) -> str | None:
        now = self._loop.time()
        left = min(question.job.deadline for question in asked) - now
        others = [name for name, link in self.links.items() if link.open and name not in tried]
        if not others or left < LEAST_TIME:
            return None
        found = self.control.reserve(others, now)
        if found is not None:
            for _ in asked[1:]:  # each sample takes a token; where they run out, the limit is kept by answering here
                if self.control.reserve([found], now) is None:
                    return None
        return found

    async def _ask(
        self, link: ParentLink, asked: Sequence[Question], computed: Computed, *, as_input: bool, audit: bool = False
    ) -> Answers:
        loaded = asked[0].job.key
        request = self._forward_request(loaded, asked, computed, as_input=as_input)
        left = min(question.job.deadline for question in asked) - self._loop.time()
        timeout = min(self.spec.forward_timeout, max(left * DEADLINE_MARGIN - LEAST_TIME / 4, 0.001))
        if audit:
            timeout = self.spec.forward_timeout
            link.counts.audited += len(asked)
        link.counts.forwarded += len(asked)
        response = await link.infer(request, len(asked), timeout)
        try:
            answers = Answers.from_message(response, len(asked), loaded.bundle.manifest.num_classes)
        except BadAnswerError as error:
            raise LinkError("nonsense", str(error)) from None
        link.succeeded()
        return answers

    def _forward_request(self, loaded: Loaded, asked: Sequence[Question], computed: Computed, *, as_input: bool) -> Any:
        manifest = loaded.bundle.manifest
        request = ModelInferRequest(model_name=manifest.name, model_version=loaded.bundle.hash)
        request.parameters["exitflow_from"].string_param = self.name
        if as_input:
            rows = np.stack([question.job.carry[question.row] for question in asked])
            request.inputs.add(name=INPUT, datatype=manifest.input_datatype, shape=rows.shape)
            request.raw_input_contents.append(rows.tobytes())
            return request
        assert computed.features is not None
        features = computed.features[[question.batch_row for question in asked]]
        request.inputs.add(name=FEATURES, datatype="FP32", shape=features.shape)
        request.parameters["exit"].int64_param = self.exit
        request.parameters["codec"].string_param = self.spec.codec
        request.parameters["compress"].bool_param = self.spec.compress
        request.raw_input_contents.append(encode(features, self.spec.codec, compress=self.spec.compress))
        return request

    def _settle(self, asked: Sequence[Question], answers: Answers | None) -> None:
        """Each sample gets the parent's answer, or keeps its own; requests with all answers are done."""
        for index, question in enumerate(asked):
            job = question.job
            if job.future.done():
                continue
            assert job.answers is not None
            if answers is not None:
                job.answers.overwrite([question.row], answers, [index])
            job.pending -= 1
            if not job.pending:
                job.future.set_result(job.answers)

    # audit

    def _maybe_audit(
        self, job: Job, computed: Computed, row: int, batch_row: int, open_parents: Sequence[str], now: float
    ) -> None:
        if not open_parents or self.spec.control != "rate" or self._random.random() >= self.spec.audit_share:
            return
        parent = self.control.reserve(open_parents, now, spare=AUDIT_SPARE)
        if parent is not None:
            own = int(computed.scores[batch_row].argmax())
            self._spawn(self._audit(self.links[parent], Question(job, row, batch_row), computed, own))

    async def _audit(self, link: ParentLink, question: Question, computed: Computed, own: int) -> None:
        as_input = self._sends_input(question.job)
        try:
            answers = await self._ask(link, [question], computed, as_input=as_input, audit=True)
        except LinkError as failure:
            link.failed(failure, 1)
            return
        self.counts.audited += 1
        self.counts.agreed += int(answers.scores[0].argmax()) == own

    # bundles

    def _check_parents(self, bundle: Bundle, parents: Iterable[str]) -> None:
        known = [link.name for link in bundle.node(self.name).parents]
        for parent in parents:
            if parent not in known:
                problem = f"{parent!r} is no parent of node {self.name!r}{suggestion(parent, known)}"
                raise ConfigError(problem, key="--parent")

    def _load(self, bundle: Bundle) -> Loaded:
        entry = bundle.node(self.name)
        engine = Engine(bundle.segments[: entry.exit], threads=self.spec.threads)
        manifest = bundle.manifest
        example = np.zeros((1, *manifest.input_shape), dtype=DATATYPES[manifest.input_datatype])
        seconds = engine.seconds_per_batch(example)
        payload, why = choose_payload(manifest, entry.exit, self.spec, seconds)
        if entry.parents:
            log.info("node %s sends its parents %s: %s", self.name, payload, why)
        return Loaded(bundle, engine, payload)

    def _control(self, bundle: Bundle) -> ForwardControl:
        entry = bundle.node(self.name)
        links = [link for link in entry.parents if link.name in self.links]
        for link in links:
            self.links[link.name].expect(bundle.manifest.name, bundle.hash)
        return ForwardControl(
            links,
            bundle.manifest.nodes[self.name],
            planned_rate=bundle.plan.nodes[self.name].received_rate,
            burst_seconds=self.spec.burst_seconds,
            now=self._loop.time(),
            limited=self.spec.control == "rate",
        )

    async def reload(self) -> Bundle:
        """Read the bundle's directory again; requests under way end with the bundle that they began with."""
        path, exit = self.current.bundle.path, self.exit
        bundle = await asyncio.to_thread(load_bundle, path, max_exit=exit)
        if bundle.hash == self.current.bundle.hash:
            return bundle
        if bundle.topology.by_name.get(self.name) is None or bundle.node(self.name).exit != exit:
            raise BundleError(f"{path}: the new bundle has no node {self.name!r} with exit {exit}; restart the node")
        self._check_parents(bundle, self.links)
        loaded = await asyncio.to_thread(self._load, bundle)
        self.previous, self.current = self.current, loaded
        self.control = self._control(bundle)
        log.info("node %s now serves bundle %s", self.name, bundle.version)
        return bundle

    async def close(self) -> None:
        """After what is under way has ended."""
        self.draining = True
        while self._tasks or not self._batcher.idle:
            await asyncio.sleep(0.01)
        for link in self.links.values():
            await link.close()
        self._batcher.close()


def _softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    result: npt.NDArray[np.float32] = powers / powers.sum(axis=1, keepdims=True)
    return result
