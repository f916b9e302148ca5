"""Over Flower: every task is a message to its node, every update the reply.

A node gets what its exit covers, by name, and returns as much. Replies are handed on in the order of the tasks,
whatever the order of arrival, so that the sums come out the same to the bit as in the serial backend. Nothing that
a node sends is believed before it was checked; a node that fails is a `Missing`, for the loop's rule to deal with.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from exitflow.errors import TrainingError
from exitflow.federated.local import LocalTrainer
from exitflow.federated.options.compression import Compression
from exitflow.federated.options.federation_spec import FederationSpec
from exitflow.federated.types import UPDATE_FIGURES, GradientFigures, Missing, ServerState, Status, Task, Update
from exitflow.flower.courier import Courier, Reply
from exitflow.flower.journal import Journal
from exitflow.flower.loopback import LocalFederation
from exitflow.flower.screening import SizeScreen, mismatch
from exitflow.models.nested import Coverage
from exitflow.tensors import Tensors, pack, take, unpack

POLL = 0.1  # seconds between looks for replies
GONE = "it was there when the training began, and is gone: the SuperLink knows no such node any more"
LARGEST_FIGURE = 1e12  # that is believed of a loss or a gradient

log = logging.getLogger("exitflow.federated")


@dataclass(frozen=True)
class FlowerBackend:
    """Nodes that are reached through `courier`."""

    courier: Courier
    stations: Callable[[], Mapping[str, int]]  # node -> Flower's number for it, of those that are registered
    coverage: Callable[..., Coverage]  # of any exits
    run_id: str
    samples: Mapping[str, int]  # of each node, as it said before the first round
    details: Mapping[str, Any] = field(default_factory=dict)  # that every message carries
    spec: FederationSpec = field(default_factory=FederationSpec)
    status: Status = field(default=lambda text: None)
    journal: Journal = field(default_factory=Journal)
    on_close: Callable[[], None] = field(default=lambda: None)
    _screens: list[SizeScreen] = field(default_factory=list)

    def run(self, state: ServerState, tasks: Sequence[Task]) -> Iterator[Update | Missing]:
        """What came of each task.

        Where updates get noise none is refused for its size: they are clipped anyway, and whether one counts would
        depend on the data of others, which the noise does not hide.
        """
        self.journal.tasks(tasks)
        answers = self._updates(state, tasks)
        if self.spec.noise_multiplier is None:
            if not self._screens:
                self._screens.append(SizeScreen(self.spec.norm_limit))
            answers = self._screens[0](answers)
        for answer in answers:
            self.journal.answer(answer)
            yield answer

    def measure_gradients(self, state: ServerState, pairs: Sequence[tuple[str, int]]) -> list[GradientFigures]:
        """The figures of each (node, exit); the node measures them, and NaN stands for what cannot be believed."""
        jobs = [_Job(node, (exit,), {**self._common, "kind": "gradients", "exit": exit}) for node, exit in pairs]
        return [self._figures(job, reply) for job, reply in zip(jobs, self._in_order(state, jobs), strict=True)]

    def close(self) -> None:
        """End what was started for it."""
        self.on_close()

    def _updates(self, state: ServerState, tasks: Sequence[Task]) -> Iterator[Update | Missing]:
        jobs = [_Job(task.node, task.exits, self._header(task)) for task in tasks]
        for task, reply in zip(tasks, self._in_order(state, jobs), strict=True):
            yield self._update(state, task, reply)

    def _header(self, task: Task) -> dict[str, Any]:
        return {**self._common, "kind": "train", "task": json.loads(json.dumps(dataclasses.asdict(task)))}

    @property
    def _common(self) -> dict[str, Any]:
        return {"run": self.run_id, **self.details}

    def _update(self, state: ServerState, task: Task, reply: Reply) -> Update | Missing:
        """The reply as an update, if it is one that can be used."""

        def missing(reason: str, *, refused: bool) -> Missing:
            return Missing(task, reason, refused=refused, wire_bytes=reply.wire_bytes, seconds=reply.seconds)

        if problem := reply.error or reply.header.get("error"):
            return missing(str(problem), refused=reply.refused)
        sent = self._header(task)
        if any(reply.header.get(key) != sent[key] for key in ("run", "task")):
            return missing("it answers another task", refused=True)
        covered = self.coverage(*task.exits)
        try:
            tensors = unpack(reply.payload)
            delta, buffers = self._parts(tensors, take(state.params, covered), take(state.buffers, covered))
            figures = {name: _from_json(reply.header[name]) for name in UPDATE_FIGURES}
            update = Update(task, delta, buffers, **figures, wire_bytes=reply.wire_bytes, seconds=reply.seconds)
            check_figures(update, self.samples[task.node])
        except (ValueError, KeyError, TypeError) as error:
            return missing(str(error), refused=True)
        return update

    def _figures(self, job: _Job, reply: Reply) -> GradientFigures:
        """By the rule for what is missing."""
        try:
            if problem := reply.error or reply.header.get("error"):
                raise ValueError(problem)
            return gradient_figures(reply.header)
        except ValueError as error:
            problem = f"node {job.node!r}: its gradients at exit {job.exits[0]} are missing: {error}"
        if self.spec.on_missing == "strict":
            raise TrainingError(f"{problem}; federation.on_missing = 'skip' or 'reweight' would go on")
        log.warning(problem)
        return GradientFigures(math.nan, math.nan, math.nan, math.nan)

    def _parts(self, tensors: Tensors, params: Tensors, buffers: Tensors) -> tuple[dict[str, Any], dict[str, Any]]:
        """(delta, buffers), just as they should be, or ValueError."""
        came_buffers = {name: tensor for name, tensor in tensors.items() if name in buffers}
        delta = {name: tensor for name, tensor in tensors.items() if name not in buffers}
        if compression := Compression.of(self.spec):
            delta = compression.decoded(delta, params)
        if problem := mismatch(delta, params) or mismatch(came_buffers, buffers):
            raise ValueError(problem)
        return delta, came_buffers

    def _in_order(self, state: ServerState, jobs: Sequence[_Job]) -> Iterator[Reply]:
        """The reply to each job, in order; for a node without one within the deadline, an error."""
        stations = self.stations()
        packed: dict[tuple[int, ...], bytes] = {}
        sent: dict[str, _Job] = {}
        unknown: dict[int, Reply] = {}
        messages = []
        began = time.monotonic()
        for index, job in enumerate(jobs):
            if job.exits not in packed:
                packed[job.exits] = pack(take(state.tensors, self.coverage(*job.exits)))
            if job.node in stations:
                message = self.courier.send(
                    stations[job.node], job.header, packed[job.exits], seconds=self.spec.deadline
                )
                sent[message] = job
            else:
                message = f"not sent {index}"
                unknown[index] = Reply(message, error=GONE)
            messages.append(message)
        arrived: dict[str, Reply] = {reply.message: reply for reply in unknown.values()}
        give_up = time.monotonic() + self.spec.deadline
        for message in messages:
            while message not in arrived:
                for reply in self.courier.receive(sent):
                    down = _size(sent.pop(reply.message), packed)
                    up = len(json.dumps(reply.header)) + len(reply.payload)
                    seconds = time.monotonic() - began
                    arrived[reply.message] = dataclasses.replace(reply, wire_bytes=(down, up), seconds=seconds)
                self.status(_waiting_for(sent.values()))
                if message in arrived:
                    break
                if time.monotonic() > give_up:
                    down = _size(sent.pop(message), packed)
                    error = f"no answer within {self.spec.deadline:g} s"
                    arrived[message] = Reply(message, error=error, wire_bytes=(down, 0), seconds=self.spec.deadline)
                else:
                    time.sleep(POLL)
            yield arrived.pop(message)


@dataclass(frozen=True, slots=True)
class _Job:
    """A message to be sent."""

    node: str
    exits: tuple[int, ...]
    header: dict[str, Any]


def _size(job: _Job, packed: Mapping[tuple[int, ...], bytes]) -> int:
    return len(json.dumps(job.header)) + len(packed[job.exits])


def check_figures(update: Update, num_samples: int) -> None:
    """Refuse counts and losses that make no sense: they weigh the update."""
    for name in ("num_samples", "num_steps"):
        value = getattr(update, name)
        if type(value) is not int or not 0 < value < 2**40:
            raise ValueError(f"{name} is {value!r}")
    if update.num_samples != num_samples:
        raise ValueError(f"num_samples is {update.num_samples}, and was {num_samples} when the run began")
    if update.state_round is not None and (type(update.state_round) is not int or update.state_round < 0):
        raise ValueError(f"state_round is {update.state_round!r}")
    if len(update.losses) != len(update.task.exits) or not all(map(_is_loss, update.losses)):
        raise ValueError(f"losses are {update.losses!r}")


def _is_loss(value: Any) -> bool:
    """NaN and infinity are; for these the loop has a rule of its own."""
    return value is None or (isinstance(value, float) and not (LARGEST_FIGURE < abs(value) < math.inf))


def gradient_figures(header: Mapping[str, Any]) -> GradientFigures:
    """Those in a header, if they can be some: all NaN, of a node with too little data, or none."""
    figures: dict[str, Any] = {item.name: header.get(item.name) for item in dataclasses.fields(GradientFigures)}
    unknown = all(isinstance(value, float) and math.isnan(value) for value in figures.values())
    for name, value in figures.items():
        if not unknown and (type(value) not in (int, float) or not 0 <= value <= LARGEST_FIGURE):
            raise ValueError(f"{name} is {value!r}")
    return GradientFigures(**figures)


def open_local_flower(
    trainer: LocalTrainer, spec: FederationSpec | None = None, *, status: Status | None = None
) -> FlowerBackend:
    """With a whole federation on this machine, which ends with the backend."""
    federation = LocalFederation(list(trainer.data.indices), lambda header: trainer)
    return FlowerBackend(
        federation.courier,
        federation.stations,
        trainer.model.coverage,
        "local",
        {node: len(held) for node, held in trainer.data.indices.items()},
        spec=spec or FederationSpec(),
        status=status or (lambda text: None),
        on_close=federation.close,
    )


def _waiting_for(jobs: Any) -> str:
    nodes = sorted({job.node for job in jobs})
    shown = ", ".join(nodes[:3])
    return f"waiting for {shown}{f' and {len(nodes) - 3} more' if len(nodes) > 3 else ''}" if nodes else ""


def _from_json(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
