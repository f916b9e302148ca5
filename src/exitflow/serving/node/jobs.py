"""What moves through a node: bundles ready to compute, requests on their way, and batches behind the engine."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from exitflow.serving.bundle.bundle import Bundle
from exitflow.serving.bundle.engine import Engine
from exitflow.serving.wire.answers import INPUT, Answers, Expected

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Loaded:
    """A bundle, ready to compute."""

    bundle: Bundle
    engine: Engine
    payloads: Mapping[str, str]  # parent -> what goes to it: features or the input
    expected: Mapping[str, Expected]  # parent -> what its answers must say


@dataclass(slots=True, eq=False)
class Job:
    """Samples of one request on their way through the node."""

    key: Loaded
    carry: Array  # (N, ...)
    start: int  # the exit behind which the carry stands; 0: the input
    deadline: float  # of the node's clock
    child: str | None  # who forwarded it; None: a client
    arrived: float
    future: asyncio.Future[Answers] | concurrent.futures.Future[Answers]
    before: Array | None = None  # (N, C) logits of the exit behind which the carry stands, where answers are blended
    answers: Answers | None = None
    pending: int = 0  # samples that a parent is asked about
    waits: bool = True  # for parents; else the own answer is given, and parents are asked nevertheless
    deeper: Callable[[int, Answers, int], None] | None = None  # who is told (row, answers, their row) then

    @property
    def size(self) -> int:
        """How many samples the request has."""
        return len(self.carry)

    @property
    def expired(self) -> bool:
        """Whether nobody waits for it any more."""
        return self.future.done()

    def sends_input(self, parent: str) -> bool:
        """Whether its input goes to that parent; only who has it can send it."""
        return self.start == 0 and self.key.payloads[parent] == INPUT


@dataclass(frozen=True, slots=True)
class Computed:
    """A batch behind the engine; rows in the order of the jobs."""

    jobs: Sequence[Job]
    features: Array | None
    logits: npt.NDArray[np.float32]
    scores: npt.NDArray[np.float32]
    confidences: npt.NDArray[np.float64]
    seconds: float


@dataclass(frozen=True, slots=True)
class Asked:
    """What parents are asked about a batch: by parent, the job if it is in a hurry, and whether its input is sent."""

    questions: Mapping[tuple[str, Job | None, bool], list[Question]]
    audits: Mapping[tuple[str, bool], list[Question]]  # whose answers nobody waits for

    def __bool__(self) -> bool:
        return bool(self.questions or self.audits)


@dataclass(frozen=True, slots=True)
class Question:
    """A sample that a parent is asked about."""

    job: Job
    row: int  # in its job
    batch_row: int
