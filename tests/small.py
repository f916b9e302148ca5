"""Small things to test with: topologies, a convex nested model whose exits are slices, and toy data."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from exitflow.data.dataset import Dataset, Preparation, Split
from exitflow.federated.local import LocalTrainer, NodeData
from exitflow.federated.schedules import make_schedule
from exitflow.federated.training_spec import ObjectiveSpec, OptimiserSpec, ScheduleSpec, TrainingSpec
from exitflow.federated.types import ServerState, Task
from exitflow.models.nested import Coverage, NestedModel
from exitflow.runs.records import Record
from exitflow.system.system import System, load_system
from exitflow.topology.graph import Link, Node, Topology


@st.composite
def topologies(draw: st.DrawFn, max_nodes: int = 12, max_exits: int = 4) -> Topology:
    """Any valid tree or DAG in which some requests arrive."""
    num_exits = draw(st.integers(1, max_exits))
    exits = draw(st.lists(st.integers(1, num_exits), min_size=1, max_size=max_nodes))
    rates = st.floats(0, 1e3)
    nodes: list[Node] = []
    for index, exit in enumerate(sorted(exits, reverse=True)):
        deeper = [node.name for node in nodes if node.exit > exit]
        chosen = draw(st.lists(st.sampled_from(deeper), unique=True, max_size=3)) if deeper else []
        links = tuple(Link(name, draw(st.none() | rates)) for name in chosen)
        nodes.append(Node(f"n{index}", exit, draw(rates), links))
    if not any(node.arrival_rate > 0 for node in nodes):
        nodes[-1] = replace(nodes[-1], arrival_rate=1.0)
    return Topology(tuple(draw(st.permutations(nodes))))


class SlicedLinear(nn.Module):
    """The first features only, as many as each exit has, through one linear layer."""

    def __init__(self, sizes: dict[int, int], num_classes: int) -> None:
        super().__init__()
        self.sizes = sizes
        self.weight = nn.Parameter(torch.zeros(num_classes, max(sizes.values())))
        self.bias = nn.Parameter(torch.zeros(num_classes))

    def forward(self, inputs: Tensor, *exits: int) -> tuple[Tensor, ...]:
        sizes = [self.sizes[exit] for exit in exits or self.sizes]
        return tuple(inputs[:, :size] @ self.weight[:, :size].T + self.bias for size in sizes)


class NestedLinear(NestedModel):
    """Exit e is a linear softmax on the first sizes[e-1] features: convex, and nested by slices of one tensor."""

    def __init__(self, sizes: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.sizes = sizes
        self.num_exits = len(sizes)
        self.weight = nn.Parameter(torch.zeros(num_classes, sizes[-1]))
        self.bias = nn.Parameter(torch.zeros(num_classes))

    def advance(self, carry: Tensor, start: int, stop: int) -> Tensor:
        return carry

    def classify(self, carry: Tensor, exit: int) -> Tensor:
        size = self.sizes[exit - 1]
        return carry[:, :size] @ self.weight[:, :size].T + self.bias

    def coverage(self, *exits: int) -> Coverage:
        return {"weight": (slice(None), slice(0, self.sizes[max(exits) - 1])), "bias": ()}

    def submodel(self, *exits: int) -> nn.Module:
        sizes = {exit: self.sizes[exit - 1] for exit in exits}
        return SlicedLinear(sizes, len(self.bias)).to(self.weight.dtype)


def training(**changes: object) -> TrainingSpec:
    """What is not said is plain SGD at a constant rate; `schedule` and `objective` are names, and the other keys of
    their tables and of the optimiser's stand beside the rest."""
    given = {"schedule": "constant", "momentum": 0.0, "weight_decay": 0.0, **changes}
    tables = {"schedule": ScheduleSpec, "optimiser": OptimiserSpec, "objective": ObjectiveSpec}
    parts = {}
    for table, kind in tables.items():
        known = {item.name for item in fields(kind)} & given.keys()
        named = {"name": given.pop(table)} if table in given else {}
        parts[table] = kind(**named, **{key: given.pop(key) for key in known})
    return TrainingSpec(**parts, **given)


def initial_state(model: NestedModel) -> ServerState:
    params = {name: param.detach().clone() for name, param in model.named_parameters()}
    return ServerState(0, params, {name: buffer.clone() for name, buffer in model.named_buffers()})


def gaussian_split(num_samples: int, num_features: int, num_classes: int, *, seed: int = 0) -> Split:
    """Classes around random centres."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(num_classes, size=num_samples)
    centres = rng.normal(size=(num_classes, num_features))
    inputs = centres[labels] + rng.normal(size=(num_samples, num_features))
    return Split(torch.from_numpy(inputs), torch.from_numpy(labels))


def image_dataset(num_train: int = 64, *, channels: int = 1, size: int = 8, num_classes: int = 3) -> Dataset:
    """Random bytes with random labels: for shapes and bookkeeping, nothing can be learned from it."""
    generator = torch.Generator().manual_seed(0)

    def split(count: int) -> Split:
        inputs = torch.randint(256, (count, channels, size, size), dtype=torch.uint8, generator=generator)
        return Split(inputs, torch.randint(num_classes, (count,), generator=generator))

    preparation = Preparation((128.0,) * channels, (64.0,) * channels, crop_padding=1, flip=True)
    return Dataset("random", split(num_train), split(16), split(24), num_classes, preparation)


def linear_trainer(
    model: NestedModel, split: Split, indices: dict[str, list[int]], spec: TrainingSpec, num_steps: int
) -> LocalTrainer:
    held = {node: torch.tensor(rows) for node, rows in indices.items()}
    preparation = Preparation((0.0,), (1.0,))
    data = NodeData(split, held, preparation, augment=False)
    return LocalTrainer(model, data, spec, num_steps, make_schedule(spec, num_steps))


def record_of(round: int, **changes: Any) -> Record:
    """What a training writes of a round, as far as readers need it."""
    return Record(round, (0.5, 0.25, 0.25), **changes)


def task_of(round: int, node: str, exit: int, probability: float, seed: int) -> Task:
    """To train one exit."""
    return Task(round, node, (exit,), (1.0,), probability, seed)


TINY = (
    "model.width=2",
    "model.blocks=[1,1,1]",
    "model.strides=[1,2,2]",
    "model.exit_blocks=[1,2,3]",
    "training.rounds=3",
    "training.local_steps=2",
    "training.batch_size=8",
    "training.evaluate_every=2",
)


def tiny_system(*overrides: str, source: str = "paper-7:80-15-5") -> System:
    """The paper's tree with a network that trains in milliseconds."""
    return load_system(source, [*TINY, *overrides])
