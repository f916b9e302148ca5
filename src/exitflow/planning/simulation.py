"""Every request of some time through a system, one by one, on a virtual clock, by the rules of the serving nodes.

What a node answers and whom it asks is decided by `routing.decisions.Router`, what may be sent by its token buckets,
which link is cut by `routing.link_state`, what waits and is computed together by `routing.queueing`: the very code that
`exitflow serve` runs. Only what takes time is made up here. A node has `cores`, each of which works `service_ms` on a
request; a link sends one request after another at its bandwidth, and half of its round trip lies on either side.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from exitflow.config import require
from exitflow.errors import ConfigError, suggestion
from exitflow.evaluation.calibration import NodeCalibration
from exitflow.evaluation.outputs import ExitOutputs
from exitflow.planning.arrivals import Workload
from exitflow.routing.clock import VirtualClock
from exitflow.routing.decisions import Router, Rules
from exitflow.routing.link_state import IDLE_PAUSE, LinkState
from exitflow.routing.queueing import QueueLimits, take_batch
from exitflow.routing.rate_control import ForwardControl
from exitflow.topology.graph import Link, Node
from exitflow.topology.rates import serving_plan

FloatArray = npt.NDArray[np.float64]

CLIENT_TIMEOUT = 10.0  # seconds, as `exitflow load` waits
STEPS = 20  # in which progress is told


@dataclass(frozen=True)
class NodeSettings:
    """What `exitflow serve --set` may change of it."""

    rules: Rules = field(default_factory=lambda: Rules(audit_share=0.01))
    burst_seconds: float = 1.0
    limited: bool = True  # not: the calibrated threshold alone decides
    limits: QueueLimits = field(default_factory=lambda: QueueLimits(256, 5.0))
    max_batch: int = 1  # samples that a core works on together, one after the other


@dataclass(frozen=True)
class Failure:
    """A node that is gone for a while."""

    node: str
    begin: float  # seconds
    end: float


def parse_failure(text: str) -> Failure:
    """The failure that a text such as `edge-0@60s..90s` names."""
    node, at, span = text.partition("@")
    begin, dots, end = span.partition("..")
    try:
        failure = Failure(node, float(begin.strip().removesuffix("s")), float(end.strip().removesuffix("s")))
    except ValueError:
        failure = Failure("", 0.0, 0.0)
    valid = bool(at and dots and node) and 0 <= failure.begin < failure.end < float("inf")
    require(valid, "--fail", f"expected NODE@FROM..TO in seconds, such as edge-0@60s..90s, got {text!r}")
    return failure


@dataclass(frozen=True)
class Outcome:
    """What became of all requests, in the order in which they ended; (R,) of those that were answered."""

    begun: FloatArray  # seconds
    latency: FloatArray  # seconds
    exits: npt.NDArray[np.intp]
    right: npt.NDArray[np.bool_]
    failed: Mapping[str, int]  # reason -> requests that nobody answered
    received: Mapping[str, int]  # by node
    served: Mapping[str, int]  # by node
    fallbacks: Mapping[str, int]  # reason -> own answers that were given instead of a parent's
    sent: Mapping[tuple[str, str], int]  # over each link, audits too
    busy: Mapping[str, float]  # share of the time that each node's cores worked
    duration: float


class _Caller(Protocol):
    """Who waits for an answer."""

    def answered(self, exit: int) -> None:
        """This exit has given the answer that counts."""

    def failed(self, reason: str) -> None:
        """There will be no answer."""


class _Job:
    """A sample at a node."""

    __slots__ = ("caller", "deadline", "expired", "row")

    key = None  # all can be computed together
    size = 1

    def __init__(self, row: int, deadline: float, caller: _Caller) -> None:
        self.row, self.deadline, self.caller = row, deadline, caller
        self.expired = False


class _Client:
    """The caller of one request, who notes how long the answer took."""

    __slots__ = ("begun", "row", "world")

    def __init__(self, world: _World, row: int) -> None:
        self.world, self.row, self.begun = world, row, world.clock.now()

    def answered(self, exit: int) -> None:
        world = self.world
        world.begun.append(self.begun)
        world.latency.append(world.clock.now() - self.begun)
        world.exits.append(exit)
        world.rows.append(self.row)

    def failed(self, reason: str) -> None:
        self.world.failures[reason] += 1


class _Question:
    """A sample that a node asks a parent about; the node's own answer stands by."""

    __slots__ = ("at_parent", "done", "job", "link", "node", "timeout", "timer", "tried", "turn")

    def __init__(self, node: _SimulatedNode, job: _Job | None, row: int, parent: str) -> None:
        """Without a `job` it is an audit: nobody waits."""
        self.node, self.job, self.done, self.tried = node, job, False, {parent}
        self._ask(parent, row)

    def _ask(self, parent: str, row: int) -> None:
        world = self.node.world
        now, deadline = world.clock.now(), self.job.deadline if self.job else float("inf")
        self.link = self.node.links[parent]
        self.turn = self.link.state.in_air.next_turn()
        self.timeout = self.node.router.timeout(deadline, now)
        self.at_parent = _Job(row, now + self.timeout, self)
        self.timer = world.clock.call_later(self.timeout, self._timed_out)
        self.link.carry(self.at_parent)

    def answered(self, exit: int) -> None:
        self.link.back(self._came_back, exit)

    def failed(self, reason: str) -> None:
        self.link.back(self._came_to_nothing, reason, self.at_parent)

    def _came_back(self, exit: int) -> None:
        if self.done:
            return
        self.done = True
        self.timer.cancel()
        self.link.state.succeeded()
        self.link.state.in_air.answered(self.turn, 1)
        if self.job:
            self.job.caller.answered(exit)

    def _timed_out(self) -> None:
        self.at_parent.expired = True
        self._came_to_nothing("timeout", self.at_parent)

    def _came_to_nothing(self, reason: str, at_parent: _Job) -> None:
        if self.done or at_parent is not self.at_parent:  # another parent has been asked since
            return
        self.timer.cancel()
        node, now = self.node, self.node.world.clock.now()
        if reason == "overloaded":
            self.link.state.in_air.answered(self.turn, 1)
        else:
            self.link.lost(self.turn)
        reason = node.router.blame(reason, self.timeout)
        self.link.failed(reason)
        if self.job is None:
            self.done = True
            return
        parent = node.router.another(self.tried, 1, self.job.deadline, now)
        if parent is None:
            self.done = True
            node.serve(self.job, reason)
        else:
            self.tried.add(parent)
            self._ask(parent, self.job.row)


class _SimulatedLink:
    """From a node to a parent."""

    def __init__(self, node: _SimulatedNode, link: Link) -> None:
        self.world, self.name = node.world, (node.name, link.name)
        self.state: LinkState = LinkState()
        self._half = (link.round_trip_ms or 0.0) / 2e3
        self._wire = 0.0
        if link.bandwidth_mbps is not None:
            assert link.request_bytes is not None
            self._wire = link.request_bytes * 8 / link.bandwidth_mbps / 1e6
        self._free = 0.0  # when the wire has sent what it has

    @property
    def parent(self) -> _SimulatedNode:
        return self.world.nodes[self.name[1]]

    def carry(self, job: _Job) -> None:
        """Up, behind what is still being sent."""
        self.world.sent[self.name] += 1
        now = self.world.clock.now()
        self._free = max(now, self._free) + self._wire
        if (later := self._free + self._half - now) > 0:
            self.world.clock.call_later(later, self.parent.submit, job)
        else:
            self.parent.submit(job)

    def back(self, function: Callable[..., None], *arguments: object) -> None:
        """Down, which takes no bandwidth worth counting."""
        if self._half:
            self.world.clock.call_later(self._half, function, *arguments)
        else:
            function(*arguments)

    def failed(self, reason: str) -> None:
        """Tell its state, and, if it is cut now, ask from time to time whether the parent is back."""
        if self.state.failed(reason, "in the simulation"):
            self.world.clock.call_later(self.state.next_pause(), self._probe)

    def lost(self, turn: int) -> None:
        """Nobody waits for this answer any more; it is in the air until something that was sent later is answered."""
        self.state.in_air.lost(turn, 1)
        self.world.clock.call_later(IDLE_PAUSE, self.ask_whether_ready)

    def _probe(self) -> None:
        if self.parent.is_down:
            self.world.clock.call_later(self.state.next_pause(), self._probe)
        else:
            self.state.mended()
            self.ask_whether_ready()

    def ask_whether_ready(self) -> None:
        """As an idle link does: now it is known whether the parent is there."""
        if not self.parent.is_down:
            self.state.in_air.answered(self.state.in_air.next_turn())
        elif self.state.open:
            self.failed("unreachable")


class _SimulatedNode:
    """A queue, cores, and the router of a real node."""

    def __init__(self, world: _World, node: Node, calibration: NodeCalibration, planned: float, ranks: FloatArray):
        settings = world.settings
        self.world, self.name, self.exit = world, node.name, node.exit
        self.is_down = False
        self.links = {link.name: _SimulatedLink(self, link) for link in node.parents}
        control = ForwardControl(
            node.parents,
            calibration,
            planned_rate=planned,
            burst_seconds=settings.burst_seconds,
            now=0.0,
            limited=settings.limited,
            in_air={name: link.state.in_air for name, link in self.links.items()},
        )
        states = {name: link.state for name, link in self.links.items()}
        self.router: Router = Router(node.name, settings.rules, control, states, calibration.cut)
        self._ranks = ranks  # (N,) how sure its exit is of each sample
        self._seconds, self._idle_cores = (node.service_ms or 0.0) / 1e3, node.cores or 1
        self._cores = self._idle_cores
        self._queue: deque[_Job] = deque()
        self._working: set[tuple[_Job, ...]] = set()
        self.worked = 0.0  # seconds, of all cores
        self.received = self.served = 0

    @property
    def busy(self) -> float:
        """Share of the time that its cores worked."""
        return self.worked / self._cores / self.world.workload.duration

    def submit(self, job: _Job) -> None:
        """Take a sample that has just come."""
        self.received += 1
        if self.is_down:
            job.caller.failed("unreachable")
        elif not self.world.settings.limits.leave_room(len(self._queue), 1, self._seconds / self._cores):
            job.caller.failed("overloaded")
        else:
            self._queue.append(job)
            if self._idle_cores:
                self._begin()

    def _begin(self) -> None:
        taken, _ = take_batch(self._queue, self.world.settings.max_batch)
        if not taken:
            return
        jobs = tuple(taken)
        if not self._seconds:
            self._decide(jobs)
            return
        self._idle_cores -= 1
        self._working.add(jobs)
        self.worked += self._seconds * len(jobs)
        self.world.clock.call_later(self._seconds * len(jobs), self._finish, jobs)

    def _finish(self, jobs: tuple[_Job, ...]) -> None:
        if jobs not in self._working:  # the node failed meanwhile
            return
        self._working.remove(jobs)
        self._idle_cores += 1
        if self._queue:
            self._begin()
        self._decide(jobs)

    def _decide(self, jobs: Sequence[_Job]) -> None:
        if len(jobs) == 1:
            row = jobs[0].row
            ranks = self._ranks[row : row + 1]
        else:
            ranks = self._ranks[[job.row for job in jobs]]
        decision = self.router.decide(ranks, [job.deadline for job in jobs], self.world.clock.now())
        if decision.no_time:
            self.world.fallbacks["deadline"] += decision.no_time
        if decision.cut_off:
            self.world.fallbacks["parent-down"] += decision.cut_off
        for job, parent in zip(jobs, decision.parents, strict=True):
            if parent is None:
                self.serve(job)
            else:
                _Question(self, job, job.row, parent)
        for number, parent in decision.audits:
            _Question(self, None, jobs[number].row, parent)

    def serve(self, job: _Job, reason: str = "") -> None:
        """The own answer; with a `reason` where a parent's was wanted."""
        self.served += 1
        if reason:
            self.world.fallbacks[reason] += 1
        job.caller.answered(self.exit)

    def go_down(self) -> None:
        """All that it was working on is lost."""
        self.is_down = True
        lost = [job for jobs in self._working for job in jobs] + list(self._queue)
        self._working.clear()
        self._queue.clear()
        self._idle_cores = self._cores
        for job in lost:
            job.caller.failed("unreachable")

    def come_back(self) -> None:
        """Start again after a failure, empty as at the beginning."""
        self.is_down = False


class _World:
    """The nodes, the clock, and what has been seen."""

    def __init__(
        self,
        workload: Workload,
        outputs: ExitOutputs,
        calibrations: Mapping[str, NodeCalibration],
        settings: NodeSettings,
        confidence_kind: str,
    ) -> None:
        self.workload, self.settings, self.clock = workload, settings, VirtualClock()
        self.begun: list[float] = []
        self.latency: list[float] = []
        self.exits: list[int] = []
        self.rows: list[int] = []
        self.failures: Counter[str] = Counter()
        self.fallbacks: Counter[str] = Counter()
        self.sent: Counter[tuple[str, str]] = Counter()
        planned = serving_plan(workload.topology).nodes
        ranks = outputs.ranks(confidence_kind)
        self.nodes = {
            node.name: _SimulatedNode(
                self, node, calibrations[node.name], planned[node.name].received_rate, ranks[node.exit - 1]
            )
            for node in workload.topology.nodes
        }

    def admit(self, device: Node) -> None:
        """Let the requests of a device come, each when it is time."""
        arrivals, node, clock = self.workload.arrivals(device), self.nodes[device.name], self.clock

        def come(row: int) -> None:
            follow()
            node.submit(_Job(row, clock.now() + CLIENT_TIMEOUT, _Client(self, row)))

        def follow() -> None:
            if (upcoming := next(arrivals, None)) is not None:
                clock.call_later(upcoming[0] - clock.now(), come, upcoming[1])

        follow()

    def fail(self, failure: Failure) -> None:
        """Let a node go and come back."""
        node = self.nodes[failure.node]
        self.clock.call_later(failure.begin, node.go_down)
        self.clock.call_later(failure.end, node.come_back)
        for child in self.nodes.values():
            if failure.node in child.links:
                self.clock.call_later(failure.begin + IDLE_PAUSE, child.links[failure.node].ask_whether_ready)


def simulate(
    workload: Workload,
    outputs: ExitOutputs,
    calibrations: Mapping[str, NodeCalibration],
    *,
    settings: NodeSettings | None = None,
    failures: Sequence[Failure] = (),
    confidence_kind: str = "entropy",
    progress: Callable[[float], None] = lambda share: None,
) -> Outcome:
    """What becomes of the workload's requests, which are drawn from the samples of `outputs`."""
    for failure in failures:
        if failure.node not in workload.topology.by_name:
            hint = suggestion(failure.node, workload.topology.by_name)
            raise ConfigError(f"there is no node {failure.node!r}{hint}", key="--fail")
    world = _World(workload, outputs, calibrations, settings or NodeSettings(), confidence_kind)
    for failure in failures:
        world.fail(failure)
    for device in workload.devices:
        world.admit(device)
    for step in range(STEPS):
        world.clock.advance(workload.duration / STEPS)
        progress((step + 1) / STEPS)
    world.clock.advance(2 * CLIENT_TIMEOUT)  # what has come by then is answered
    exits, rows = np.array(world.exits, dtype=np.intp), np.array(world.rows, dtype=np.intp)
    return Outcome(
        begun=np.array(world.begun),
        latency=np.array(world.latency),
        exits=exits,
        right=outputs.correct[exits - 1, rows],
        failed=dict(world.failures),
        received={name: node.received for name, node in world.nodes.items()},
        served={name: node.served for name, node in world.nodes.items()},
        fallbacks=dict(world.fallbacks),
        sent=dict(world.sent),
        busy={name: node.busy for name, node in world.nodes.items()},
        duration=workload.duration,
    )
