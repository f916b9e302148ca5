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

import grpc
import grpc.aio
import numpy as np
import numpy.typing as npt

from exitflow.errors import ServingError
from exitflow.evaluation.calibration import NodeCalibration
from exitflow.planning.arrivals import DriftKind, Trace, Workload
from exitflow.planning.rehearsal import Rehearsal
from exitflow.planning.simulation import NodeSettings
from exitflow.serving.bundle.bundle import Samples
from exitflow.serving.node.status import NodeStatus
from exitflow.serving.traffic.client import NodeClient, ask_each
from exitflow.serving.wire.answers import INPUT
from exitflow.serving.wire.messages import ModelInferRequest, ModelInferResponse
from exitflow.serving.wire.security import Security
from exitflow.topology.graph import Node, Topology

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
    trace: Trace | None = None
    seed: int = 0
    rehearsal: Rehearsal | None = None  # how long the nodes and links were told to take ...
    calibrations: Mapping[str, NodeCalibration] = field(default_factory=dict)  # ... and what they then serve with
    settings: NodeSettings = field(default_factory=NodeSettings)
    security: Security = field(default_factory=Security)
    remark: str = ""  # that belongs into the report

    @property
    def workload(self) -> Workload:
        """When requests arrive, and which."""
        ease = self.samples.outputs.ranks(self.confidence)[0]
        return Workload(self.topology, ease, self.duration, self.seed, self.drift, self.trace)


@dataclass(slots=True)
class Outcomes:
    """What came of all requests, in the order in which they ended."""

    sent: int = 0
    latencies: list[float] = field(default_factory=list)  # seconds
    rows: list[int] = field(default_factory=list)
    classes: list[int] = field(default_factory=list)
    exits: list[int] = field(default_factory=list)
    failures: dict[str, int] = field(default_factory=dict)  # gRPC code -> requests


Watcher = Callable[["LoadGenerator", Mapping[str, NodeStatus], float], None]  # is shown the nodes' status, and seconds


@dataclass(frozen=True)
class Measured:
    """What a finished load has measured."""

    plan: LoadPlan
    seconds: float
    outcomes: Outcomes
    before: Mapping[str, NodeStatus]  # status of every node that answered
    after: Mapping[str, NodeStatus]  # of those that still answer

    @property
    def lasting(self) -> list[str]:
        """Nodes that ran all the time."""
        started = {name: status.started for name, status in self.before.items()}
        return [name for name, now in self.after.items() if now.started == started.get(name)]


async def statuses(addresses: Mapping[str, str], security: Security) -> dict[str, NodeStatus]:
    """The statuses of the nodes that answer, by name."""

    async def status(name: str, address: str) -> tuple[str, NodeStatus] | None:
        with contextlib.suppress(ServingError):
            (found,) = await ask_each([address], security, NodeClient.status)
            return name, found
        return None

    found = await asyncio.gather(*(status(*entry) for entry in addresses.items()))
    return dict(entry for entry in found if entry)


def scaled(topology: Topology, total_rate: float | None) -> Topology:
    """The same with arrivals that sum to `total_rate`."""
    planned = sum(node.arrival_rate for node in topology.nodes)
    if total_rate is None or planned == 0:
        return topology
    factor = total_rate / planned
    return Topology(tuple(replace(node, arrival_rate=node.arrival_rate * factor) for node in topology.nodes))


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
        self._workload = plan.workload
        self._rng = np.random.default_rng(plan.seed)  # of requests that do not arrive by themselves
        self._messages = _messages(plan)
        self._metadata = plan.security.metadata
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, show: Watcher | None = None) -> Measured:
        """`show` is called every second with the nodes' status."""
        plan = self.plan
        before = await self._statuses()
        devices = [node for node in plan.topology.nodes if node.arrival_rate > 0 and node.name in before]
        if not devices:
            raise ServingError("no requests arrive at any of the nodes that answer: give the addresses of devices")
        clients = {node.name: NodeClient(plan.addresses[node.name], plan.security) for node in devices}
        watch = asyncio.create_task(self._watch(show)) if show else None
        started = time.perf_counter()
        try:
            if plan.concurrency is None:
                work = [self._arrivals(clients[node.name], node, started) for node in devices]
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

    async def _statuses(self) -> dict[str, NodeStatus]:
        return await statuses(self.plan.addresses, self.plan.security)

    async def _watch(self, show: Watcher) -> None:
        started = time.perf_counter()
        while True:
            await asyncio.sleep(1.0)
            show(self, await self._statuses(), time.perf_counter() - started)

    async def _arrivals(self, client: NodeClient, device: Node, started: float) -> None:
        """Requests that do not wait for answers."""
        for elapsed, row in self._workload.arrivals(device):
            wait = elapsed - (time.perf_counter() - started)
            if wait > 0:
                await asyncio.sleep(wait)
            task = asyncio.create_task(self._request(client, row))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _in_turn(self, client: NodeClient, started: float) -> None:
        while (elapsed := time.perf_counter() - started) < self.plan.duration:
            (row,) = self._workload.rows(np.array([elapsed]), self._rng)
            await self._request(client, int(row))

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
