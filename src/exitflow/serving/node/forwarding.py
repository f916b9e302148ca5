"""Asking parents: one of them, another if it fails, and the own answer if all do."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Coroutine, Mapping, Sequence
from time import monotonic
from typing import Any

import numpy as np

from exitflow.serving.bundle.bundle import MAX_MESSAGE
from exitflow.serving.node.counts import NodeCounts
from exitflow.serving.node.jobs import Computed, Job, Question
from exitflow.serving.node.links import LinkError, ParentLink
from exitflow.serving.node.node_settings import ServingSpec
from exitflow.serving.node.rate_control import ForwardControl
from exitflow.serving.wire.answers import FEATURES, INPUT, LOGITS, Answers, BadAnswerError
from exitflow.serving.wire.codecs import encode
from exitflow.serving.wire.messages import ModelInferRequest

log = logging.getLogger("exitflow.serving")

FAIR_TIME = 0.5  # part of `forward_timeout`: whose request has less left is in a hurry, and does not judge a parent
DEADLINE_MARGIN = 0.9  # of the time left is given to a parent; the rest is for answering locally after all
LEAST_TIME = 0.004  # seconds: with less left, a parent is not asked
AUDIT_SPARE = 0.6  # part of the burst that an audit leaves


class Forwarder:
    """Of one node. The own answer of every question is already in its job; a parent's overwrites it."""

    def __init__(
        self,
        node: str,
        spec: ServingSpec,
        links: Mapping[str, ParentLink],
        counts: NodeCounts,
        control: ForwardControl,
    ) -> None:
        self._node, self._spec, self._links, self._counts = node, spec, links, counts
        self.control = control  # of the newest bundle: what is under way takes its tokens there too
        self._specs = {parent: spec.link(parent) for parent in links}
        self._loop = asyncio.get_running_loop()
        self._random = random.Random(node)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def idle(self) -> bool:
        """Whether no parent is being asked."""
        return not self._tasks

    def open_parents(self, now: float) -> list[str]:
        """Those that may be asked.

        While a connection comes about its link earns no tokens: what waits is sent at once, and must not be more than
        the burst.
        """
        found = [link for link in self._links.values() if link.open]
        for link in found:
            self._pass_time(link, now)
        return [link.name for link in found]

    def _pass_time(self, link: ParentLink, now: float) -> None:
        self.control.pass_time(link.name, now, earning=link.was_connected())

    def in_a_hurry(self, job: Job, now: float) -> bool:
        """Whether its deadline is near, so that others must not be asked about with it."""
        return job.deadline - now < FAIR_TIME * self._spec.forward_timeout

    def ask(self, parent: str, asked: Sequence[Question], computed: Computed) -> None:
        """In the background; `parent` has given tokens for all of `asked`, which are sent together if they can be."""
        most = _most_at_once(parent, asked[0], computed)
        for first in range(0, len(asked), most):
            self._spawn(self._ask_until_answered(parent, asked[first : first + most], computed))

    def maybe_audit(self, question: Question, computed: Computed) -> None:
        """Ask a parent about an answer that was sure, if chance will and a link has room to spare."""
        if self._spec.control != "rate" or self._random.random() >= self._spec.audit_share:
            return
        now = monotonic()
        parent = self.control.reserve(self.open_parents(now), now, spare=AUDIT_SPARE)
        if parent is not None:
            own = int(computed.scores[question.batch_row].argmax())
            self._spawn(self._audit(self._links[parent], question, computed, own))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask_until_answered(self, parent: str, asked: Sequence[Question], computed: Computed) -> None:
        tried: set[str] = set()
        target: str | None = parent
        reason = ""
        while target is not None:
            tried.add(target)
            timeout = self._timeout(asked)
            try:
                answers = await self._ask(self._links[target], asked, computed, timeout)
            except LinkError as failure:
                if failure.reason == "timeout" and timeout < FAIR_TIME * self._spec.forward_timeout:
                    failure.reason = "deadline"
                reason = failure.reason
                self._links[target].failed(failure, len(asked))
                target = self._another(tried, asked)
            else:
                self._links[target].counts.answered += len(asked)
                self._settle(asked, answers, reason)
                return
        self._settle(asked, None, reason)

    def _timeout(self, asked: Sequence[Question]) -> float:
        left = min(question.job.deadline for question in asked) - monotonic()
        return min(self._spec.forward_timeout, max(left * DEADLINE_MARGIN - LEAST_TIME / 4, 0.001))

    def _another(self, tried: set[str], asked: Sequence[Question]) -> str | None:
        """A parent that was not tried and has a token for every sample; the limit is kept in trouble too."""
        now = monotonic()
        others = [name for name in self.open_parents(now) if name not in tried]
        if not others or min(question.job.deadline for question in asked) - now < LEAST_TIME:
            return None
        return self.control.reserve(others, now, count=len(asked))

    async def _ask(self, link: ParentLink, asked: Sequence[Question], computed: Computed, timeout: float) -> Answers:
        """The parent's answers, or a LinkError, whatever goes wrong: the own answer waits behind it."""
        try:
            request = self._request(link.name, asked, computed)
            link.counts.forwarded += len(asked)
            response = await link.infer(request, timeout)
            loaded = asked[0].job.key
            deeper = range(loaded.engine.exit + 1, len(loaded.bundle.manifest.segments) + 1)
            answers = Answers.from_message(response, len(asked), computed.scores.shape[1], deeper)
        except LinkError:
            raise
        except BadAnswerError as error:
            raise LinkError("nonsense", str(error)) from None
        except Exception as error:
            log.exception("asking %s failed", link.name)
            raise LinkError("failed", f"{type(error).__name__}: {error}") from None
        link.succeeded()
        self._pass_time(link, monotonic())  # nothing waits for the connection any more
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
                self._counts.served += 1
                self._counts.fallbacks[reason] += 1
            job.pending -= 1
            if not job.pending:
                job.future.set_result(job.answers)

    async def _audit(self, link: ParentLink, question: Question, computed: Computed, own: int) -> None:
        link.counts.audited += 1
        try:
            answers = await self._ask(link, [question], computed, self._spec.forward_timeout)
        except LinkError as failure:
            link.failed(failure, 1)
            return
        self._counts.audited += 1
        self._counts.agreed += int(answers.scores[0].argmax()) == own


def _most_at_once(parent: str, question: Question, computed: Computed) -> int:
    """How many samples fit into a message, with room for what else stands there and for codecs that save nothing."""
    if question.job.sends_input(parent):
        size = question.job.carry[0].nbytes
    else:
        assert computed.features is not None
        size = computed.features[0].nbytes + computed.logits[0].nbytes
    return max(MAX_MESSAGE * 3 // 4 // int(size), 1)
