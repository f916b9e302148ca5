"""The device as a function in the user's program: the same node, from any thread, with and without a network."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager

import numpy as np
import pytest

from exitflow import Device
from exitflow.errors import BundleError, ConfigError, ServingError
from exitflow.serving.bundle.bundle import load_bundle
from exitflow.serving.traffic.cluster import LocalCluster
from tests.serving.asking import expected
from tests.serving.inprocess import ALL_UP
from tests.serving.small import chain, make_bundle

pytestmark = pytest.mark.heavy

HASTY = ("forward_timeout=0.3", "forward=feature", "audit_share=0")
PATIENT = ("forward_timeout=30", "forward=feature", "audit_share=0")


def as_options(settings):
    return [f"--set={text}" for text in settings]


@pytest.fixture
def above(eager, tmp_path):
    """Edge and cloud as processes; the device is made by the test."""
    cluster = LocalCluster(eager, options=as_options(HASTY), logs=tmp_path)
    cluster.start(["cloud", "edge"])
    with cluster_ends(cluster):
        yield cluster


@contextmanager
def cluster_ends(cluster):
    try:
        yield
    finally:
        cluster.stop()


@contextmanager
def device_of(cluster, bundle, settings=HASTY):
    parents = {"edge": cluster.places["edge"].grpc}
    with Device(bundle.path, node="device", parents=parents, settings=settings) as device:
        yield device


def test_alone_it_answers_with_its_own_exit(eager):
    samples = eager.samples()
    with Device(eager.path, node="device") as device:
        for row in range(20):
            answer = device.infer(samples.inputs[row])
            assert (answer.label, answer.exit, answer.node) == (
                samples.outputs.logits[0][row].argmax(),
                1,
                "device",
            )
            assert answer.scores.sum() == pytest.approx(1, abs=1e-5)
        assert device.status().served == 20
        assert device.status().requests == 20


def test_many_at_once_and_one_by_one_are_answered_alike(eager):
    inputs = eager.samples().inputs[:70]
    with Device(eager.path, node="device", settings=["max_batch=32"]) as device:
        many = device.infer_many(inputs)
        assert [answer.label for answer in many] == [device.infer(each).label for each in inputs]
        assert device.status().batches == {"1": 70, "6": 1, "32": 2}


def test_through_the_tree_it_answers_as_the_evaluation_says(bundle, tree):
    """Every device of the tree is replaced by a function."""
    samples = bundle.samples()
    device = next(node for node in bundle.topology.nodes if node.exit == 1)
    parents = {link.name: tree.places[link.name].grpc for link in device.parents}
    settings = ["control=threshold", "forward=feature", "forward_timeout=30"]
    with Device(bundle.path, node=device.name, parents=parents, settings=settings) as function:
        answers = [function.infer(each) for each in samples.inputs[:60]] + function.infer_many(samples.inputs[60:200])
    wanted = expected(bundle, device.name, samples)[:200]
    assert [(answer.label, answer.exit, answer.node) for answer in answers] == wanted
    assert len({node for _, _, node in wanted}) == 3  # all of them took part


def test_an_event_loop_is_not_held_up_while_a_parent_is_asked(above, eager):
    async def scenario():
        with device_of(above, eager, PATIENT) as device:
            answers = await asyncio.gather(*(device.ainfer(each) for each in eager.samples().inputs[:30]))
            assert [answer.node for answer in answers] == ["cloud"] * 30

    asyncio.run(scenario())


def test_from_many_threads_every_call_has_its_own_answer_and_all_are_counted(above, eager):
    inputs, logits = eager.samples().inputs, eager.samples().outputs.logits
    wrong, count = [], 40

    def work(device, first):
        for row in range(first, first + count):
            answer = device.infer(inputs[row % 100])
            if answer.label != logits[answer.exit - 1][row % 100].argmax():
                wrong.append(row)

    with device_of(above, eager, PATIENT) as device:
        threads = [threading.Thread(target=work, args=(device, 7 * number)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        status = device.status()
    assert wrong == []
    assert (status.arrived, status.requests) == (8 * count, 8 * count)
    link = status.links["edge"]
    assert status.served + link.answered == 8 * count
    assert link.answered > 0


class Flow:
    """Threads that ask one after the other until told to stop."""

    def __init__(self, device, inputs):
        self.device, self.inputs = device, inputs
        self.asked, self.nodes, self.stopping = Counter(), [], False

    def work(self, number):
        while not self.stopping:
            self.asked[number] += 1
            self.nodes.append(self.device.infer(self.inputs[self.asked[number] % 100]).node)

    @contextmanager
    def flowing(self):
        threads = [threading.Thread(target=self.work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self.stopping = True
            for thread in threads:
                thread.join()
        assert len(self.nodes) == self.asked.total()  # each was answered, once

    def until_from(self, node, count=5):
        first = len(self.nodes)
        for _ in range(2000):
            recent = self.nodes[first:][-count:]
            if len(recent) == count and set(recent) == {node}:
                return
            time.sleep(0.01)
        raise AssertionError(f"{node} never answered; the last were {self.nodes[-10:]}")


def test_the_tree_above_is_killed_and_comes_back_and_every_call_is_answered(above, eager):
    with device_of(above, eager) as device:
        flow = Flow(device, eager.samples().inputs)
        with flow.flowing():
            flow.until_from("cloud")
            above.stop(["cloud"], how=signal.SIGKILL)
            flow.until_from("edge")
            above.stop(["edge"], how=signal.SIGKILL)
            flow.until_from("device")
            assert "link to edge is cut" in device.status().problems[0]
            above.start(["cloud", "edge"])
            flow.until_from("cloud")


def test_a_frozen_parent_is_cut_off_and_taken_back(above, eager):
    with device_of(above, eager) as device:
        flow = Flow(device, eager.samples().inputs)
        with flow.flowing():
            flow.until_from("cloud")
            os.kill(above.processes["edge"].pid, signal.SIGSTOP)
            try:
                flow.until_from("device")
            finally:
                os.kill(above.processes["edge"].pid, signal.SIGCONT)
            flow.until_from("cloud")
        assert device.status().fallbacks["timeout"] >= 1


def test_a_call_is_answered_within_its_timeout(above, eager):
    with device_of(above, eager, PATIENT) as device:
        assert device.infer(eager.samples().inputs[0]).node == "cloud"
        os.kill(above.processes["edge"].pid, signal.SIGSTOP)
        try:
            assert device.infer(eager.samples().inputs[0], timeout=0.2).node == "device"
        finally:
            os.kill(above.processes["edge"].pid, signal.SIGCONT)
        with pytest.raises(ServingError, match="timeout: must be above 0, got -1"):
            device.infer(eager.samples().inputs[0], timeout=-1)


def test_with_wait_never_the_own_answer_is_given_at_once_and_the_deeper_one_follows(above, eager):
    told, came = [], threading.Event()

    def then(answer):
        told.append(answer)
        came.set()

    sample, logits = eager.samples().inputs[3], eager.samples().outputs.logits
    with device_of(above, eager, PATIENT) as device:
        os.kill(above.processes["edge"].pid, signal.SIGSTOP)  # so that nobody can have waited
        try:
            answer = device.infer(sample, wait="never", then=then)
        finally:
            os.kill(above.processes["edge"].pid, signal.SIGCONT)
        assert (answer.node, answer.label) == ("device", logits[0][3].argmax())
        assert came.wait(60)
        assert [(deeper.node, deeper.label) for deeper in told] == [("cloud", logits[2][3].argmax())]
        assert device.status().audited == 1
        assert device.status().agreed == int(logits[0][3].argmax() == logits[2][3].argmax())
    with device_of(above, eager, (*PATIENT, "wait=never")) as device:
        assert device.infer(sample).node == "device"
        assert device.infer(sample, wait="parent").node == "cloud"


def test_what_nobody_waits_for_keeps_to_the_limit_of_the_link(tmp_path):
    bundle = make_bundle(tmp_path / "b", chain(limits=(0.0, None)))
    hard = bundle.samples().outputs.logits[0].max(axis=1).argsort()[:50]
    cluster = LocalCluster(bundle, logs=tmp_path)
    cluster.start(["edge"])
    with cluster_ends(cluster), device_of(cluster, bundle, ("audit_share=0",)) as device:
        for row in hard:
            assert device.infer(bundle.samples().inputs[row], wait="never").node == "device"
        assert device.status().links["edge"].forwarded == 0


@pytest.mark.parametrize(
    ("image", "problem"),
    [
        (np.zeros((4, 4), np.uint8), r"has shape \[4, 4\], this bundle takes \[1, 4, 4\]"),
        (np.zeros((2, 1, 4, 4), np.uint8), r"has shape \[2, 1, 4, 4\], this bundle takes \[1, 4, 4\]"),
        (np.zeros((1, 4, 4)), "has type float64, this bundle takes uint8"),
        (None, "has type object, this bundle takes uint8"),
    ],
)
def test_what_is_no_input_gets_one_sentence(eager, image, problem):
    with Device(eager.path, node="device") as device, pytest.raises(ServingError, match=problem):
        device.infer(image)


def test_numbers_that_are_none_are_refused(tmp_path):
    bundle = make_bundle(tmp_path / "b", ALL_UP, floats=True)
    with Device(bundle.path, node="device") as device:
        fine = np.zeros((1, 4, 4))
        assert device.infer(fine).node == "device"  # whatever the width of the numbers
        with pytest.raises(ServingError, match="NaN or infinity"):
            device.infer(np.full_like(fine, np.nan))
        with pytest.raises(ServingError, match="too large for the network"):
            device.infer(np.full_like(fine, 3e38))


def test_what_does_not_fit_the_bundle_gets_one_sentence(eager, tmp_path):
    with pytest.raises(ConfigError, match="there is no node 'devise'; did you mean 'device'"):
        Device(eager.path, node="devise")
    with pytest.raises(ConfigError, match="'cloud' is no parent of node 'device'"):
        Device(eager.path, node="device", parents={"cloud": "127.0.0.1:1"})
    with pytest.raises(ConfigError, match="queue_size"):
        Device(eager.path, node="device", settings=["queue_size=0"])
    with pytest.raises(BundleError, match="is not a bundle"):
        Device(tmp_path, node="device")


def test_another_bundle_is_taken_while_others_ask(eager, tmp_path):
    new = make_bundle(tmp_path / "new", ALL_UP, seed=3)
    live = shutil.copytree(eager.path, tmp_path / "live")
    sample = eager.samples().inputs[0]
    with Device(live, node="device") as device:
        before = device.infer(sample).scores
        assert device.reload() == eager.version
        assert device.reload(new.path) == load_bundle(new.path).version
        assert not np.allclose(device.infer(sample).scores, before)
        assert device.status().bundle == new.hash
        with pytest.raises(BundleError):
            device.reload(tmp_path)
        assert device.status().bundle == new.hash


def test_a_closed_device_says_so(eager):
    device = Device(eager.path, node="device")
    device.close()
    device.close()
    with pytest.raises(ServingError, match="this device is closed"):
        device.infer(eager.samples().inputs[0])


FORKED = """
import os, sys, numpy
from exitflow import Device
from exitflow.errors import ServingError
device = Device(sys.argv[1], node="device")
child = os.fork()
if not child:
    try:
        device.infer(numpy.zeros((1, 4, 4), numpy.uint8))
    except ServingError as error:
        os._exit(7 if "made before a fork" in str(error) else 1)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), device.infer(numpy.zeros((1, 4, 4), numpy.uint8)).node)
"""

ALONE = """
import sys, numpy
from exitflow import Device
with Device(sys.argv[1], node="device") as device:
    device.infer(numpy.zeros((1, 4, 4), numpy.uint8))
print([name for name in ("torch", "grpc", "google.protobuf", "prometheus_client", "uvicorn") if name in sys.modules])
"""


@pytest.mark.parametrize(("program", "said"), [(FORKED, "7 device"), (ALONE, "[]")])
def test_in_a_program_of_its_own(eager, program, said):
    """After a fork it is refused in the child; alone it needs neither PyTorch nor gRPC."""
    done = subprocess.run([sys.executable, "-c", program, eager.path], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == said
