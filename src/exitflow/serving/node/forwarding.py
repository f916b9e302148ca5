"""Asking parents: one of them, another if it fails, and the own answer if all do."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import numpy as np

from exitflow.routing.clock import Clock
from exitflow.routing.decisions import Router
from exitflow.serving.bundle.bundle import MAX_MESSAGE
from exitflow.serving.node.counts import NodeCounts
from exitflow.serving.node.jobs import Computed, Question
from exitflow.serving.node.links import LinkError, ParentLink
from exitflow.serving.node.node_settings import ServingSpec
from exitflow.serving.wire.answers import FEATURES, INPUT, LOGITS, Answers, BadAnswerError
from exitflow.serving.wire.codecs import encode
from exitflow.serving.wire.messages import ModelInferRequest

log = logging.getLogger("exitflow.serving")


class Forwarder:
    """Of one node. The own answer of every question is already in its job; a parent's overwrites it."""

    def __init__(
        self,
        node: str,
        spec: ServingSpec,
        links: Mapping[str, ParentLink],
        counts: NodeCounts,
        router: Router,
        clock: Clock,
    ) -> None:
        self._node, self._spec, self._links, self._counts = node, spec, links, counts
        self._router, self._clock = router, clock
        self._specs = {parent: spec.link(parent) for parent in links}
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def idle(self) -> bool:
        """Whether no parent is being asked."""
        return not self._tasks

    def ask(self, parent: str, asked: Sequence[Question], computed: Computed) -> None:
        """In the background; `parent` has given tokens for all of `asked`, which are sent together if they can be."""
        most = _most_at_once(parent, asked[0], computed)
        for first in range(0, len(asked), most):
            self._spawn(self._ask_until_answered(parent, asked[first : first + most], computed))

    def audit(self, parent: str, question: Question, computed: Computed) -> None:
        """Ask about an answer that was sure, in the background, with a token that `parent` has given."""
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
            deadline = min(question.job.deadline for question in asked)
            timeout = self._router.timeout(deadline, self._clock.now())
            try:
                answers = await self._ask(self._links[target], asked, computed, timeout)
            except LinkError as failure:
                reason = failure.reason = self._router.blame(failure.reason, timeout)
                self._links[target].failed(failure, len(asked))
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
