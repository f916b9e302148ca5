"""The [training] table. Needs no PyTorch, so that planning does not either."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from exitflow.config import check_fields, located, require
from exitflow.federated.weighting import WEIGHTINGS, ExitWeighting, find_weighting, fixed_weights
from exitflow.parts import Part, check_part, is_own, load_part, part_name, take_part

MAX_TIMES = 1_000_000_000  # rounds, passes, steps and samples of a batch
GIVEN = "exit_weights"  # what trainings are called whose weights are given, and not worked out by a weighting
MAX_FACTOR = 1e30  # of what multiplies float32 tensors

SCHEDULES = ("cosine", "constant")
OPTIMISERS = ("sgd",)
OBJECTIVES = ("labels", "mutual", "from-deepest", "soft-labels")
SERVER_STEPS = ("coverage", "paper", "sample-mean", "node-mean")
JointLoss = Literal["element-mean", "mean", "sum"]


@dataclass(frozen=True)
class ScheduleSpec:
    """How the nodes' learning rate changes from round to round."""

    name: Part = "cosine"
    final_learning_rate: float = 0.001  # where the cosine ends
    warmup_rounds: int = 0  # over which the learning rate rises to the schedule's

    def __post_init__(self) -> None:
        take_part(self, "name", SCHEDULES, "schedule")
        check_fields(self)
        _require_factor(self.final_learning_rate, "final_learning_rate")


@dataclass(frozen=True)
class OptimiserSpec:
    """What makes the nodes' steps of the gradients, beside the learning rate."""

    name: Part = "sgd"
    momentum: float = 0.9
    momentum_between_rounds: Literal["reset", "keep"] = "reset"
    weight_decay: float = 5e-4
    precision: Literal["float32", "bfloat16"] = "float32"  # of passes through the network; weights are kept as they are

    def __post_init__(self) -> None:
        take_part(self, "name", OPTIMISERS, "optimiser")
        check_fields(self)
        problem = "can be kept of 'sgd' alone, not of an optimiser of your own"
        require(self.name == "sgd" or self.momentum_between_rounds == "reset", "momentum_between_rounds", problem)
        require(0 <= self.momentum < 1, "momentum", f"must be from 0 to below 1, got {self.momentum}")
        _require_factor(self.weight_decay, "weight_decay")


@dataclass(frozen=True)
class ObjectiveSpec:
    """What a node minimises, beside the loss on its labels."""

    name: Part = "labels"  # what an exit learns from
    joint_loss: JointLoss = "element-mean"  # how the losses of several exits add up
    proximal_weight: float = 0.0  # mu of FedProx: how strongly a node is held to the model that it received

    def __post_init__(self) -> None:
        take_part(self, "name", OBJECTIVES, "objective")
        check_fields(self)
        _require_factor(self.proximal_weight, "proximal_weight")


@dataclass(frozen=True)
class DistillationSpec:
    """How exits teach each other, where the objective has them do so."""

    weight: float = 1.0  # of what they teach, beside the labels
    temperature: float = 1.0  # at which their answers are compared
    start: float = 0.0  # the share of the rounds that pass before it begins ...
    ramp: float = 0.0  # ... or over which it grows to its full weight

    def __post_init__(self) -> None:
        _require_factor(self.weight, "weight")
        for key in ("start", "ramp"):
            value = getattr(self, key)
            require(0 <= value <= 1, key, f"must be from 0 to 1, got {value}")
        valid = 0 < self.temperature <= MAX_FACTOR
        require(valid, "temperature", f"must be above 0, up to {MAX_FACTOR:g}, got {self.temperature}")


@dataclass(frozen=True)
class TrainingSpec:
    """How to train. The paper's symbols stand beside the names."""

    weighting: Part = "auto"  # Lambda-tilde, by name
    exit_weights: tuple[float, ...] = ()  # Lambda-tilde itself, one for each exit, instead of a weighting
    rounds: int = 100  # T
    local_steps: int | None = None  # J, of every node; absent: as many as one pass over the largest node's data takes
    batch_size: int = 128  # |B_i|; a node with fewer samples uses all of them
    learning_rate: float = 0.1  # eta
    schedule: ScheduleSpec = field(default_factory=ScheduleSpec)
    optimiser: OptimiserSpec = field(default_factory=OptimiserSpec)
    help_probability: float = 0.0  # p: how often a node trains each exit below its own
    participation: float = 1.0  # the probability that a node takes part in a round
    local_exits: Literal["all", "one", "each-step"] | None = None  # a node trains all its exits at once, or one: ...
    sampling: dict[str, tuple[float, ...]] = field(default_factory=dict)  # p_{i,e} in full: node -> exits 1..E_i
    objective: ObjectiveSpec = field(default_factory=ObjectiveSpec)
    distillation: DistillationSpec = field(default_factory=DistillationSpec)
    answers: Literal["blended", "own"] | None = None  # of an exit: with those of the exits before it, or its own alone
    server_step: Part = "coverage"
    evaluate_every: int = 10  # rounds between evaluations on validation data; the last round always is
    metrics: tuple[Part, ...] = ()  # what else is worked out of validation data then: functions of one's own
    seed: int = 0
    tune: str = "full"  # what is trained: all, the "heads", all "from:8", block 8, on, or adapters of rank 8, "lora:8"

    def __post_init__(self) -> None:
        take_part(self, "weighting", WEIGHTINGS, "weighting")
        take_part(self, "server_step", SERVER_STEPS, "server step")
        object.__setattr__(self, "metrics", tuple(part_name("metrics", each) for each in self.metrics))
        for name in self.metrics:
            check_part("metrics", name, (), "metric")
        check_fields(self)
        for key in ("rounds", "local_steps", "batch_size", "evaluate_every"):
            value = getattr(self, key)
            valid = value is None or 1 <= value <= MAX_TIMES
            require(valid, key, f"must be from 1 to {MAX_TIMES:,}, got {value}")
        require(self.seed >= 0, "seed", f"must be 0 or more, got {self.seed}")
        warmup = self.schedule.warmup_rounds
        problem = f"must be 0 or more, and below the number of rounds, {self.rounds}; got {warmup}"
        require(0 <= warmup < self.rounds, "schedule.warmup_rounds", problem)
        valid = 0 < self.learning_rate <= MAX_FACTOR
        require(valid, "learning_rate", f"must be above 0, up to {MAX_FACTOR:g}, got {self.learning_rate}")
        require(0 < self.participation <= 1, "participation", f"must be above 0, up to 1, got {self.participation}")
        require(0 <= self.help_probability <= 1, "help_probability", f"must be 0 to 1, got {self.help_probability}")
        known = re.fullmatch(r"full|heads|(from|lora):[1-9]\d{0,3}", self.tune)
        problem = f'must be "full", "heads", "from:N" (block N on) or "lora:N" (adapters of rank N), got {self.tune!r}'
        require(known is not None, "tune", problem)
        share = self.objective.name != "soft-labels" or self.distillation.weight <= 1
        problem = f"is the share of the soft labels here, 0 to 1, got {self.distillation.weight}"
        require(share, "distillation.weight", problem)
        weights = self.exit_weights
        valid = not weights or (all(0 <= weight <= MAX_FACTOR for weight in weights) and sum(weights) > 0)
        require(valid, "exit_weights", f"must be 0 or more, and not all 0, got {list(weights)}")
        if self.local_exits in ("all", "each-step"):
            problem = 'is about which one exit a node trains; it needs local_exits = "one"'
            require(self.help_probability == 0, "help_probability", problem)
            require(not self.sampling, "sampling", problem)

    @property
    def trains_all_exits(self) -> bool:
        """Whether a task holds all exits up to the node's own. Unless it is said, only those of `auto` do."""
        drawn = bool(self.sampling) or self.help_probability > 0
        together = self.local_exits in ("all", "each-step")
        return together or (self.local_exits is None and self.weighting == "auto" and not drawn)

    @property
    def blends_answers(self) -> bool:
        """Whether an exit answers together with those before it. Unless it is said, only those of `auto` do."""
        return self.answers == "blended" or (self.answers is None and self.weighting == "auto")

    @property
    def averages_elements(self) -> bool:
        """Whether an element of a node's model follows the mean of the losses that reach it, not their sum."""
        return self.objective.joint_loss == "element-mean" and self.local_exits != "each-step"

    @property
    def keeps_momentum(self) -> bool:
        """Whether nodes keep their momentum between rounds."""
        return self.optimiser.momentum_between_rounds == "keep"

    @property
    def own_parts(self) -> dict[str, str]:
        """The functions of the user's own that training would call: key -> name."""
        named = {
            "weighting": self.weighting,
            "schedule.name": self.schedule.name,
            "optimiser.name": self.optimiser.name,
            "objective.name": self.objective.name,
            "server_step": self.server_step,
            **{f"metrics[{place}]": name for place, name in enumerate(self.metrics)},
        }
        return {key: name for key, name in named.items() if is_own(name)}

    def check_own_parts(self) -> None:
        """Refuse to begin where one of them cannot be found."""
        for key, name in self.own_parts.items():
            load_part(name, key=f"training.{key}")

    @property
    def named_metrics(self) -> dict[str, Callable[[Any], float]]:
        """The metrics, by name."""
        return {name: load_part(name, key="training.metrics") for name in self.metrics}

    @property
    def named_weighting(self) -> ExitWeighting:
        """The weighting by name, whether or not weights are given instead."""
        return located("training", find_weighting, self.weighting)

    @property
    def weighting_name(self) -> str:
        """What the weights are called: the weighting that works them out, or GIVEN."""
        return GIVEN if self.exit_weights else self.weighting

    @property
    def exit_weighting(self) -> ExitWeighting:
        """The weighting by name, or the weights that are given."""
        return fixed_weights(self.exit_weights) if self.exit_weights else self.named_weighting


def _require_factor(value: float, key: str) -> None:
    require(0 <= value <= MAX_FACTOR, key, f"must be from 0 to {MAX_FACTOR:g}, got {value}")
