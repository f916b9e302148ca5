"""The parts of a training, put together from a system and its data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from exitflow.config import require
from exitflow.data.dataset import Dataset, LazyInputs
from exitflow.data.partition import Partition, node_samples, own_partition, partition
from exitflow.data.sources import load_dataset
from exitflow.errors import ConfigError
from exitflow.federated.feature_cache import FeatureCache
from exitflow.federated.local import LocalTrainer, NodeData
from exitflow.federated.measuring import GradientTable, measured_profile
from exitflow.federated.node_state import NodeStates
from exitflow.federated.options.compression import Compression
from exitflow.federated.sampling import check_every_exit_is_trained, probability_matrix
from exitflow.federated.schedules import make_schedule
from exitflow.federated.types import ServerState
from exitflow.federated.weighting import ExitProfile
from exitflow.models.build import build_model, preparation_of
from exitflow.models.cost import ExitCost, exit_costs, joint_cost
from exitflow.models.nested import EarlyExitNetwork, NestedModel
from exitflow.models.tuning import frozen_exits, trained_buffers, trained_parameters, trained_tensors, training_mode
from exitflow.parts import is_own, load_part
from exitflow.seeds import derive
from exitflow.system.system import System
from exitflow.topology.rates import ServingPlan, serving_plan


def dataset_of(system: System) -> Dataset:
    """The data set that the system names, prepared as its model takes it."""
    return prepared_for(system, load_dataset(system.data.name, data_dir=system.data.dir, verify=system.data.verify))


def prepared_for(system: System, dataset: Dataset) -> Dataset:
    """The data set with the size and the normalisation that the model says; one that is prepared already stays so."""
    size, mean, std = preparation_of(system.model)
    preparation = dataset.preparation
    if mean:
        num_channels = len(preparation.mean)
        problem = f"has {num_channels} channels, the model's normalisation is for {len(mean)}"
        require(len(mean) == num_channels, "model.mean", f"data set {dataset.name!r} {problem}")
        raw_mean, raw_std = (tuple(255 * value for value in values) for values in (mean, std))
        preparation = replace(preparation, mean=raw_mean, std=raw_std)
    return replace(dataset, preparation=replace(preparation, size=size or preparation.size))


@dataclass(frozen=True)
class Assembly:
    """Each part is made when it is first asked for."""

    system: System
    dataset: Dataset
    node_samples: Mapping[str, int] | None = None  # what nodes with data of their own have; None: the partition's

    def __post_init__(self) -> None:
        object.__setattr__(self, "dataset", prepared_for(self.system, self.dataset))

    @cached_property
    def plan(self) -> ServingPlan:
        """The rates that the system will serve."""
        return serving_plan(self.system.topology)

    @cached_property
    def model(self) -> NestedModel:
        """The network with its initial weights, the same for all nodes."""
        seed = derive(self.system.training.seed, "model")
        try:
            model = build_model(
                self.system.model,
                self.dataset.prepared_shape,
                self.dataset.num_classes,
                seed=seed,
                tuned=self.system.training.tune,
            )
        except ValueError as error:
            raise ConfigError(f"does not fit data set {self.dataset.name!r}: {error}", key="model") from None
        num_exits = self.system.topology.num_exits
        if model.num_exits != num_exits:
            problem = f"has {model.num_exits} exits, but the deepest node stands at exit {num_exits}"
            raise ConfigError(problem, key="model")
        for name, tensor in trained_tensors(model).items():
            if not tensor.is_floating_point():
                advice = "what is averaged must be floats; make it no buffer, or None"
                raise ConfigError(f"tensor {name!r} of the network is {tensor.dtype}: {advice}", key="model")
        return model

    @cached_property
    def exit_costs(self) -> tuple[ExitCost, ...]:
        """What each exit costs to compute and to hold."""
        return exit_costs(self.model, self.dataset.prepared_shape)

    def multiply_adds(self, exits: tuple[int, ...]) -> int:
        """The cost of these exits, computed together, for one input."""
        return joint_cost(self.model, exits, self.dataset.prepared_shape).multiply_adds

    @cached_property
    def samples(self) -> dict[str, int]:
        """The number of samples that each node has, |S_i|."""
        if self.node_samples is not None:
            return {node.name: self.node_samples[node.name] for node in self.system.topology.nodes}
        topology, data = self.system.topology, self.system.data
        if is_own(data.partition):
            return {node.name: len(self.held[node.name]) for node in topology.nodes}
        return node_samples(topology, data.shares(topology.num_exits), len(self.dataset.train))

    @cached_property
    def profile(self) -> ExitProfile:
        """What the weighting may know, but for what has to be measured."""
        probabilities = probability_matrix(self.system.topology, self.samples, self.system.training)
        check_every_exit_is_trained(probabilities, sum(self.samples.values()))
        self._check_smallest_batches()
        return ExitProfile(
            serve_share=self.plan.exit_share,
            multiply_adds=np.array([float(cost.multiply_adds) for cost in self.exit_costs]),
            samples=np.array([float(count) for count in self.samples.values()]),
            probabilities=probabilities,
            num_rounds=self.system.training.rounds,
            normalised_step=self.system.training.server_step == "coverage",
        )

    def _check_smallest_batches(self) -> None:
        """Refuse batches of one sample where batch norm, behind features of 1x1, would have one value a channel."""
        for node in self.system.topology.nodes:
            num_samples = self.samples[node.name]
            if min(self.system.training.batch_size, num_samples) != 1:
                continue
            try:
                with torch.no_grad():
                    network = self.model.submodel(node.exit)
                    training_mode(network)
                    network(torch.zeros(1, *self.dataset.prepared_shape))
            except ValueError as error:
                what = f"node {node.name!r}, with {num_samples} samples, would train exit {node.exit} on one at a time"
                problem = f"{what}, and this network needs at least two: {error}"
                raise ConfigError(problem, key="training.batch_size") from None

    def measured_profile(self, table: GradientTable, curvature: tuple[float, float] | None = None) -> ExitProfile:
        """The profile with what was measured of the gradients; `curvature` is (L, mu), where they are known."""
        return measured_profile(
            self.profile,
            table,
            num_parameters=[cost.num_parameters for cost in self.exit_costs],
            spec=self.system.training,
            num_steps=self.num_steps,
            curvature=curvature,
        )

    @property
    def num_steps(self) -> int:
        """J: as given, or so many that the largest node passes over its data once."""
        spec = self.system.training
        return spec.local_steps or max(max(self.samples.values()) // spec.batch_size, 1)

    def initial_state(self) -> ServerState:
        """The state before the first round, w^(1)."""
        params = {name: param.detach().clone() for name, param in trained_parameters(self.model).items()}
        return ServerState(0, params, {name: buffer.clone() for name, buffer in trained_buffers(self.model).items()})

    def trainer(
        self,
        state_folder: Path,
        *,
        device: str = "cpu",
        num_steps: int | None = None,
        only: str | None = None,
        settled_together: bool = False,
    ) -> LocalTrainer:
        """What the nodes do. With `only`, all of the data are that node's; else each has its part of the partition.

        What nodes keep between rounds is `settled_together` where somebody settles it after every round.
        """
        spec, data = self.system.training, self.system.data
        if only:
            indices = {only: torch.arange(len(self.dataset.train))}
        else:
            indices = {node: torch.from_numpy(rows) for node, rows in self.held.items()}
        compression = Compression.of(self.system.federation)
        residuals = NodeStates(state_folder.with_name("residuals"), settled_together=settled_together)
        num_steps = num_steps or self.num_steps
        preparation = self.dataset.preparation if data.crop else replace(self.dataset.preparation, crop_padding=0)
        augments = data.augment and spec.tune != "heads" and bool(preparation.crop_padding or preparation.flip)
        return LocalTrainer(
            self.model,
            NodeData(self.dataset.train, indices, preparation, augment=augments),
            spec,
            num_steps,
            make_schedule(spec, num_steps),
            NodeStates(state_folder, settled_together=settled_together) if spec.keeps_momentum else None,
            device,
            compression=compression,
            residuals=residuals if compression and compression.remembers else None,
            cache=None if augments else self._feature_cache(state_folder.with_name("features")),
        )

    def _feature_cache(self, folder: Path) -> FeatureCache | None:
        """Where the first stages are frozen, and the inputs of a sample always the same."""
        in_memory = isinstance(self.dataset.train.inputs, torch.Tensor)
        if not isinstance(self.model, EarlyExitNetwork) or not frozen_exits(self.model) or not in_memory:
            return None
        if isinstance(self.dataset.train.inputs, LazyInputs):  # which may have transforms of their own
            return None
        return FeatureCache(folder, self.model, self.dataset.preparation)

    @cached_property
    def held(self) -> Partition:
        """Which of the training samples each node holds."""
        data, labels = self.system.data, self.dataset.train.labels.numpy()
        seed = derive(self.system.training.seed, "partition")
        if is_own(data.partition):
            given = load_part(data.partition, key="data.partition")(labels, self.system.topology, seed)
            return own_partition(given, self.system.topology, len(labels))
        return partition(labels, self.samples, seed=seed, dirichlet_alpha=data.dirichlet_alpha)
