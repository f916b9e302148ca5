"""All backends on one fixture: the same bits."""

import os
import signal

import pytest
import torch

from exitflow.errors import TrainingError
from exitflow.federated.local import LocalTrainer
from exitflow.federated.loop import run_rounds
from exitflow.federated.places.processes import WorkerProcess
from exitflow.federated.plan import TrainingPlan
from exitflow.federated.sampling import sample_tasks
from exitflow.federated.weighting import WEIGHTINGS
from exitflow.runs.backends import open_backend
from exitflow.system.assembly import Assembly
from tests.small import image_dataset, tiny_system

pytestmark = pytest.mark.heavy

VARIANTS = {
    "p=0": (),
    "p=0.2": ("training.help_probability=0.2",),
    "partial": ("training.participation=0.5", "training.help_probability=0.1"),
    "bfloat16": ("training.optimiser.precision=bfloat16",),
    "momentum kept": ("training.optimiser.momentum_between_rounds=keep",),
    "all exits": ("training.local_exits=all", "training.participation=0.8"),
    "coverage": ("training.server_step=coverage", "model.heads=grid"),
}


def assembled(overrides, rounds=3):
    system = tiny_system(*overrides, f"training.rounds={rounds}")
    assembly = Assembly(system, image_dataset(96))
    nodes = [node.name for node in system.topology.nodes]
    return assembly, TrainingPlan(
        nodes, assembly.profile, WEIGHTINGS["serving-rate"], assembly.model.coverage, system.training
    )


def final_state(name, workers, overrides, folder, rounds=3):
    assembly, plan = assembled(overrides, rounds)
    state, losses = assembly.initial_state(), []
    with open_backend(name, assembly.trainer(folder), state, workers=workers) as backend:
        variances = backend.measure_gradients(state, [("device-0", 1), ("cloud-0", 3), ("cloud-0", 1)])
        for state, report in run_rounds(plan, state, backend):
            losses.append(report.losses)
            assert not report.state_lost
    return state, losses, variances


@pytest.mark.parametrize("variant", VARIANTS)
def test_processes_give_the_bits_of_serial(variant, tmp_path):
    expected, losses, variances = final_state("serial", None, VARIANTS[variant], tmp_path / "serial")
    for workers in (1, 2, 3):
        found = final_state("processes", workers, VARIANTS[variant], tmp_path / f"{workers}")
        assert all(torch.equal(expected.tensors[name], found[0].tensors[name]) for name in expected.tensors)
        assert found[1] == losses
        assert found[2] == variances


@pytest.mark.parametrize(
    "variant", ["partial", "momentum kept", *(pytest.param(each, marks=pytest.mark.slow) for each in ("p=0", "p=0.2"))]
)
@pytest.mark.usefixtures("ray_cluster")
def test_ray_gives_the_bits_of_serial(variant, tmp_path):
    expected, losses, variances = final_state("serial", None, VARIANTS[variant], tmp_path / "serial")
    found = final_state("ray", 2, VARIANTS[variant], tmp_path / "ray")
    assert all(torch.equal(expected.tensors[name], found[0].tensors[name]) for name in expected.tensors)
    assert found[1:] == (losses, variances)


@pytest.mark.usefixtures("ray_cluster")
def test_there_are_never_more_workers_of_ray_than_cores(tmp_path):
    assembly = Assembly(tiny_system(), image_dataset(96))
    with open_backend("ray", assembly.trainer(tmp_path), assembly.initial_state(), workers=50) as backend:
        assert len(backend.actors) == 2


@pytest.mark.parametrize(
    ("setting", "stays"),
    [
        ("training.optimiser.momentum_between_rounds=reset", False),
        ("training.optimiser.momentum_between_rounds=keep", True),
        ("federation.compression=fp16", False),
        ("federation.compression=int8", True),
        ("federation.compression=top-k", True),
    ],
)
@pytest.mark.usefixtures("ray_cluster")
def test_a_node_that_keeps_something_stays_with_one_worker_of_ray(setting, stays, tmp_path):
    assembly = Assembly(tiny_system(setting), image_dataset(96))
    with open_backend("ray", assembly.trainer(tmp_path / "nodes"), assembly.initial_state(), workers=2) as backend:
        assert (backend.actor_for("device-0", [1, 0]) == backend.actor_for("device-0", [0, 1])) is stays


def test_more_updates_than_slots_come_in_order(monkeypatch, tmp_path):
    monkeypatch.setattr("exitflow.federated.places.processes.SPARE_SLOTS", 1)
    assembly = Assembly(tiny_system(), image_dataset(96))
    state = assembly.initial_state()
    tasks = [
        task
        for round in range(4)
        for task in sample_tasks(list(assembly.samples), assembly.profile.probabilities, round=round, seed=0)
    ]
    with open_backend("processes", assembly.trainer(tmp_path), state, workers=2) as backend:
        assert [update.task for update in backend.run(state, tasks)] == tasks


def test_the_deepest_task_is_begun_first(tmp_path, monkeypatch):
    assembly = Assembly(tiny_system(), image_dataset(96))
    state = assembly.initial_state()
    tasks = sample_tasks(list(assembly.samples), assembly.profile.probabilities, round=1, seed=0)
    begun = []
    send = WorkerProcess.send
    monkeypatch.setattr(
        WorkerProcess, "send", lambda self, message: (begun.append(message["task"]["node"]), send(self, message))
    )
    with open_backend("processes", assembly.trainer(tmp_path), state, workers=2) as backend:
        assert [update.task for update in backend.run(state, tasks)] == tasks
    assert begun == ["cloud-0", "edge-0", "edge-1", "device-0", "device-1", "device-2", "device-3"]


def test_a_worker_that_dies_is_reported_with_what_it_was_doing(tmp_path):
    assembly = Assembly(tiny_system(), image_dataset(96))
    state = assembly.initial_state()
    tasks = sample_tasks(list(assembly.samples), assembly.profile.probabilities, round=1, seed=0)
    with open_backend("processes", assembly.trainer(tmp_path), state, workers=1) as backend:
        updates = backend.run(state, tasks)
        next(updates)
        os.kill(backend.workers[0].process.pid, signal.SIGKILL)
        with pytest.raises(TrainingError, match=r"a worker process died at round 1, node .* \(exit code -9\)"):
            list(updates)


def without_a_second_file():
    """As `shutil` leaves it where a disk is full: it prints as `'momentum' -> None`."""
    error = OSError(28, "No space left on device", "momentum")
    error.filename2 = None
    return error


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (RuntimeError("no luck"), "RuntimeError: no luck$"),
        (without_a_second_file(), "OSError: momentum: No space left on device$"),
    ],
)
def test_an_error_in_a_worker_is_reported_with_what_it_was_doing(tmp_path, monkeypatch, error, sentence):
    def fail(self, state, task):
        raise error

    monkeypatch.setattr(LocalTrainer, "train", fail)
    assembly = Assembly(tiny_system(), image_dataset(96))
    state = assembly.initial_state()
    tasks = sample_tasks(list(assembly.samples), assembly.profile.probabilities, round=1, seed=0)
    with (
        open_backend("processes", assembly.trainer(tmp_path), state, workers=1) as backend,
        pytest.raises(TrainingError, match=f"node 'cloud-0', exit 3: {sentence}"),
    ):
        list(backend.run(state, tasks))


def test_closing_a_backend_leaves_no_process_and_the_threads_as_they_were(tmp_path):
    assembly = Assembly(tiny_system(), image_dataset(96))
    torch.set_num_threads(2)
    try:
        with open_backend("processes", assembly.trainer(tmp_path), assembly.initial_state(), workers=2) as backend:
            processes = [worker.process for worker in backend.workers]
            assert torch.get_num_threads() == 1
            assert all(process.is_alive() for process in processes)
        assert not any(process.is_alive() for process in processes)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_there_are_never_more_workers_than_nodes(tmp_path):
    assembly = Assembly(tiny_system(), image_dataset(96))
    with open_backend("processes", assembly.trainer(tmp_path), assembly.initial_state(), workers=50) as backend:
        assert len(backend.workers) == 7
