"""One round of ours beside one round of Flower's own simulation engine: same model, tensors, steps, machine.

Both train the paper's seven nodes, p = 0, on the same data, and aggregate with the same function. Flower's clients
hold model and data from round to round, as ours do; its server asks for answers as its strategies do. Two kinds of
clients: with plain PyTorch, as Flower's own quick start shows, and with our trainer and the covered tensors packed into
one array, which leaves the simulation engine as the only difference. Rounds alternate.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.common import cifar_like, ratio_line, rounds_of
from exitflow.data.dataset import Dataset
from exitflow.data.sources import load_dataset
from exitflow.federated.aggregation import Aggregation, aggregate
from exitflow.federated.types import ServerState, Task, Update
from exitflow.system.assembly import Assembly
from exitflow.system.system import System, load_system
from exitflow.tensors import Layout, take
from paper.tables import TABLES, distinct_trainings

_QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}


def digits() -> None:
    """The demo's tiny model."""
    _compare("digits", goal=2.0, num_rounds=20)


def resnet() -> None:
    """The network of the small-scale experiments."""
    _compare("resnet", goal=1.3, num_rounds=6)


@functools.cache
def _system(kind: str) -> System:
    if kind == "digits":
        return load_system("paper-7:80-15-5", ["training.weighting=serving-rate", "training.local_steps=5"])
    jobs = distinct_trainings([TABLES["table1"]], [9], "small", ["cifar10"])
    small = next(job.system for job in jobs if "serving-rate_80-15-5" in job.name)
    optimiser = replace(small.training.optimiser, momentum_between_rounds="reset")  # clients keep none
    return replace(small, training=replace(small.training, optimiser=optimiser))


@functools.cache
def _dataset(kind: str) -> Dataset:
    return load_dataset("digits") if kind == "digits" else cifar_like(7000)


@functools.cache
def _assembly(kind: str) -> Assembly:
    torch.set_num_threads(1)
    return Assembly(_system(kind), _dataset(kind))


@functools.cache
def _initial(kind: str) -> ServerState:
    return _assembly(kind).initial_state()


@functools.cache
def _trainer(kind: str) -> Any:
    from pathlib import Path

    return _assembly(kind).trainer(Path("unused"))


@functools.cache
def _network(kind: str, exit: int) -> nn.Module:
    return _assembly(kind).model.submodel(exit).train()


def _pack(tensors: dict[str, Tensor]) -> Any:
    layout = Layout.of(tensors)
    flat = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    for name, view in layout.views(flat).items():
        view.copy_(tensors[name])
    return flat.numpy()


def _unpack(flat: Any, like: dict[str, Tensor]) -> dict[str, Tensor]:
    return Layout.of(like).views(torch.from_numpy(np.array(flat)))


def _covered(kind: str, state: ServerState, task: Task) -> dict[str, Tensor]:
    return take(state.tensors, _assembly(kind).model.coverage(*task.exits))


def _trained_plainly(kind: str, tensors: dict[str, Tensor], task: Task) -> tuple[dict[str, Tensor], int]:
    """What anybody would write: (the model's new state, samples)."""
    spec, trainer = _system(kind).training, _trainer(kind)
    network = _network(kind, task.deepest)
    network.load_state_dict(tensors, strict=False)  # PyTorch adds counters that our norms do without
    rate = trainer.schedule(task.round, 0)
    momentum, decay = spec.optimiser.momentum, spec.optimiser.weight_decay
    optimizer = torch.optim.SGD(network.parameters(), rate, momentum=momentum, weight_decay=decay)
    num_samples = len(trainer.data.indices[task.node])
    batches = trainer.data.batches(task.node, min(spec.batch_size, num_samples), seed=task.seed)
    for _ in range(trainer.num_steps):
        batch = next(batches)
        optimizer.zero_grad()
        F.cross_entropy(network(trainer.data.preparation(batch.inputs))[0], batch.labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return network.state_dict(), num_samples


def _client_app(kind: str) -> Any:
    from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        config: Any = message.content["task"]
        task = Task(config["round"], config["node"], (config["exit"],), (1.0,), 1.0, config["seed"])
        model: Any = message.content["model"]
        if config["plain"]:
            tensors, num_samples = _trained_plainly(kind, model.to_torch_state_dict(), task)
            arrays, num_steps = ArrayRecord(tensors), _trainer(kind).num_steps
        else:
            initial = _initial(kind)
            tensors = _unpack(model["packed"].numpy(), _covered(kind, initial, task))
            params = {name: value for name, value in tensors.items() if name in initial.params}
            buffers = {name: value for name, value in tensors.items() if name in initial.buffers}
            update = _trainer(kind).train(ServerState(task.round - 1, params, buffers), task)
            arrays = ArrayRecord({"packed": Array(_pack({**update.delta, **update.buffers}))})
            num_samples, num_steps = update.num_samples, update.num_steps
        figures = ConfigRecord({"node": task.node, "num_samples": num_samples, "num_steps": num_steps})
        return Message(RecordDict({"update": arrays, "figures": figures}), reply_to=message)

    return app


def _compare(kind: str, goal: float, num_rounds: int) -> None:
    os.environ.update(_QUIET)
    from flwr.serverapp import Grid, ServerApp
    from flwr.simulation import run_simulation

    times: dict[str, list[float]] = {"plain PyTorch": [], "our trainer": [], "ours": []}
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Any) -> None:
        with rounds_of(_system(kind), _dataset(kind), "processes") as ours:
            plain, packed = _flower_rounds(kind, grid, plain=True), _flower_rounds(kind, grid, plain=False)
            for number in range(num_rounds + 1):
                for name, rounds in zip(times, (plain, packed, ours), strict=True):
                    started = time.perf_counter()
                    next(rounds)
                    if number:  # the first round warms up
                        times[name].append(time.perf_counter() - started)

    run_simulation(
        server_app=app,
        client_app=_client_app(kind),
        num_supernodes=len(_system(kind).topology.nodes),
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
    ours = times.pop("ours")
    for name, flower in times.items():
        print(f"seconds a round at best: Flower's simulation, {name} {min(flower):.3f}, ours {min(ours):.3f}")
        ratios = [theirs / own for theirs, own in zip(flower, ours, strict=True)]
        print(ratio_line(f"Flower's round over ours, {kind}, {name} in its clients", ratios, goal))


def _flower_rounds(kind: str, grid: Any, *, plain: bool) -> Iterator[ServerState]:
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

    assembly = _assembly(kind)
    state, profile, nodes = assembly.initial_state(), assembly.profile, assembly.system.topology.nodes
    while len(node_ids := list(grid.get_node_ids())) < len(nodes):
        time.sleep(0.01)
    while True:
        tasks = [Task(state.round + 1, node.name, (node.exit,), (1.0,), 1.0, 7) for node in nodes]
        messages = []
        for node_id, task in zip(node_ids, tasks, strict=True):
            covered = _covered(kind, state, task)
            config: Any = {
                "round": task.round,
                "node": task.node,
                "exit": task.deepest,
                "seed": task.seed,
                "plain": plain,
            }
            content = RecordDict(
                {
                    "model": ArrayRecord(covered if plain else {"packed": Array(_pack(covered))}),
                    "task": ConfigRecord(config),
                }
            )
            messages.append(Message(content, dst_node_id=node_id, message_type="train"))
        by_node = {task.node: task for task in tasks}
        updates = [_update(kind, state, by_node, reply) for reply in grid.send_and_receive(messages)]
        weights = profile.serve_share
        state = aggregate(state, updates, Aggregation(weights, profile.exit_samples, assembly.model.coverage))
        yield state


def _update(kind: str, state: ServerState, tasks: dict[str, Task], reply: Any) -> Update:
    if reply.has_error():
        raise RuntimeError(f"a client failed: {reply.error}")
    figures, arrays = reply.content["figures"], reply.content["update"]
    task = tasks[figures["node"]]
    before = _covered(kind, state, task)
    if "packed" in arrays:
        tensors = _unpack(arrays["packed"].numpy(), before)
        delta = {name: value for name, value in tensors.items() if name in state.params}
    else:
        tensors = arrays.to_torch_state_dict()
        delta = {name: value - before[name] for name, value in tensors.items() if name in state.params}
    buffers = {name: value for name, value in tensors.items() if name in state.buffers}
    return Update(task, delta, buffers, figures["num_samples"], figures["num_steps"], (0.0,))
