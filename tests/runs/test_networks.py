"""A federation over links with limited bandwidth and delay, in network namespaces that nothing else is in."""

import shutil
import subprocess

import pytest
import torch

from exitflow.runs.runs import Run
from tests.flower.test_deployment import SAMPLES, Machines, expected_state

pytestmark = [pytest.mark.timeout(600), pytest.mark.system]

PREFIX = "exitflow-test"
LINKS = {  # of every node, in each direction
    "bandwidth": ["tbf", "rate", "20mbit", "burst", "32kbit", "latency", "400ms"],
    "bandwidth and delay": ["netem", "rate", "20mbit", "delay", "25ms"],
}


def ip(*args):
    return subprocess.run(["ip", *args], capture_output=True, text=True)


def check(*args):
    done = ip(*args)
    if done.returncode:
        pytest.skip(f"this kernel refuses network namespaces: ip {' '.join(args)}: {done.stderr.strip()}")


@pytest.fixture(params=LINKS)
def network(request):
    """A bridge in a namespace of its own, to which the server and each node are linked."""
    if not shutil.which("ip") or not shutil.which("tc"):
        pytest.skip("ip and tc are not installed (Debian: iproute2)")
    names = ["hub", "server", *SAMPLES]
    try:
        for name in names:
            check("netns", "add", f"{PREFIX}-{name}")
            check("-n", f"{PREFIX}-{name}", "link", "set", "lo", "up")
        check("-n", f"{PREFIX}-hub", "link", "add", "bridge", "type", "bridge")
        check("-n", f"{PREFIX}-hub", "link", "set", "bridge", "up")
        for number, name in enumerate(names[1:], start=1):
            hub, machine = f"{PREFIX}-hub", f"{PREFIX}-{name}"
            check("-n", hub, "link", "add", f"to{number}", "type", "veth", "peer", "name", "eth0", "netns", machine)
            check("-n", hub, "link", "set", f"to{number}", "master", "bridge", "up")
            check("-n", machine, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
            check("-n", machine, "link", "set", "eth0", "up")
            if name in SAMPLES:
                for namespace, device in ((machine, "eth0"), (hub, f"to{number}")):
                    shape = ["tc", "qdisc", "add", "dev", device, "root", *LINKS[request.param]]
                    done = subprocess.run(["ip", "netns", "exec", namespace, *shape], capture_output=True, text=True)
                    if done.returncode:
                        pytest.skip(f"this kernel refuses {' '.join(shape)}: {done.stderr.strip()}")
        yield request.param
    finally:
        for name in names:
            ip("netns", "del", f"{PREFIX}-{name}")


@pytest.mark.usefixtures("network")
def test_a_federation_trains_over_slow_links_to_the_same_bits(tmp_path):
    def inside(name):
        return ["ip", "netns", "exec", f"{PREFIX}-{name if name in SAMPLES else 'server'}"]

    machines = Machines(tmp_path, "10.77.0.1:9092", inside)
    try:
        machines.start_server()
        for node in SAMPLES:
            machines.start_node(node)
        machines.call("train", "system.toml", "--out", "run", *machines.train_options())
    finally:
        machines.stop()
    found, expected = Run(tmp_path / "run").state(), expected_state(tmp_path)
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in expected.tensors.items())
