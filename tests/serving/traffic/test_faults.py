"""Real processes that are killed, frozen and overloaded: no request without an answer, none answered twice."""

import asyncio
import os
import signal
import time
from collections import Counter
from contextlib import asynccontextmanager

import grpc
import pytest

from exitflow.serving.traffic.client import NodeClient, ask_each
from exitflow.serving.traffic.cluster import LocalCluster
from exitflow.serving.wire.messages import SERVICE, ModelInferResponse
from exitflow.serving.wire.security import Security
from tests.serving.asking import message
from tests.serving.inprocess import ALL_UP, FakeParent, fake_parent, http, running
from tests.serving.small import NUM_CLASSES, chain, make_bundle

pytestmark = pytest.mark.heavy

PATIENT = ["--set=forward_timeout=30", "--set=forward=feature", "--set=audit_share=0"]
HASTY = ["--set=forward_timeout=0.3", *PATIENT[1:]]


@pytest.fixture
def cluster(eager, tmp_path):
    with LocalCluster(eager, options=HASTY, logs=tmp_path) as running_cluster:
        yield running_cluster


class Stream:
    """Requests one after the other from several callers, each with an id of its own, until told to stop."""

    def __init__(self, place, bundle):
        self.place, self.bundle = place, bundle
        self.answers = Counter()  # id -> answers
        self.nodes = []
        self.errors = []
        self.sent = 0
        self.stopping = False

    async def caller(self, channel, number):
        call = channel.unary_unary(f"/{SERVICE}/ModelInfer")
        while not self.stopping:
            self.sent += 1
            name = f"{number}-{self.sent}"
            request = message(self.bundle, self.sent % 100, id=name)
            try:
                raw = await call(request.SerializeToString(), timeout=10, wait_for_ready=True)
            except grpc.aio.AioRpcError as error:
                self.errors.append(error)
                continue
            response = ModelInferResponse.FromString(raw)
            self.answers[response.id] += 1
            self.nodes.append(response.raw_output_contents[2][4:].decode())

    @asynccontextmanager
    async def flowing(self, callers=4):
        async with grpc.aio.insecure_channel(self.place) as channel:
            work = [asyncio.create_task(self.caller(channel, number)) for number in range(callers)]
            try:
                yield
            finally:
                self.stopping = True
                await asyncio.gather(*work)

    def check_all_answered(self):
        assert not self.errors
        assert len(self.answers) == self.sent
        assert set(self.answers.values()) == {1}

    async def until_from(self, node, count=5):
        """The next `count` answers all come from `node`."""
        first = len(self.nodes)
        for _ in range(2000):
            recent = self.nodes[first:][-count:]
            if len(recent) == count and set(recent) == {node}:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"{node} never answered; the last were {self.nodes[-10:]}")


def test_the_cloud_is_killed_and_comes_back(cluster, eager):
    async def scenario():
        stream = Stream(cluster.places["device"].grpc, eager)
        async with stream.flowing():
            await stream.until_from("cloud")
            cluster.stop(["cloud"], how=signal.SIGKILL)
            await stream.until_from("edge")
            await asyncio.to_thread(cluster.start, ["cloud"])
            await stream.until_from("cloud")
        stream.check_all_answered()
        (edge,) = await ask_each([cluster.places["edge"].grpc], Security(), NodeClient.status)
        assert not edge.problems
        assert edge.links["cloud"].times_cut >= 1
        assert sum(edge.fallbacks.values()) > 0

    asyncio.run(scenario())


def test_the_edge_is_killed_and_the_device_answers_alone(cluster, eager):
    async def scenario():
        stream = Stream(cluster.places["device"].grpc, eager)
        async with stream.flowing():
            await stream.until_from("cloud")
            cluster.stop(["edge"], how=signal.SIGKILL)
            await stream.until_from("device")
        stream.check_all_answered()
        (device,) = await ask_each([cluster.places["device"].grpc], Security(), NodeClient.status)
        assert "link to edge is cut" in device.problems[0]

    asyncio.run(scenario())


def test_a_frozen_parent_is_cut_off_and_taken_back(cluster, eager):
    async def scenario():
        stream = Stream(cluster.places["device"].grpc, eager)
        async with stream.flowing():
            await stream.until_from("cloud")
            os.kill(cluster.processes["edge"].pid, signal.SIGSTOP)
            try:
                await stream.until_from("device")
            finally:
                os.kill(cluster.processes["edge"].pid, signal.SIGCONT)
            await stream.until_from("cloud")
        stream.check_all_answered()
        (device,) = await ask_each([cluster.places["device"].grpc], Security(), NodeClient.status)
        assert device.fallbacks["timeout"] >= 1

    asyncio.run(scenario())


def test_a_node_that_is_told_to_stop_says_so_and_answers_until_it_has_drained(eager, tmp_path):
    with LocalCluster(eager, options=[*PATIENT, "--drain=60"], logs=tmp_path) as cluster:
        cloud, process = cluster.places["cloud"], cluster.processes["cloud"]

        async def scenario():
            stream = Stream(cloud.grpc, eager)
            async with stream.flowing():
                await stream.until_from("cloud")
                assert http(cloud.http, "GET", "/readyz")[0] == 200
                process.send_signal(signal.SIGTERM)
                await stream.until_from("cloud", count=50)
                while http(cloud.http, "GET", "/readyz")[0] != 503:
                    await asyncio.sleep(0.01)
                await stream.until_from("cloud", count=50)
            stream.check_all_answered()

        asyncio.run(scenario())
        for name in cluster.processes:  # the others are told once here, and again when the cluster stops
            cluster.processes[name].send_signal(signal.SIGTERM)
        assert process.wait(60) == 0  # told twice, it does not wait for the minute


def test_a_new_bundle_rolls_through_the_tree_from_the_top_without_losing_depth(eager, tmp_path):
    """Parents first: they answer children of the old bundle with the old bundle."""
    import shutil

    live = tmp_path / "live"
    shutil.copytree(eager.path, live)
    new = make_bundle(tmp_path / "new", ALL_UP, seed=3)
    from exitflow.serving.bundle.bundle import load_bundle

    with LocalCluster(load_bundle(live), options=PATIENT, logs=tmp_path) as cluster:

        async def scenario():
            stream = Stream(cluster.places["device"].grpc, eager)
            async with stream.flowing():
                await stream.until_from("cloud")
                live.rename(tmp_path / "old")
                (tmp_path / "new").rename(live)
                for name in ("cloud", "edge"):
                    await ask_each([cluster.places[name].grpc], Security(), NodeClient.reload)
                    await stream.until_from("cloud")
                cluster.processes["device"].send_signal(signal.SIGHUP)
                place = [cluster.places["device"].grpc]
                for _ in range(1000):
                    (status,) = await ask_each(place, Security(), NodeClient.status)
                    if status.bundle == new.hash:
                        break
                    await asyncio.sleep(0.01)
                assert status.bundle == new.hash
                await stream.until_from("cloud")
            stream.check_all_answered()
            assert set(stream.nodes) == {"cloud"}

        asyncio.run(scenario())


def resident_megabytes(pid):
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmRSS"))


def test_overload_is_refused_cleanly_memory_stays_flat_and_it_recovers_at_once(eager, tmp_path):
    options = ["--set=queue_size=8", "--set=max_batch=4"]
    with LocalCluster(eager, options=options, logs=tmp_path) as cluster:
        place = cluster.places["cloud"].grpc

        async def flood(seconds):
            codes = Counter()
            ends = time.monotonic() + seconds
            request = message(eager)
            request.inputs[0].shape[0] = 7  # two of them do not fit into the queue
            request.raw_input_contents[0] = eager.samples().inputs[:7].tobytes()
            data = request.SerializeToString()

            async def caller(call):
                while time.monotonic() < ends:
                    try:
                        await call(data, timeout=10)
                        codes["OK"] += 1
                    except grpc.aio.AioRpcError as error:
                        codes[error.code().name] += 1

            async with grpc.aio.insecure_channel(place) as channel:
                call = channel.unary_unary(f"/{SERVICE}/ModelInfer")
                await asyncio.gather(*(caller(call) for _ in range(200)))
            return codes

        pid = cluster.processes["cloud"].pid
        asyncio.run(flood(1.0))
        before = resident_megabytes(pid)
        codes = asyncio.run(flood(3.0))
        assert set(codes) == {"OK", "RESOURCE_EXHAUSTED"}
        assert codes["RESOURCE_EXHAUSTED"] > 0
        assert resident_megabytes(pid) < before * 1.1 + 5
        (status,) = asyncio.run(ask_each([place], Security(), NodeClient.status))
        assert status.rejected >= codes["RESOURCE_EXHAUSTED"]

        async def one():
            async with grpc.aio.insecure_channel(place) as channel:
                call = channel.unary_unary(f"/{SERVICE}/ModelInfer")
                return await asyncio.gather(*(call(message(eager).SerializeToString(), timeout=10) for _ in range(4)))

        assert len(asyncio.run(one())) == 4


def test_the_receiver_never_sees_more_than_limit_and_burst_in_a_second(tmp_path):
    """Bursts of hard samples at a device whose link may carry 20/s."""
    limit = 20.0
    bundle = make_bundle(tmp_path / "b", chain(rate=200.0, limits=(limit, None)))
    hard = bundle.samples().outputs.logits[0]
    from exitflow.routing import confidence

    rows = confidence(hard).argsort()[:50]

    async def scenario():
        parent = FakeParent(NUM_CLASSES)
        async with fake_parent(parent) as address:
            for _ in range(2):  # the second is a restart
                async with running(bundle, "device", {"edge": address}) as (node, _):
                    for _ in range(5):
                        await asyncio.gather(
                            *(node.infer(node.current, bundle.samples().inputs[row : row + 1]) for row in rows)
                        )
                        await asyncio.sleep(0.3)
        times = [when for when, count in parent.received for _ in range(count)]
        assert len(times) > limit  # it did carry something
        for first in times:
            assert sum(first <= when < first + 1 for when in times) <= limit + limit

    asyncio.run(scenario())
