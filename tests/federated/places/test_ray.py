"""Ray's cluster elsewhere: reached by its address, and named when nobody answers there."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

from exitflow.errors import ConfigError
from exitflow.free_ports import free_ports
from exitflow.runs.runs import Run
from tests.small import TINY

pytestmark = pytest.mark.heavy

NAMESPACE = "exitflow-test-ray"


@pytest.mark.parametrize(
    ("address", "problem"),
    [("nowhere", "expected HOST:PORT"), ("127.0.0.1:{free}", "nobody answers at 127.0.0.1:")],
)
def test_an_address_without_a_cluster_is_named_at_once(address, problem):
    from exitflow.federated.places.ray import check_reachable

    with pytest.raises(ConfigError, match=f"--address: {problem}"):
        check_reachable(address.format(free=free_ports(1)[0]))


@pytest.mark.system
@pytest.mark.timeout(600)
def test_a_cluster_that_runs_already_trains_the_same(tmp_path):
    """In a network namespace with nothing but loopback, where Ray takes no other address."""
    if not shutil.which("ip") or subprocess.run(["ip", "netns", "add", NAMESPACE], capture_output=True).returncode:
        pytest.skip("this kernel refuses network namespaces")
    inside = ["ip", "netns", "exec", NAMESPACE]
    subprocess.run(["ip", "-n", NAMESPACE, "link", "set", "lo", "up"], check=True)
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4, "RAY_USAGE_STATS_ENABLED": "0"}
    env = {**os.environ, **token, "RAY_TMPDIR": "/tmp/exitflow-test-ray"}
    programs = os.path.dirname(sys.executable)
    head = [os.path.join(programs, "ray"), "start", "--head", "--block", "--port", "6399", "--num-cpus", "2"]
    options = ["--node-ip-address", "127.0.0.1", "--include-dashboard", "false", "--disable-usage-stats"]
    with (tmp_path / "ray.log").open("w") as log:
        cluster = subprocess.Popen([*inside, *head, *options], env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        give_up = time.monotonic() + 120
        while "Ray runtime started" not in (tmp_path / "ray.log").read_text():
            assert cluster.poll() is None, (tmp_path / "ray.log").read_text()
            assert time.monotonic() < give_up
            time.sleep(0.2)
        settings = [part for override in TINY for part in ("--set", override)]
        for name, place in (
            ("ray", ["--backend", "ray", "--address", "127.0.0.1:6399"]),
            ("serial", ["--backend", "serial"]),
        ):
            command = [os.path.join(programs, "exitflow"), "train", "paper-7", "--out", str(tmp_path / name)]
            done = subprocess.run([*inside, *command, *place, *settings], env=env, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
    finally:
        pids = subprocess.run(["ip", "netns", "pids", NAMESPACE], capture_output=True, text=True).stdout.split()
        for pid in map(int, pids):  # of our own namespace: the cluster's processes have left its group
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        cluster.wait()
        subprocess.run(["ip", "netns", "del", NAMESPACE], check=True)
        shutil.rmtree("/tmp/exitflow-test-ray", ignore_errors=True)
    expected, found = (Run(tmp_path / name).state().tensors for name in ("serial", "ray"))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
