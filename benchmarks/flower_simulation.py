"""One round of ours beside one round of Flower's own simulation engine: same model, tensors, steps, machine.

Both train the paper's seven nodes, p = 0, and aggregate with the same function. Flower's clients hold model and data
from round to round, as ours do, and get the covered tensors packed into one array; its server asks for answers as its
strategies do. Rounds alternate.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.common import cifar_like, ratio_line, rounds_of
from exitflow.data.dataset import Dataset
from exitflow.data.sources import load_dataset
from exitflow.experiments.assembly import Assembly
from exitflow.experiments.system import System, load_system
from exitflow.federated.aggregation import Aggregation, aggregate
from exitflow.federated.types import ServerState, Task, Update
from exitflow.tensors import Layout, take

_QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}


def digits() -> None:
    """The demo's tiny model."""
    _compare("digits", goal=2.0, num_rounds=20)


def resnet() -> None:
    """The network of the small-scale experiments."""
    _compare("resnet", goal=1.3, num_rounds=6)


@functools.cache
def _system(kind: str) -> System:
    one_exit = "training.weighting=serving-rate"
    if kind == "digits":
        return load_system("paper-7:80-15-5", [one_exit, "training.local_steps=5"])
    small = ["model.width=8", "model.stem_stride=2", "model.strides=[1,2,2,1]", "data.augment=false"]
    steps = ["training.batch_size=64", "training.local_steps=10"]
    return load_system("paper-7-cifar10:80-15-5", [one_exit, *small, *steps])


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


def _pack(tensors: dict[str, torch.Tensor]) -> Any:
    layout = Layout.of(tensors)
    flat = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    for name, view in layout.views(flat).items():
        view.copy_(tensors[name])
    return flat.numpy()


def _unpack(flat: Any, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return Layout.of(like).views(torch.from_numpy(np.array(flat)))


def _covered(kind: str, state: ServerState, task: Task) -> dict[str, torch.Tensor]:
    return take(state.tensors, _assembly(kind).model.coverage(*task.exits))


def _client_app(kind: str) -> Any:
    from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        config: Any = message.content["task"]
        task = Task(config["round"], config["node"], (config["exit"],), (1.0,), 1.0, config["seed"])
        model: Any = message.content["model"]
        initial = _initial(kind)
        tensors = _unpack(model["packed"].numpy(), _covered(kind, initial, task))
        params = {name: value for name, value in tensors.items() if name in initial.params}
        buffers = {name: value for name, value in tensors.items() if name in initial.buffers}
        update = _trainer(kind).train(ServerState(task.round - 1, params, buffers), task)
        packed = Array(_pack({**update.delta, **update.buffers}))
        figures = ConfigRecord({"node": task.node, "num_samples": update.num_samples, "num_steps": update.num_steps})
        return Message(RecordDict({"update": ArrayRecord({"packed": packed}), "figures": figures}), reply_to=message)

    return app


def _compare(kind: str, goal: float, num_rounds: int) -> None:
    os.environ.update(_QUIET)
    from flwr.serverapp import Grid, ServerApp
    from flwr.simulation import run_simulation

    times: dict[str, list[float]] = {"flower": [], "ours": []}
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Any) -> None:
        with rounds_of(_system(kind), _dataset(kind), "processes") as ours:
            flower = _flower_rounds(kind, grid)
            for number in range(num_rounds + 1):
                for name, rounds in (("flower", flower), ("ours", ours)):
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
    ratios = [flower / ours for flower, ours in zip(times["flower"], times["ours"], strict=True)]
    print(f"seconds a round at best: Flower's simulation {min(times['flower']):.3f}, ours {min(times['ours']):.3f}")
    print(ratio_line(f"Flower's round over ours, {kind}", ratios, goal))


def _flower_rounds(kind: str, grid: Any) -> Iterator[ServerState]:
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

    assembly = _assembly(kind)
    state, profile, nodes = assembly.initial_state(), assembly.profile, assembly.system.topology.nodes
    while len(node_ids := list(grid.get_node_ids())) < len(nodes):
        time.sleep(0.01)
    while True:
        tasks = [Task(state.round + 1, node.name, (node.exit,), (1.0,), 1.0, 7) for node in nodes]
        messages = [
            Message(
                RecordDict(
                    {
                        "model": ArrayRecord({"packed": Array(_pack(_covered(kind, state, task)))}),
                        "task": ConfigRecord(
                            {"round": task.round, "node": task.node, "exit": task.deepest, "seed": task.seed}
                        ),
                    }
                ),
                dst_node_id=node_id,
                message_type="train",
            )
            for node_id, task in zip(node_ids, tasks, strict=True)
        ]
        by_node = {task.node: task for task in tasks}
        updates = [_update(kind, state, by_node, reply) for reply in grid.send_and_receive(messages)]
        weights = profile.serve_share
        state = aggregate(state, updates, Aggregation(weights, profile.exit_samples, assembly.model.coverage))
        yield state


def _update(kind: str, state: ServerState, tasks: dict[str, Task], reply: Any) -> Update:
    if reply.has_error():
        raise RuntimeError(f"a client failed: {reply.error}")
    task = tasks[reply.content["figures"]["node"]]
    tensors = _unpack(reply.content["update"]["packed"].numpy(), _covered(kind, state, task))
    figures = reply.content["figures"]
    delta = {name: value for name, value in tensors.items() if name in state.params}
    buffers = {name: value for name, value in tensors.items() if name in state.buffers}
    return Update(task, delta, buffers, figures["num_samples"], figures["num_steps"], (0.0,))
