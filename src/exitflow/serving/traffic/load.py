"""Requests from a data set, as they will arrive: Poisson at every device, or as many at once as asked.

With a drift, the second half of the time is different: only the harder half of the samples, only half of the
devices with twice the traffic, or all requests of every second in its first half.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import grpc
import grpc.aio
import numpy as np
import numpy.typing as npt

from exitflow.errors import ServingError
from exitflow.routing import confidence
from exitflow.serving.bundle.bundle import Samples
from exitflow.serving.traffic.client import NodeClient, ask_each
from exitflow.serving.wire.answers import INPUT
from exitflow.serving.wire.messages import ModelInferRequest, ModelInferResponse
from exitflow.serving.wire.security import Security
from exitflow.topology.graph import Topology

DriftKind = Literal["difficulty", "traffic", "burst"]
DRIFTS = ("difficulty", "traffic", "burst")
REQUEST_TIMEOUT = 10.0  # seconds
DATATYPE_OF = {"uint8": "UINT8", "float32": "FP32"}


@dataclass(frozen=True)
class LoadPlan:
    """What to send, where, and how fast."""

    addresses: Mapping[str, str]  # every node -> where it listens
    topology: Topology  # with the arrival rates to make
    samples: Samples
    model: str
    confidence: str = "entropy"
    duration: float = 10.0  # seconds
    concurrency: int | None = None  # requests at once, instead of Poisson arrivals
    drift: DriftKind | None = None
    seed: int = 0
    security: Security = field(default_factory=Security)


@dataclass(slots=True)
class Outcomes:
    """What came of all requests, in the order in which they ended."""

    sent: int = 0
    latencies: list[float] = field(default_factory=list)  # seconds
    rows: list[int] = field(default_factory=list)
    classes: list[int] = field(default_factory=list)
    exits: list[int] = field(default_factory=list)
    failures: dict[str, int] = field(default_factory=dict)  # gRPC code -> requests


@dataclass(frozen=True)
class Measured:
    """What a finished load has measured."""

    plan: LoadPlan
    seconds: float
    outcomes: Outcomes
    before: Mapping[str, dict[str, Any]]  # status of every node
    after: Mapping[str, dict[str, Any]]  # of those that still answer

    @property
    def lasting(self) -> list[str]:
        """Nodes that ran all the time."""
        return [name for name, now in self.after.items() if now["started"] == self.before[name]["started"]]


def scaled(topology: Topology, total_rate: float | None) -> Topology:
    """The same with arrivals that sum to `total_rate`."""
    planned = sum(node.arrival_rate for node in topology.nodes)
    if total_rate is None or planned == 0:
        return topology
    factor = total_rate / planned
    return Topology(tuple(replace(node, arrival_rate=node.arrival_rate * factor) for node in topology.nodes))


class _Schedule:
    """Which sample and how many requests/s, by time."""

    def __init__(self, plan: LoadPlan) -> None:
        self._plan = plan
        self.rng = np.random.default_rng(plan.seed)
        ease = confidence(plan.samples.outputs.logits[0], plan.confidence)
        self._hard = np.argsort(ease)[: max(len(ease) // 2, 1)]
        self._count = len(ease)
        self._devices = [node.name for node in plan.topology.nodes if node.arrival_rate > 0]

    def row(self, elapsed: float) -> int:
        """The sample that a request takes."""
        if self._plan.drift == "difficulty" and elapsed > self._plan.duration / 2:
            return int(self.rng.choice(self._hard))
        return int(self.rng.integers(self._count))

    def factor(self, device: str, elapsed: float) -> float:
        """By how much the rate of a device differs from the planned one."""
        if self._plan.drift is None or elapsed <= self._plan.duration / 2:
            return 1.0
        if self._plan.drift == "traffic":
            busy = self._devices[: (len(self._devices) + 1) // 2]
            return len(self._devices) / len(busy) if device in busy else 0.0
        if self._plan.drift == "burst":
            return 2.0 if elapsed % 1 < 0.5 else 0.0
        return 1.0


def _messages(plan: LoadPlan) -> list[bytes]:
    """Every sample as a request that is ready to go."""
    messages = []
    for sample in plan.samples.inputs:
        request = ModelInferRequest(model_name=plan.model)
        request.inputs.add(name=INPUT, datatype=DATATYPE_OF[str(sample.dtype)], shape=(1, *sample.shape))
        request.raw_input_contents.append(np.ascontiguousarray(sample).tobytes())
        messages.append(request.SerializeToString())
    return messages


class LoadGenerator:
    """Sends the requests of one load, and measures what comes back."""

    def __init__(self, plan: LoadPlan) -> None:
        self.plan = plan
        self.outcomes = Outcomes()
        self._schedule = _Schedule(plan)
        self._messages = _messages(plan)
        self._metadata = plan.security.metadata
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, show: Callable[[LoadGenerator, Mapping[str, Any], float], None] | None = None) -> Measured:
        """`show` is called every second with the nodes' status."""
        plan = self.plan
        devices = [node for node in plan.topology.nodes if node.arrival_rate > 0 and node.name in plan.addresses]
        if not devices:
            raise ServingError("no requests arrive at any of these nodes: give the addresses of the devices")
        asked = await ask_each(plan.addresses.values(), plan.security, NodeClient.status)
        before = dict(zip(plan.addresses, asked, strict=True))
        clients = {node.name: NodeClient(plan.addresses[node.name], plan.security) for node in devices}
        watch = asyncio.create_task(self._watch(show)) if show else None
        started = time.perf_counter()
        try:
            if plan.concurrency is None:
                work = [self._arrivals(clients[node.name], node.name, node.arrival_rate, started) for node in devices]
            else:
                chosen = [devices[index % len(devices)].name for index in range(plan.concurrency)]
                work = [self._in_turn(clients[name], started) for name in chosen]
            await asyncio.gather(*work)
            while self._tasks:
                await asyncio.gather(*self._tasks)
            seconds = time.perf_counter() - started
        finally:
            if watch:
                watch.cancel()
            for client in clients.values():
                await client.channel.close()
        return Measured(plan, seconds, self.outcomes, before, await self._statuses())

    async def _statuses(self) -> dict[str, dict[str, Any]]:
        """The statuses of the nodes that answer."""

        async def status(name: str, address: str) -> tuple[str, dict[str, Any]] | None:
            with contextlib.suppress(ServingError):
                (found,) = await ask_each([address], self.plan.security, NodeClient.status)
                return name, found
            return None

        found = await asyncio.gather(*(status(*entry) for entry in self.plan.addresses.items()))
        return dict(entry for entry in found if entry)

    async def _watch(self, show: Callable[[LoadGenerator, Mapping[str, Any], float], None]) -> None:
        started = time.perf_counter()
        while True:
            await asyncio.sleep(1.0)
            show(self, await self._statuses(), time.perf_counter() - started)

    async def _arrivals(self, client: NodeClient, name: str, rate: float, started: float) -> None:
        """A Poisson process, thinned from its highest rate, that does not wait for answers."""
        elapsed = 0.0
        while True:
            elapsed += self._schedule.rng.exponential(1 / (2 * rate))
            if elapsed > self.plan.duration:
                return
            if self._schedule.rng.random() * 2 >= self._schedule.factor(name, elapsed):
                continue
            wait = elapsed - (time.perf_counter() - started)
            if wait > 0:
                await asyncio.sleep(wait)
            task = asyncio.create_task(self._request(client, self._schedule.row(elapsed)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _in_turn(self, client: NodeClient, started: float) -> None:
        while (elapsed := time.perf_counter() - started) < self.plan.duration:
            await self._request(client, self._schedule.row(elapsed))

    async def _request(self, client: NodeClient, row: int) -> None:
        outcomes = self.outcomes
        outcomes.sent += 1
        started = time.perf_counter()
        try:
            raw = await client.infer(self._messages[row], timeout=REQUEST_TIMEOUT, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            code = error.code().name
            outcomes.failures[code] = outcomes.failures.get(code, 0) + 1
            return
        outcomes.latencies.append(time.perf_counter() - started)
        response = ModelInferResponse.FromString(raw)
        outcomes.rows.append(row)
        outcomes.classes.append(int(np.frombuffer(response.raw_output_contents[0], dtype="<f4").argmax()))
        outcomes.exits.append(int.from_bytes(response.raw_output_contents[1][:4], "little"))


def right_answers(measured: Measured) -> npt.NDArray[np.bool_]:
    """(requests answered,) whether the class was the label."""
    labels = measured.plan.samples.outputs.labels
    result: npt.NDArray[np.bool_] = labels[measured.outcomes.rows] == np.array(
        measured.outcomes.classes, dtype=np.int64
    )
    return result
