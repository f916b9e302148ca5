import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from exitflow.federated.local import NodeData
from exitflow.federated.node_state import NodeStates
from exitflow.federated.options.compression import Compression
from exitflow.federated.options.federation_spec import FederationSpec
from exitflow.federated.training_spec import TrainingSpec
from exitflow.federated.types import ServerState, Task
from exitflow.models.build import build_model
from exitflow.models.layout import best_layout
from exitflow.models.specs import EarlyExitResNet
from tests.small import NestedLinear, gaussian_split, image_dataset, initial_state, linear_trainer, training


def image_trainer(spec, num_steps, *, dtype=torch.float64, rows=16):
    dataset = image_dataset()
    model_spec = EarlyExitResNet(width=2, blocks=(1, 1, 1), strides=(1, 2, 2), exit_blocks=(1, 2, 3)).resolve(3)
    model = build_model(model_spec, (1, 8, 8), 3, seed=0).to(dtype)
    trainer = linear_trainer(model, dataset.train, {"node": list(range(rows))}, spec, num_steps)
    return model, trainer


@pytest.mark.parametrize("exit", [1, 2, 3])
def test_the_local_gradient_agrees_with_finite_differences(exit):
    """One step without momentum is minus the learning rate times the gradient of the exit's loss."""
    rate, size = 1e-3, 16
    spec = training(learning_rate=rate, momentum=0.0, weight_decay=0.0, batch_size=size)
    model, trainer = image_trainer(spec, 1)
    state = initial_state(model)
    update = trainer.train(state, Task(1, "node", (exit,), (1.0,), 1.0, seed=5))
    batch = next(trainer.data.batches("node", size, seed=5))

    def loss() -> float:
        carry = model.train().advance(trainer.data.preparation(batch.inputs, dtype=torch.float64), 0, exit)
        return float(F.cross_entropy(model.classify(carry, exit), batch.labels).detach())

    rng, step = np.random.default_rng(0), 1e-6
    for name, param in model.named_parameters():
        flat = param.data.view(-1)
        for position in rng.integers(flat.numel(), size=2).tolist():
            kept = float(flat[position])
            losses = []
            for shift in (step, -step):
                flat[position] = kept + shift
                losses.append(loss())
            flat[position] = kept
            slope = (losses[0] - losses[1]) / (2 * step)
            if name in update.delta:
                delta = float(update.delta[name].reshape(-1)[position])
                assert -delta / rate == pytest.approx(slope, rel=1e-5, abs=1e-7), name
            else:
                assert slope == 0.0


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 5e-4])
def test_steps_are_those_of_pytorchs_sgd_to_the_bit(momentum, decay):
    steps, rate = 4, 0.1
    spec = training(learning_rate=rate, momentum=momentum, weight_decay=decay, batch_size=4)
    model, trainer = image_trainer(spec, steps, dtype=torch.float32)
    update = trainer.train(initial_state(model), Task(1, "node", (2,), (1.0,), 1.0, seed=5))
    network = model.submodel(2).train()
    layout = best_layout(network)
    network = network.to(memory_format=layout)
    optimizer = torch.optim.SGD(network.parameters(), lr=rate, momentum=momentum, weight_decay=decay)
    for batch in itertools.islice(trainer.data.batches("node", 4, seed=5), steps):
        optimizer.zero_grad()
        inputs = trainer.data.preparation(batch.inputs, dtype=torch.float32).contiguous(memory_format=layout)
        F.cross_entropy(network(inputs)[0], batch.labels).backward()
        optimizer.step()
    for name, param in network.named_parameters():
        assert torch.equal(update.delta[name], param.detach() - model.get_parameter(name)), name


def literal_sgd(weights, gradient, num_steps, rate, momentum, decay, velocity=None):
    """v <- m v + (g + d w); w <- w - r v, as PyTorch defines it: the first v is the gradient itself."""
    for step in range(num_steps):
        g = gradient(weights, step) + decay * weights
        velocity = g if velocity is None else momentum * velocity + g
        weights = weights - rate * velocity
    return weights, velocity


@pytest.mark.parametrize("between_rounds", ["reset", "keep"])
def test_momentum_is_reset_or_kept_between_rounds(tmp_path, between_rounds):
    split = gaussian_split(12, 4, 2)
    model = NestedLinear((2, 4), 2).double()
    spec = training(learning_rate=0.1, momentum=0.9, weight_decay=0.01, batch_size=3)
    trainer = linear_trainer(model, split, {"node": list(range(12))}, spec, 3)
    if between_rounds == "keep":
        object.__setattr__(trainer, "states", NodeStates(tmp_path))
    state, velocity = initial_state(model), None
    for round in (1, 2):
        task = Task(round, "node", (1,), (1.0,), 1.0, seed=round)
        update = trainer.train(state, task)
        batches = list(itertools.islice(trainer.data.batches("node", 3, seed=round), 3))

        def gradient(flat, step, batches=batches):
            flat = flat.clone().requires_grad_()
            logits = batches[step].inputs[:, :2] @ flat[:4].view(2, 2).T + flat[4:]
            return torch.autograd.grad(F.cross_entropy(logits, batches[step].labels), flat)[0]

        before = torch.cat([state.params["weight"][:, :2].flatten(), state.params["bias"]])
        velocity = velocity if between_rounds == "keep" else None
        after, velocity = literal_sgd(before, gradient, 3, 0.1, 0.9, 0.01, velocity)
        found = torch.cat([update.delta["weight"].flatten(), update.delta["bias"]])
        torch.testing.assert_close(found, after - before, rtol=1e-12, atol=1e-14)
        params = {"weight": state.params["weight"].clone(), "bias": state.params["bias"] + update.delta["bias"]}
        params["weight"][:, :2] += update.delta["weight"]
        state = ServerState(round, params, {})


def test_a_repeated_round_begins_with_the_momentum_it_began_with_before(tmp_path):
    split = gaussian_split(12, 4, 2)
    model = NestedLinear((2, 4), 2).double()
    spec = training(momentum=0.9, weight_decay=5e-4, batch_size=3)
    trainer = linear_trainer(model, split, {"node": list(range(12))}, spec, 2)
    object.__setattr__(trainer, "states", NodeStates(tmp_path))
    state = initial_state(model)
    for round in (1, 2, 3):
        once = trainer.train(state, Task(round, "node", (2,), (1.0,), 1.0, seed=round))
        again = trainer.train(state, Task(round, "node", (2,), (1.0,), 1.0, seed=round))
        assert torch.equal(once.delta["weight"], again.delta["weight"])
    assert len(list(tmp_path.rglob("*.safetensors"))) == 2


def test_what_waits_for_an_exit_outlasts_rounds_without_it(tmp_path):
    """An exit whose loss stops counting is left out, and may come back: its momentum and its residual are there."""
    model, trainer = image_trainer(TrainingSpec(batch_size=8), 1)
    states = {"states": NodeStates(tmp_path / "momentum"), "residuals": NodeStates(tmp_path / "residuals")}
    trainer = replace(trainer, **states, compression=Compression.of(FederationSpec(compression="top-k")))
    only_at_2 = model.coverage(1, 2, 3).keys() - model.coverage(1, 3).keys()
    found = []
    for round, exits in enumerate([(1, 3), (1, 2, 3), (1, 3), (1, 2, 3)], start=1):
        task = Task(round, "node", exits, (1.0,) * len(exits), 1.0, seed=round)
        trainer.train(initial_state(model), task)
        kept = [each.load(replace(task, round=round + 1)) for each in states.values()]
        found.append([{name: tensors[name] for name in only_at_2 if name in tensors} for tensors in kept])
    assert found[0] == [{}, {}]
    for before, between, after in zip(*found[1:], strict=True):
        assert before
        assert all(torch.equal(before[name], between[name]) for name in before)
        assert not any(torch.equal(before[name], after[name]) for name in before)


def test_momentum_that_is_not_finite_is_not_kept(tmp_path):
    split = gaussian_split(12, 4, 2)
    split.inputs[0, 0] = math.nan
    model = NestedLinear((2, 4), 2).double()
    trainer = linear_trainer(model, split, {"node": list(range(12))}, TrainingSpec(batch_size=12), 1)
    object.__setattr__(trainer, "states", NodeStates(tmp_path))
    trainer.train(initial_state(model), Task(1, "node", (2,), (1.0,), 1.0, seed=0))
    assert not list(tmp_path.rglob("*.safetensors"))


def test_an_update_holds_what_the_exit_covers_and_nothing_else():
    model, trainer = image_trainer(TrainingSpec(batch_size=8), 1)
    for exit in (1, 2, 3):
        update = trainer.train(initial_state(model), Task(1, "node", (exit,), (1.0,), 1.0, seed=0))
        assert {*update.delta, *update.buffers} == set(model.coverage(exit))


def test_training_does_not_depend_on_what_was_trained_before():
    model, trainer = image_trainer(TrainingSpec(batch_size=8), 2)
    state, task = initial_state(model), Task(1, "node", (2,), (1.0,), 1.0, seed=0)
    first = trainer.train(state, task)
    trainer.train(state, Task(1, "node", (3,), (1.0,), 1.0, seed=9))
    again = trainer.train(state, task)
    assert all(torch.equal(first.delta[name], again.delta[name]) for name in first.delta)
    assert all(torch.equal(first.buffers[name], again.buffers[name]) for name in first.buffers)


def test_batches_pass_over_all_samples_before_one_comes_again():
    dataset = image_dataset(20)
    labels = torch.arange(20)
    data = NodeData(type(dataset.train)(dataset.train.inputs, labels), {"node": labels[:10]}, dataset.preparation)
    batches = list(itertools.islice(data.batches("node", 3, seed=1), 6))
    for passing in (batches[:3], batches[3:]):
        seen = torch.cat([batch.labels for batch in passing]).tolist()
        assert len(set(seen)) == 9
        assert set(seen) <= set(range(10))


def literal_gradients(model, exit, trainer, size, count, seed):
    """Steps 1 and 2 of the paper's appendix, keeping every gradient: (count, weights), and the losses."""
    params = dict(model.named_parameters())
    covered = [name for name in model.coverage(exit) if name in params]
    gradients, losses = [], []
    for batch in itertools.islice(trainer.data.batches("node", size, seed=seed), count):
        model.train()
        inputs = trainer.data.preparation(batch.inputs, dtype=torch.float64)
        loss = F.cross_entropy(model.classify(model.advance(inputs, 0, exit), exit), batch.labels)
        grads = torch.autograd.grad(loss, [params[name] for name in covered])
        gradients.append(torch.cat([grad.flatten() for grad in grads]))
        losses.append(float(loss.detach()))
    return torch.stack(gradients), losses


@pytest.mark.parametrize("exit", [1, 2, 3])
def test_gradient_variance_is_that_of_the_papers_appendix(exit):
    from exitflow.seeds import derive

    spec = TrainingSpec(batch_size=8, seed=4)
    model, trainer = image_trainer(spec, 1, rows=40)
    state = initial_state(model)
    found = trainer.measure_gradients(state, "node", exit)
    gradients, losses = literal_gradients(model, exit, trainer, 8, 5, derive(4, "variance", "node", exit))
    assert found.mean_variance == pytest.approx(float(gradients.var(dim=0).mean()), rel=1e-9)
    assert found.variance == pytest.approx(float(gradients.var(dim=0).sum()), rel=1e-9)
    squared_length = float(gradients.square().sum(dim=1).mean())
    assert found.second_moment == pytest.approx(max(squared_length, found.variance), rel=1e-9)
    assert found.loss == pytest.approx(np.mean(losses), rel=1e-9)


def test_gradient_variance_of_small_nodes_is_scaled_to_the_batch_size():
    """The gradient of a linear model is a mean over the batch, so its variance is that of one sample over the size."""
    split = gaussian_split(4000, 4, 2)
    model = NestedLinear((2, 4), 2).double()
    held = {f"small-{i}": list(range(10 * i, 10 * i + 10)) for i in range(400)}
    trainer = linear_trainer(model, split, held, TrainingSpec(batch_size=50), 1)
    state = initial_state(model)
    figures = [trainer.measure_gradients(state, node, 2) for node in held]
    error = 0.5 - F.one_hot(split.labels, 2)  # all weights are 0, so every class has probability 1/2
    by_weight = error.unsqueeze(2) * split.inputs.unsqueeze(1)
    each = torch.cat([by_weight.flatten(1), error], dim=1)
    variance = each.var(dim=0) / 50
    assert np.mean([each.mean_variance for each in figures]) == pytest.approx(float(variance.mean()), rel=0.1)
    assert np.mean([each.variance for each in figures]) == pytest.approx(float(variance.sum()), rel=0.1)


def test_the_second_moment_of_a_small_node_is_its_scaled_variance_and_the_unscaled_signal():
    """Ten samples are two batches of five; the mean of two gradients holds half of their variance besides the signal."""
    from exitflow.seeds import derive

    model, trainer = image_trainer(TrainingSpec(batch_size=50, seed=4), 1, rows=10)
    trainer.data.train.labels[:] = 1  # gradients that point one way: a signal well above the noise
    found = trainer.measure_gradients(initial_state(model), "node", 1)
    gradients, _ = literal_gradients(model, 1, trainer, 5, 2, derive(4, "variance", "node", 1))
    variance = float(gradients.var(dim=0).sum())
    signal = float(gradients.mean(dim=0).square().sum()) - variance / 2
    assert signal > 0
    assert found.second_moment == pytest.approx(variance * 5 / 50 + signal, rel=1e-9)


def test_a_single_sample_has_no_gradient_variance():
    model = NestedLinear((2, 4), 2).double()
    trainer = linear_trainer(model, gaussian_split(4, 4, 2), {"node": [0]}, TrainingSpec(), 1)
    found = trainer.measure_gradients(initial_state(model), "node", 1)
    assert all(math.isnan(getattr(found, name)) for name in ("mean_variance", "variance", "second_moment", "loss"))


def test_in_bfloat16_a_node_takes_nearly_the_same_steps_and_the_same_ones_again():
    update, again, exact = (
        image_trainer(training(momentum=0.9, batch_size=8, precision=precision), 3, dtype=torch.float32)[1].train(
            initial_state(image_trainer(training(batch_size=8), 3, dtype=torch.float32)[0]),
            Task(1, "node", (2,), (1.0,), 1.0, seed=5),
        )
        for precision in ("bfloat16", "bfloat16", "float32")
    )
    for name, delta in update.delta.items():
        assert delta.dtype == torch.float32
        assert torch.equal(delta, again.delta[name])
    found, expected = (torch.cat([delta.flatten() for delta in each.delta.values()]) for each in (update, exact))
    assert not torch.equal(found, expected)
    assert float((found - expected).norm() / expected.norm()) < 0.1
