"""Asking parents: one of them, another if it fails, and the own answer if all do."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from threading import Lock
from typing import Any

import numpy as np

from exitflow.routing.clock import Clock
from exitflow.routing.decisions import Router
from exitflow.serving.bundle.bundle import MAX_MESSAGE
from exitflow.serving.node.counts import NodeCounts
from exitflow.serving.node.jobs import Asked, Computed, Question
from exitflow.serving.node.link_errors import LinkError
from exitflow.serving.node.links import ParentLink
from exitflow.serving.node.node_settings import ServingSpec
from exitflow.serving.wire.answers import FEATURES, INPUT, LOGITS, Answers, BadAnswerError
from exitflow.serving.wire.codecs import encode
from exitflow.serving.wire.messages import ModelInferRequest

log = logging.getLogger("exitflow.serving")


class Forwarder:
    """Asks parents for a node. The own answer is already in every job, and a parent's overwrites it."""

    def __init__(
        self,
        node: str,
        spec: ServingSpec,
        links: Mapping[str, ParentLink],
        counts: NodeCounts,
        router: Router,
        clock: Clock,
        lock: Lock,
    ) -> None:
        """`lock` is that of the counts and of the router."""
        self._lock = lock
        self._node, self._spec, self._links, self._counts = node, spec, links, counts
        self._router, self._clock = router, clock
        self._specs = {parent: spec.link(parent) for parent in links}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def idle(self) -> bool:
        """Whether no parent is being asked."""
        return not self._tasks

    def ask(self, asked: Asked, computed: Computed) -> None:
        """In the background; parents have given tokens for all of it. What fits into a message is sent together."""
        for (parent, _, _), questions in asked.questions.items():
            for part in _parts(parent, questions, computed):
                self._spawn(self._ask_until_answered(parent, part, computed))
        for (parent, _), questions in asked.audits.items():
            for part in _parts(parent, questions, computed):
                self._spawn(self._audit(self._links[parent], part, computed))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask_until_answered(self, parent: str, asked: Sequence[Question], computed: Computed) -> None:
        tried: set[str] = set()
        target: str | None = parent
        reason = ""
        while target is not None:
            tried.add(target)
            deadline = min(question.job.deadline for question in asked)
            timeout = self._router.timeout(deadline, self._clock.now())
            try:
                answers = await self._ask(self._links[target], asked, computed, timeout)
            except LinkError as failure:
                reason = failure.reason = self._router.blame(failure.reason, timeout)
                self._links[target].failed(failure, len(asked))
                with self._lock:
                    target = self._router.another(tried, len(asked), deadline, self._clock.now())
            else:
                self._links[target].counts.answered += len(asked)
                self._settle(asked, answers, reason)
                return
        self._settle(asked, None, reason)

    async def _ask(self, link: ParentLink, asked: Sequence[Question], computed: Computed, timeout: float) -> Answers:
        """The parent's answers, or a LinkError, whatever goes wrong: the own answer waits behind it."""
        try:
            request = self._request(link.name, asked, computed)
            link.counts.forwarded += len(asked)
            response = await link.infer(request, len(asked), timeout)
            answers = Answers.from_message(response, len(asked), asked[0].job.key.expected[link.name])
        except LinkError:
            raise
        except BadAnswerError as error:
            raise LinkError("nonsense", str(error)) from None
        except Exception as error:
            log.exception("asking %s failed", link.name)
            raise LinkError("failed", f"{type(error).__name__}: {error}") from None
        link.state.succeeded()
        return answers

    def _request(self, parent: str, asked: Sequence[Question], computed: Computed) -> Any:
        loaded = asked[0].job.key
        manifest = loaded.bundle.manifest
        request = ModelInferRequest(model_name=manifest.name, model_version=loaded.bundle.hash)
        request.parameters["exitflow_from"].string_param = self._node
        if all(question.job.sends_input(parent) for question in asked):
            inputs = np.stack([question.job.carry[question.row] for question in asked])
            request.inputs.add(name=INPUT, datatype=manifest.input_datatype, shape=inputs.shape)
            request.raw_input_contents.append(inputs.tobytes())
            return request
        assert computed.features is not None
        rows = [question.batch_row for question in asked]
        features = computed.features[rows]
        request.inputs.add(name=FEATURES, datatype="FP32", shape=features.shape)
        request.parameters["exit"].int64_param = loaded.engine.exit
        spec = self._specs[parent]
        request.parameters["codec"].string_param = spec.codec
        request.parameters["compress"].bool_param = spec.compress
        request.raw_input_contents.append(encode(features, spec.codec, compress=spec.compress))
        if manifest.blends:
            logits = computed.logits[rows]
            request.inputs.add(name=LOGITS, datatype="FP32", shape=logits.shape)
            request.raw_input_contents.append(logits.astype("<f4", copy=False).tobytes())
        return request

    def _settle(self, asked: Sequence[Question], answers: Answers | None, reason: str) -> None:
        """Each sample gets the parent's answer, or keeps its own; requests that wait for nothing more are done."""
        for index, question in enumerate(asked):
            job = question.job
            if job.future.done():
                continue
            assert job.answers is not None
            if answers is not None:
                job.answers.overwrite(question.row, answers, index)
            else:
                with self._lock:
                    self._counts.served += 1
                    self._counts.fallbacks[reason] += 1
            job.pending -= 1
            if not job.pending:
                job.future.set_result(job.answers)

    async def _audit(self, link: ParentLink, asked: Sequence[Question], computed: Computed) -> None:
        link.counts.audited += len(asked)
        try:
            answers = await self._ask(link, asked, computed, self._spec.forward_timeout)
        except LinkError as failure:
            link.failed(failure, len(asked))
            return
        own = computed.scores[[question.batch_row for question in asked]].argmax(axis=1)
        with self._lock:
            self._counts.audited += len(asked)
            self._counts.agreed += int((answers.scores.argmax(axis=1) == own).sum())
        for index, question in enumerate(asked):
            if question.job.deeper:
                question.job.deeper(question.row, answers, index)


def _parts(parent: str, asked: Sequence[Question], computed: Computed) -> Iterator[Sequence[Question]]:
    """As many samples at a time as fit into a message."""
    most = _most_at_once(parent, asked[0], computed)
    for first in range(0, len(asked), most):
        yield asked[first : first + most]


def _most_at_once(parent: str, question: Question, computed: Computed) -> int:
    """How many samples fit into a message, with room for what else stands there and for codecs that save nothing."""
    if question.job.sends_input(parent):
        size = question.job.carry[0].nbytes
    else:
        assert computed.features is not None
        size = computed.features[0].nbytes + computed.logits[0].nbytes
    return max(MAX_MESSAGE * 3 // 4 // int(size), 1)
