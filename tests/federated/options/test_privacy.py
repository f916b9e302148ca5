import math
import stat
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import optimize, stats

from exitflow.errors import ConfigError, RunError
from exitflow.federated.options.federation_spec import FederationSpec
from exitflow.federated.options.privacy import Privacy, PrivacyLoss, changes, run_secret
from exitflow.federated.plan import TrainingPlan
from exitflow.federated.types import Update
from exitflow.runs.runs import Run
from exitflow.runs.training import resume, train
from tests.small import image_dataset, task_of, tiny_system

TASK = task_of(1, "n", 1, 1.0, 0)


def update(delta, buffers=()):
    return Update(TASK, {"w": torch.tensor(delta)}, {"v": torch.tensor(list(buffers))}, 1, 1, (0.0,))


def test_long_updates_are_shortened_and_short_ones_left_alone():
    privacy = Privacy(5.0, 1.0, secret=b"")
    assert privacy.clipped(update([3.0, 4.0])).delta["w"].tolist() == [3.0, 4.0]
    clipped = privacy.clipped(update([6.0, 0.0], [8.0]))
    assert clipped.delta["w"].tolist() == [3.0, 0.0]
    assert clipped.buffers["v"].tolist() == [4.0]


def test_buffers_count_as_what_was_changed_in_them():
    assert changes(update([0.0], [5.0]), {"v": torch.tensor([3.0])}).buffers["v"].tolist() == [2.0]


def test_noise_is_gaussian_with_the_deviation_that_the_accountant_assumes():
    privacy = Privacy(clip_norm=2.0, noise_multiplier=1.5, secret=b"7")
    sums = {"a": torch.zeros(40_000), "b": torch.zeros(40_000)}
    privacy.add_noise(sums, largest_weight=0.5, round=1)
    for values in sums.values():
        assert float(values.std()) == pytest.approx(1.5, rel=0.03)
        assert stats.kstest(values.numpy() / 1.5, "norm").pvalue > 1e-3
    assert abs(float(torch.corrcoef(torch.stack(list(sums.values())))[0, 1])) < 0.03


def test_noise_is_another_in_every_round_and_run_and_the_same_when_a_round_is_repeated():
    def noise(secret, round):
        sums = {"a": torch.zeros(5)}
        Privacy(1.0, 1.0, secret).add_noise(sums, 1.0, round)
        return sums["a"].tolist()

    assert noise(b"a", 1) == noise(b"a", 1)
    assert noise(b"a", 1) != noise(b"a", 2)
    assert noise(b"a", 1) != noise(b"b", 1)


def test_every_bit_of_the_secret_counts():
    """PyTorch's own generator takes 32, which can be tried out."""

    def noise(secret):
        sums = {"a": torch.zeros(3)}
        Privacy(1.0, 1.0, secret).add_noise(sums, 1.0, 1)
        return tuple(sums["a"].tolist())

    secrets = [bytes(32), *((1 << bit).to_bytes(32, "big") for bit in range(256))]
    assert len({noise(secret) for secret in secrets}) == 257


def exact_gaussian_epsilon(noise_multiplier, num_rounds, delta):
    """Balle and Wang (2018), Theorem 8: a composition of Gaussians is one with sensitivity sqrt(rounds)."""
    mean = math.sqrt(num_rounds) / noise_multiplier

    def excess(epsilon):
        upper = stats.norm.cdf(mean / 2 - epsilon / mean) - math.exp(epsilon) * stats.norm.cdf(
            -mean / 2 - epsilon / mean
        )
        return upper - delta

    return optimize.brentq(excess, 0, 500)


@pytest.mark.parametrize(("noise_multiplier", "rounds"), [(1.0, 1), (4.0, 10), (8.0, 100)])
def test_epsilon_is_never_less_than_the_exact_one_and_near_to_it(noise_multiplier, rounds):
    spec = FederationSpec(clip_norm=1.0, noise_multiplier=noise_multiplier)
    found = PrivacyLoss.after(spec, rounds, rounds, 1.0).epsilon
    exact = exact_gaussian_epsilon(noise_multiplier, rounds, spec.delta)
    assert exact <= found <= 1.25 * exact


def test_secret_sampling_helps_and_costs_grow_with_rounds():
    spec = FederationSpec(clip_norm=1.0, noise_multiplier=2.0)
    few, many = (PrivacyLoss.after(spec, rounds // 10, rounds, 0.1) for rounds in (10, 100))
    assert many.epsilon_secret_sampling < many.epsilon
    assert few.epsilon < many.epsilon


def test_the_secret_of_a_run_is_drawn_once_and_readable_for_its_owner_only(tmp_path):
    first = run_secret(tmp_path / "secret")
    assert run_secret(tmp_path / "secret") == first
    assert run_secret(tmp_path / "other") != first
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600
    assert len(first) == 32


@pytest.mark.parametrize("left", [b"", b"cut off"])
def test_a_secret_that_is_damaged_is_one_sentence(tmp_path, left):
    (tmp_path / "secret").write_bytes(left)
    with pytest.raises(RunError, match=r"secret: is damaged, and without it a round could not be repeated"):
        run_secret(tmp_path / "secret")


def test_noise_without_a_bound_is_refused():
    with pytest.raises(ConfigError, match="noise_multiplier: needs clip_norm"):
        FederationSpec(noise_multiplier=1.0)


def test_a_private_training_reports_its_loss_and_resumes_to_the_same_bits(tmp_path, monkeypatch):
    settings = ("federation.clip_norm=0.5", "federation.noise_multiplier=2.0", "training.participation=0.5")
    system = tiny_system(*settings, "training.rounds=3")
    data = image_dataset(96)
    whole = train(system, tmp_path / "whole", dataset=data)
    losses = [record.privacy["epsilon"] for record in whole.records]
    assert losses == sorted(losses)
    assert losses[-1] > 0
    assert all(np.isfinite(tensor.numpy()).all() for tensor in whole.state().tensors.values())

    from exitflow.runs.runs import Run

    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "noise.secret").write_bytes((tmp_path / "whole" / "noise.secret").read_bytes())
    (tmp_path / "cut" / "spec.toml").write_text(system.to_toml())
    saved = []

    def stop_after_two(self, state):
        original(self, state)
        saved.append(state.round)
        if len(saved) == 2:
            raise KeyboardInterrupt

    original = Run.save_checkpoint
    monkeypatch.setattr(Run, "save_checkpoint", stop_after_two)
    with pytest.raises(KeyboardInterrupt):
        resume(tmp_path / "cut", dataset=data)
    monkeypatch.undo()
    again = resume(tmp_path / "cut", dataset=data)
    assert all(torch.equal(again.state().tensors[name], tensor) for name, tensor in whole.state().tensors.items())
    assert again.records[-1].privacy == whole.records[-1].privacy


@pytest.mark.parametrize("local_exits", ["one", "all", "each-step"])
def test_the_loss_counts_the_rounds_in_which_a_node_was_asked(local_exits, tmp_path, monkeypatch):
    counted = []
    monkeypatch.setattr(PrivacyLoss, "after", lambda spec, most, *rest: counted.append(most))
    settings = ("federation.clip_norm=0.5", "federation.noise_multiplier=2.0", "training.participation=0.3")
    system = tiny_system(*settings, f"training.local_exits={local_exits}", "training.rounds=4")
    asked = Counter()
    draw, append = TrainingPlan.tasks, Run.append

    def drawn(self, round, exit_weights):
        tasks = draw(self, round, exit_weights)
        asked.update(task.node for task in tasks)
        return tasks

    def appended(self, record):
        assert counted[-1] == max(asked.values(), default=0)
        append(self, record)

    monkeypatch.setattr(TrainingPlan, "tasks", drawn)
    monkeypatch.setattr(Run, "append", appended)
    train(system, tmp_path / "run", dataset=image_dataset(96))
    assert len(counted) == 4


@pytest.mark.parametrize(
    "drawn", ["help_probability=0.2", "local_exits=all", "local_exits=each-step"], ids=["one", "all", "each-step"]
)
def test_one_node_moves_the_private_sum_by_no_more_than_the_bound(drawn, tmp_path):
    """Sensitivity, as the accountant assumes it: with and without a node, before the noise."""
    from exitflow.federated.aggregation import aggregate
    from exitflow.federated.options.privacy import largest_weight
    from exitflow.federated.places.serial import SerialBackend
    from exitflow.federated.plan import TrainingPlan
    from exitflow.federated.weighting import WEIGHTINGS
    from exitflow.system.assembly import Assembly

    system = tiny_system("training.learning_rate=5.0", "training.server_step=paper", f"training.{drawn}")
    assembly = Assembly(system, image_dataset(96))
    privacy = Privacy(0.1, 0.0, secret=b"1")
    weighting, coverage = WEIGHTINGS["equal-weight"], assembly.model.coverage
    plan = TrainingPlan(list(assembly.samples), assembly.profile, weighting, coverage, system.training)
    state = assembly.initial_state()
    backend = SerialBackend(assembly.trainer(tmp_path / "nodes"))
    weights = plan.weighting(plan.profile, 1)
    bound = largest_weight(plan, weights) * privacy.clip_norm
    moved = []

    def look(sums):
        moved.append(float(torch.cat([value.flatten() for value in sums.values()]).norm()))

    rule = replace(plan.rule(weights), noise=look)
    for round in (1, 2, 3):
        for task in plan.tasks(round, weights):
            aggregate(state, privacy.private(backend.run(state, [task]), state.buffers, coverage), rule)
    assert max(moved) <= bound * 1.0001
    assert max(moved) > bound / 2  # and the bound is not far from what happens
