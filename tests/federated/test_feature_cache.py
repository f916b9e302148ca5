"""Features of a frozen trunk are computed once, and training on them is training on the trunk."""

import shutil
from collections import namedtuple
from dataclasses import replace

import pytest
import torch

from exitflow.federated.feature_cache import FeatureCache
from exitflow.models.backbones import TimmNetwork
from exitflow.runs.training import train
from exitflow.system.assembly import Assembly
from tests.small import image_dataset, tiny_system

pytestmark = pytest.mark.heavy

DATA = image_dataset(96)
NETWORK = TimmNetwork(name="test_efficientnet", image_size=32, exit_blocks=(2, 4, 5))


def system(tuned):
    made = tiny_system("training.rounds=2", "training.local_steps=3", f"training.tune={tuned}")
    return replace(made, model=NETWORK, data=replace(made.data, augment=False))


def trainer(tmp_path, tuned="heads"):
    assembly = Assembly(system(tuned), DATA)
    return assembly, assembly.trainer(tmp_path / "nodes")


def updates(assembly, trainer):
    state = assembly.initial_state()
    return [trainer.train(state, task) for task in tasks(assembly)]


def tasks(assembly):
    from exitflow.federated.types import Task

    return [
        Task(1, node.name, tuple(range(1, node.exit + 1)), (1.0,) * node.exit, 1.0, seed)
        for seed, node in enumerate(assembly.system.topology.nodes)
    ]


def assert_same_updates(one, other):
    for first, second in zip(one, other, strict=True):
        for name in first.delta:
            scale = float(second.delta[name].abs().max())
            torch.testing.assert_close(first.delta[name], second.delta[name], rtol=0, atol=0.02 * scale + 1e-6)


@pytest.mark.parametrize("tuned", ["heads", "from:5", "from:3"])
def test_training_on_kept_features_is_training_on_the_trunk(tmp_path, tuned):
    """From block 3 on, one stage is frozen; from block 5 on, one and a half, and one of them is kept."""
    assembly, cached = trainer(tmp_path, tuned)
    assert cached.cache is not None
    assert_same_updates(updates(assembly, cached), updates(assembly, replace(cached, cache=None)))


def test_nothing_is_computed_twice(tmp_path, monkeypatch):
    assembly, first = trainer(tmp_path)
    before = updates(assembly, first)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.npy")}
    assert len(files) == sum(node.exit for node in assembly.system.topology.nodes)
    monkeypatch.setattr(FeatureCache, "_compute", None)
    assembly, second = trainer(tmp_path)
    after = updates(assembly, second)
    for one, other in zip(before, after, strict=True):
        assert all(torch.equal(one.delta[name], other.delta[name]) for name in one.delta)
    assert files == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.npy")}


@pytest.mark.parametrize("what", ["data", "weights", "preparation"])
def test_what_has_changed_is_computed_anew_and_the_old_is_removed(tmp_path, what):
    assembly, first = trainer(tmp_path)
    updates(assembly, first)
    files = {path.name for path in tmp_path.rglob("*.npy")}
    assembly, second = trainer(tmp_path)
    if what == "data":
        train = replace(second.data.train, inputs=second.data.train.inputs.flip(0))
        second = replace(second, data=replace(second.data, train=train))
    if what == "weights":
        with torch.no_grad():
            next(second.model.stages.parameters()).mul_(2)
    if what == "preparation":
        second.cache._preparation = replace(second.cache._preparation, size=16)
        second = replace(second, data=replace(second.data, preparation=second.cache._preparation))
    updates(assembly, second)
    new = {path.name for path in tmp_path.rglob("*.npy")}
    assert len(new) == len(files)
    assert not new & files


def test_without_room_features_are_computed_in_every_step(tmp_path, monkeypatch):
    assembly, kept = trainer(tmp_path / "kept")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("Usage", "free")(10))
    assembly, computed = trainer(tmp_path / "computed")
    assert_same_updates(updates(assembly, kept), updates(assembly, computed))
    assert not list(tmp_path.rglob("*.npy"))


def test_a_finished_run_keeps_no_features_and_all_backends_give_its_bits(tmp_path):
    one = train(system("heads"), tmp_path / "one", dataset=DATA)
    two = train(system("heads"), tmp_path / "two", dataset=DATA, backend="processes", workers=2)
    assert not list(tmp_path.rglob("*.npy"))
    assert all(torch.equal(one.state().tensors[name], tensor) for name, tensor in two.state().tensors.items())


def test_data_that_are_augmented_are_not_kept_unless_only_heads_are_trained(tmp_path):
    flipping = replace(DATA, preparation=replace(DATA.preparation, flip=True))
    augmented = [
        Assembly(replace(system(tuned), data=replace(system(tuned).data, augment=True)), flipping).trainer(
            tmp_path / "n"
        )
        for tuned in ("from:5", "heads")
    ]
    assert [(each.cache is None, each.data.augment) for each in augmented] == [(True, True), (False, False)]
