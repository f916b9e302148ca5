"""A federation as its users run it: commands in processes of their own, data of their own on every node.

One federation for all tests, which leave it as they found it.
"""

import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from exitflow.data.sources import load_dataset
from exitflow.federated.local import NodeData
from exitflow.federated.loop import run_rounds
from exitflow.federated.places.serial import SerialBackend
from exitflow.federated.plan import TrainingPlan
from exitflow.federated.weighting import WEIGHTINGS
from exitflow.flower.keys import write_node_key
from exitflow.free_ports import free_ports
from exitflow.runs.runs import Run
from exitflow.system.assembly import Assembly
from exitflow.system.system import load_system

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]

SYSTEM = """
[[tiers]]
name = "device"
count = 2
exit = 1
arrival_rate = 25.0
max_transfer_rate = 5.0
[[tiers]]
name = "cloud"
count = 1
exit = 2
[model]
width = 2
blocks = [1, 1]
strides = [1, 2]
[data]
name = "own"
[training]
weighting = "serving-rate"
rounds = 2
batch_size = 8
[training.optimiser]
momentum_between_rounds = "keep"
[federation]
deadline = 60
"""
EXITFLOW = os.path.join(os.path.dirname(sys.executable), "exitflow")
SAMPLES = {"device-0": 24, "device-1": 40, "cloud-0": 32}


def write_data(folder, **counts):
    folder.mkdir(parents=True)
    (folder / "dataset.toml").write_text(
        "num_classes = 3\nmean = [128.0]\nstd = [64.0]\nflip = true\ncrop_padding = 1\n"
    )
    random = np.random.default_rng(sum(counts.values()))
    for part, count in counts.items():
        inputs = random.integers(256, size=(count, 1, 8, 8), dtype=np.uint8)
        np.savez(folder / f"{part}.npz", inputs=inputs, labels=random.integers(3, size=count))


class Machines:
    """Processes of a federation."""

    def __init__(self, root, address=None, inside=lambda name: []):
        self.root = root
        self.running = {}
        self.address = address or f"127.0.0.1:{free_ports(1)[0]}"
        self.inside = inside  # name of a process -> the command that runs it on its machine
        (root / "system.toml").write_text(SYSTEM)
        write_data(root / "data" / "server", validation=16, test=16)
        for node, count in SAMPLES.items():
            write_data(root / "data" / node, train=count)
        self.call("federation", "init", "system.toml", "--superlink", self.address)

    def call(self, *args, code=0):
        done = subprocess.run(
            [*self.inside("server"), *self.command(*args)], cwd=self.root, capture_output=True, text=True
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done

    def command(self, *args):
        return [sys.executable, "-m", "exitflow", *args]

    def start(self, name, *args):
        self.launch(name, self.command(*args))

    def launch(self, name, command):
        with (self.root / f"{name}.log").open("w") as log:
            self.running[name] = subprocess.Popen(
                [*self.inside(name), *command],
                cwd=self.root,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self.running[name]

    def start_server(self, *options):
        if options:
            self.start("server", "federation", "server", "federation", *options)
        else:
            self.launch("server", ["federation/server/start.sh"])
        self.wait_for("server", "The federation meets at")

    def start_node(self, node):
        self.launch(node, [f"federation/nodes/{node}/start.sh", "--data-dir", f"data/{node}"])

    def log(self, name):
        return (self.root / f"{name}.log").read_text()

    def wait_for(self, name, text, seconds=90):
        give_up = time.monotonic() + seconds
        while not re.search(text, self.log(name)):
            assert time.monotonic() < give_up, self.log(name)
            assert self.running[name].poll() is None, self.log(name)
            time.sleep(0.1)

    def train_options(self):
        return ("--backend", "flower", "--superlink", self.address, "--data-dir", "data/server")

    def kill(self, name, number=signal.SIGKILL):
        process = self.running.pop(name)
        os.kill(process.pid, number)
        process.wait()

    def stop(self):
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            process.wait(30)


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    machines = Machines(tmp_path_factory.mktemp("federation"))
    machines.start_server()
    for node in SAMPLES:
        machines.start_node(node)
    yield machines
    machines.stop()


def expected_state(root, rounds=2):
    """What one process computes that holds the data of all nodes."""
    system = load_system(root / "system.toml", [f"training.rounds={rounds}"])
    parts = {node: load_dataset("own", data_dir=str(root / "data" / node)) for node in SAMPLES}
    assembly = Assembly(system, load_dataset("own", data_dir=str(root / "data" / "server")), SAMPLES)
    train = type(parts["cloud-0"].train)(
        torch.cat([part.train.inputs for part in parts.values()]),
        torch.cat([part.train.labels for part in parts.values()]),
    )
    starts = np.cumsum([0, *SAMPLES.values()])
    indices = {node: torch.arange(starts[i], starts[i + 1]) for i, node in enumerate(SAMPLES)}
    trainer = assembly.trainer(root / "serial" / "nodes", only="device-0")
    trainer = replace(trainer, data=NodeData(train, indices, assembly.dataset.preparation))
    nodes = [node.name for node in system.topology.nodes]
    plan = TrainingPlan(nodes, assembly.profile, WEIGHTINGS["serving-rate"], assembly.model.coverage, system.training)
    *_, (state, _) = run_rounds(plan, assembly.initial_state(), SerialBackend(trainer))
    return state


def test_every_machine_gets_its_own_keys_and_no_other_secret(machines):
    root = machines.root / "federation"
    for secret in ("server/server.key", "server/superexec.secret", "nodes/device-0/node.key"):
        assert (root / secret).stat().st_mode & 0o077 == 0
    assert not list((root / "nodes").glob("*/server.key"))
    assert not list((root / "nodes").glob("*/superexec.secret"))
    assert [path.relative_to(root).as_posix() for path in root.glob("**/ca.key")] == ["authority/ca.key"]
    keys = {(root / "nodes" / node / "node.key").read_bytes() for node in SAMPLES}
    assert len(keys) == 3
    refused = machines.call("federation", "init", "system.toml", code=2)
    assert (
        refused.stderr
        == "exitflow: federation: is not an empty directory; keys that are in use must not be overwritten\n"
    )


def test_a_killed_training_and_a_killed_server_go_on_with_the_same_nodes_to_the_same_bits(machines):
    machines.start("train", "train", "system.toml", "--out", "run", *machines.train_options())
    records = machines.root / "run" / "rounds.jsonl"
    give_up = time.monotonic() + 150
    while not (records.exists() and records.read_text().count("\n") >= 1):
        assert machines.running["train"].poll() is None, machines.log("train")
        assert time.monotonic() < give_up, machines.log("train") + machines.log("device-0")
        time.sleep(0.1)
    machines.kill("train")
    machines.kill("server")
    machines.start_server()
    machines.call("train", "--resume", "run", *machines.train_options())
    run = Run(machines.root / "run")
    expected = expected_state(machines.root)
    assert all(torch.equal(run.state().tensors[name], tensor) for name, tensor in expected.tensors.items())
    assert [record.round for record in run.records] == [1, 2]
    assert not any(record.state_lost for record in run.records)
    profile = json.loads((machines.root / "run" / "profile.json").read_text())
    assert profile["node_samples"] == SAMPLES
    covered = run.records[0].wire_bytes["device-0"]
    assert 0 < covered.up < covered.down  # what goes down tells how to train, too


def test_a_node_without_a_registered_key_is_not_let_in(machines):
    shutil.copytree(
        machines.root / "federation/nodes/device-0",
        machines.root / "stranger",
        ignore=shutil.ignore_patterns("states", "logs"),
    )
    write_node_key(machines.root / "stranger")
    machines.start("stranger", "federation", "node", "stranger", "--data-dir", "data/device-0")
    assert machines.running.pop("stranger").wait(90) == 2
    *_, last = machines.log("stranger").splitlines()
    assert last.startswith("exitflow: stranger/node.key: the server at ")
    assert "knows no node with this key; take the folder that" in last


@pytest.fixture(scope="module")
def impostor(machines):
    machines.call("federation", "init", "system.toml", "--superlink", machines.address, "--out", "impostor")


def test_a_node_does_not_talk_to_a_server_with_a_wrong_certificate(machines, impostor):
    deceived = shutil.copytree(
        machines.root / "federation/nodes/device-0",
        machines.root / "deceived",
        ignore=shutil.ignore_patterns("states", "logs"),
    )
    shutil.copy(machines.root / "impostor/server/ca.crt", deceived)
    machines.start("deceived", "federation", "node", "deceived", "--data-dir", "data/device-0")
    machines.wait_for("deceived", r"SuperNode ended: .*(?:certificate|TLS).*trying again")
    machines.kill("deceived", signal.SIGTERM)


def test_a_training_with_another_certificate_or_secret_is_refused(machines, impostor):
    options = [*machines.train_options(), "--federation", "impostor"]
    refused = machines.call("train", "system.toml", "--out", "never", *options, code=1)
    assert refused.stderr.startswith("exitflow: ")
    assert refused.stderr.count("\n") == 1
    assert not (machines.root / "never").exists()


def test_flwr_run_trains_the_same(machines):
    machines.kill("server", signal.SIGTERM)
    machines.start_server("--flwr-run")
    home = machines.root / "flower-home"
    home.mkdir()
    certificate = machines.root / "federation/server/ca.crt"
    (home / "config.toml").write_text(
        f'[superlink.ours]\naddress = "{machines.address}"\nroot-certificates = "{certificate}"\n'
    )
    root = machines.root
    config = f'system="{root}/system.toml" out="{root}/flwr-run" federation="{root}/federation" data-dir="{root}/data/server"'
    flwr = os.path.join(os.path.dirname(sys.executable), "flwr")
    quiet = {"FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    done = subprocess.run(
        [flwr, "run", "federation/server/app", "ours", "--run-config", config],
        cwd=root,
        env={**os.environ, **quiet},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    give_up = time.monotonic() + 150
    while not (root / "flwr-run" / "model.safetensors").exists():
        logs = [path.read_text() for path in (root / "federation/server/logs").glob("*.log")]
        assert time.monotonic() < give_up, "\n".join(logs)[-3000:]
        time.sleep(0.2)
    expected, found = expected_state(root), Run(root / "flwr-run").state()
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in expected.tensors.items())
    machines.kill("server", signal.SIGTERM)
    machines.start_server()


def status_of(machines):
    return json.loads(machines.call("federation", "status", "--json").stdout)


def wait_until(condition, seconds=90):
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.2)


def test_logs_and_status_tell_who_is_there_and_what_a_training_does(machines):
    wait_until(lambda: all(node["connected"] for node in status_of(machines)["nodes"].values()))
    machines.call("train", "system.toml", "--out", "told", *machines.train_options())
    status = status_of(machines)
    assert status["answers"]
    assert status["training"] | {"began": "", "round_began": ""} == {
        "run": str(machines.root / "told"),
        "rounds": 2,
        "round": 2,
        "began": "",
        "round_began": "",
        "going_on": False,
        "problem": None,
    }
    last = Run(machines.root / "told").records[-1]
    assert {node: found["bytes"] for node, found in status["nodes"].items() if found["round"] == 2} == {
        node: sent.up for node, sent in last.wire_bytes.items()
    }
    for node in SAMPLES:
        machines.wait_for("server", rf"INFO node '{node}' is (connected|back)")
    for text in (
        "a training of 2 rounds has come",
        "round 1: tasks for",
        "has sent its update, ",
        "all rounds are done",
    ):
        machines.wait_for("server", text)
    for text in ("connected to the server at", "round 1: a task to train exits", "the update is handed to Flower"):
        machines.wait_for("cloud-0", text)


def test_a_node_that_goes_and_comes_back_is_in_the_log_of_the_server(machines):
    wait_until(lambda: status_of(machines)["nodes"]["device-1"]["connected"])
    machines.kill("device-1", signal.SIGTERM)
    machines.wait_for("server", "WARNING node 'device-1' is gone")
    assert not status_of(machines)["nodes"]["device-1"]["connected"]
    machines.start_node("device-1")
    machines.wait_for("server", "INFO node 'device-1' is back")


def test_a_certificate_is_renewed_while_the_server_runs_and_nodes_stay(machines):
    host, port = machines.address.split(":")
    before = ssl.get_server_certificate((host, int(port)))
    machines.call("federation", "renew", "--days", "20")
    after = ssl.get_server_certificate((host, int(port)))
    assert after.split() == (machines.root / "federation/server/server.crt").read_text().split() != before.split()
    status = status_of(machines)  # over the new one, which the old authority has signed
    assert status["answers"]
    assert 19 < status["certificate_days"] <= 20
    machines.call("federation", "renew", "--authority", "impostor/server", code=2)
    machines.call("train", "system.toml", "--out", "renewed", *machines.train_options())


def test_a_federation_that_does_not_answer_is_told_with_exit_code_1(machines):
    machines.call("federation", "init", "system.toml", "--superlink", "127.0.0.1:1", "--out", "silent")
    done = machines.call("federation", "status", "silent", code=1)
    assert "The federation at 127.0.0.1:1: nobody answers" in done.stdout
    assert "There was no training yet." in done.stdout
