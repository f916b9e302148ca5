"""Real processes that are killed, frozen, restarted, or lie. One federation for all tests, in their order: a node
that was killed may come back only after Flower has noticed, a minute later, so other tests come in between."""

import dataclasses
import os
import signal
import threading
import time

import numpy as np
import pytest
import torch

from exitflow.federated.loop import run_rounds
from exitflow.federated.options.around import Options
from exitflow.federated.options.federation_spec import FederationSpec
from exitflow.federated.plan import TrainingPlan
from exitflow.federated.types import Missing, Update
from exitflow.federated.weighting import WEIGHTINGS
from exitflow.flower.backend import FlowerBackend
from exitflow.flower.loopback import LocalFederation
from exitflow.system.assembly import Assembly
from tests.small import image_dataset, task_of, tiny_system

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]

NODES = ["device-0", "device-1", "device-2", "cloud-0"]
DEADLINE = 25.0


class Puppet:
    """A trainer that files in `folder` hold up, or make lie."""

    def __init__(self, trainer, folder):
        self.trainer, self.folder = trainer, folder

    def __getattr__(self, name):
        return getattr(self.trainer, name)

    def train(self, state, task):
        (self.folder / f"began-{task.node}-{task.round}").touch()
        while (self.folder / f"hold-{task.node}").exists():
            time.sleep(0.05)
        update = self.trainer.train(state, task)
        lie = self.folder / f"lie-{task.node}"
        return LIES[lie.read_text()](update) if lie.exists() else update


def changed(update, function):
    return dataclasses.replace(update, delta={name: function(tensor) for name, tensor in update.delta.items()})


LIES = {
    "nan": lambda update: changed(update, lambda tensor: tensor * float("nan")),
    "huge": lambda update: changed(update, lambda tensor: tensor * 1e6),
    "shape": lambda update: changed(update, lambda tensor: tensor.reshape(-1)),
}


class WithoutSome:
    def __init__(self, trainer, absent):
        self.trainer, self.absent = trainer, absent

    def run(self, state, tasks):
        for task in tasks:
            yield Missing(task, "absent") if task.node in self.absent else self.trainer.train(state, task)


class Stage:
    def __init__(self, folder):
        self.folder = folder
        self.assembly = Assembly(tiny_system("training.optimiser.momentum_between_rounds=keep"), image_dataset(96))
        self.trainer = self.assembly.trainer(folder / "run" / "nodes")
        self.state = self.assembly.initial_state()
        self.federation = LocalFederation(NODES, lambda header: Puppet(self.trainer, folder))
        spec = FederationSpec(deadline=DEADLINE, norm_limit=10)
        self.backend = FlowerBackend(
            self.federation.courier,
            self.federation.stations,
            self.assembly.model.coverage,
            "run",
            self.assembly.samples,
            spec=spec,
        )
        self.serial = self.assembly.trainer(folder / "serial" / "nodes")

    def tasks(self, round):
        return [
            task_of(round, node, 3 if node == "cloud-0" else 1, 1.0, 10 * round + i) for i, node in enumerate(NODES)
        ]

    def run(self, round):
        return {each.task.node: each for each in self.backend.run(self.state, self.tasks(round))}

    def check_same_as_serial(self, update):
        expected = self.serial.train(self.state, update.task)
        assert all(torch.equal(update.delta[name], expected.delta[name]) for name in expected.delta)

    def check_loop(self, rule, round, absent):
        """A round of training under the rule: as in one process without those who are absent."""
        spec = dataclasses.replace(self.assembly.system.training, rounds=round)
        profile, names = self.assembly.profile, [node.name for node in self.assembly.system.topology.nodes]
        rows = [names.index(node) for node in NODES]
        plan = TrainingPlan(
            NODES,
            dataclasses.replace(profile, samples=profile.samples[rows], probabilities=profile.probabilities[rows]),
            WEIGHTINGS["serving-rate"],
            self.assembly.model.coverage,
            spec,
        )
        state = dataclasses.replace(self.state, round=round - 1)
        ((found, report),) = run_rounds(plan, state, self.backend, Options(FederationSpec(on_missing=rule)))
        ((expected, expected_report),) = run_rounds(
            plan, state, WithoutSome(self.serial, absent), Options(FederationSpec(on_missing=rule))
        )
        assert set(report.missing) == absent
        assert all(torch.equal(found.tensors[name], tensor) for name, tensor in expected.tensors.items())
        assert not all(torch.equal(state.tensors[name], tensor) for name, tensor in expected.tensors.items())
        np.testing.assert_array_equal(report.lost_weight, expected_report.lost_weight)
        return report

    def program(self, node):
        return self.federation.programs[f"node-{node}"]


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    stage = Stage(tmp_path_factory.mktemp("stage"))
    yield stage
    stage.federation.close()


def test_a_node_killed_in_the_middle_of_a_round_is_missed_and_the_others_count(stage):
    (stage.folder / "hold-device-1").touch()
    found = {}
    round = threading.Thread(target=lambda: found.update(stage.run(1)))
    round.start()
    began = stage.folder / "began-device-1-1"
    while not began.exists():
        assert round.is_alive(), found
        time.sleep(0.05)
    stage.program("device-1").kill(signal.SIGKILL)
    round.join()
    (stage.folder / "hold-device-1").unlink()
    assert isinstance(found["device-1"], Missing)
    assert not found["device-1"].refused
    for node in ("device-0", "device-2", "cloud-0"):
        stage.check_same_as_serial(found[node])


def test_a_frozen_node_is_missed_and_back_after_it_thaws(stage):
    """While `device-1`, which was killed, is away."""
    os.kill(stage.program("device-0").pid, signal.SIGSTOP)
    frozen = stage.check_loop("skip", 2, {"device-0", "device-1"})
    os.kill(stage.program("device-0").pid, signal.SIGCONT)
    assert "no answer" in frozen.missing["device-0"]
    assert frozen.lost_weight[0] > 0
    stage.check_loop("reweight", 3, {"device-1"})


def test_malicious_nodes_are_harmless(stage):
    for node, lie in (("device-0", "huge"), ("cloud-0", "shape")):
        (stage.folder / f"lie-{node}").write_text(lie)
    found = stage.run(4)
    for node, reason in (("device-0", "times as large as is usual"), ("cloud-0", "instead of")):
        (stage.folder / f"lie-{node}").unlink()
        assert found[node].refused
        assert reason in found[node].reason
    assert isinstance(found["device-2"], Update)


def test_a_killed_node_comes_back_with_its_momentum(stage):
    stage.federation.restart("device-1")
    give_up = time.monotonic() + 120
    while stage.program("device-1").poll(2) is not None:  # not let in before Flower has noticed that it was gone
        assert time.monotonic() < give_up
        time.sleep(2)
        stage.federation.restart("device-1")
    found = stage.run(5)
    assert isinstance(found["device-1"], Update), found["device-1"]
    assert found["device-1"].state_round == 1  # of the round in which its SuperNode was killed
    assert found["device-2"].state_round == 4
