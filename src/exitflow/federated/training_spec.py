"""The [training] table. Needs no PyTorch, so that planning does not either."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from exitflow.config import check_choices, require
from exitflow.errors import suggestion
from exitflow.federated.weighting import WEIGHTINGS, ExitWeighting, fixed_weights

MAX_TIMES = 1_000_000_000  # rounds, passes, steps and samples of a batch
GIVEN = "exit_weights"  # what trainings are called whose weights are given, and not worked out by a weighting
MAX_FACTOR = 1e30  # of what multiplies float32 tensors


@dataclass(frozen=True)
class TrainingSpec:
    """How to train. The paper's symbols stand beside the names."""

    weighting: str = "auto"  # Lambda-tilde, by name
    exit_weights: tuple[float, ...] = ()  # Lambda-tilde itself, one for each exit, instead of a weighting
    rounds: int = 100  # T
    local_epochs: int = 1  # passes over the largest node's data; every node makes the same number of steps
    local_steps: int | None = None  # J, instead of local_epochs
    batch_size: int = 128  # |B_i|; a node with fewer samples uses all of them
    learning_rate: float = 0.1  # eta
    final_learning_rate: float = 0.001  # where the cosine ends
    schedule: Literal["cosine", "constant", "theorem"] = "cosine"
    warmup_rounds: int = 0  # over which the learning rate rises to the schedule's
    strong_convexity: float | None = None  # mu, for the theorem's schedule
    smoothness: float | None = None  # L, for the theorem's schedule
    momentum: float = 0.9
    momentum_between_rounds: Literal["reset", "keep"] = "reset"
    weight_decay: float = 5e-4
    help_probability: float = 0.0  # p: how often a node trains each exit below its own
    participation: float = 1.0  # the probability that a node takes part in a round
    local_exits: Literal["all", "one", "each-step"] | None = None  # a node trains all its exits at once, or one: ...
    sampling: dict[str, tuple[float, ...]] = field(default_factory=dict)  # p_{i,e} in full: node -> exits 1..E_i
    joint_loss: Literal["element-mean", "mean", "sum"] = "element-mean"  # how the losses of several exits add up
    objective: Literal["labels", "mutual", "from-deepest", "soft-labels"] = "labels"  # what an exit learns from
    distillation_weight: float = 1.0  # of what exits teach each other, beside the labels
    distillation_temperature: float = 1.0  # at which their answers are compared
    distillation_start: float = 0.0  # the share of the rounds that pass before it begins ...
    distillation_ramp: float = 0.0  # ... or over which it grows to its full weight
    answers: Literal["blended", "own"] | None = None  # of an exit: with those of the exits before it, or its own alone
    proximal_weight: float = 0.0  # mu of FedProx: how strongly a node is held to the model that it received
    server_step: Literal["coverage", "paper", "sample-mean", "node-mean"] = "coverage"
    server_learning_rate: float = 1.0  # eta_s
    projection_radius: float | None = None  # W: the ball of this radius around 0
    on_nonfinite: Literal["drop", "stop"] = "drop"  # when a node returns NaN or infinity
    evaluate_every: int = 10  # rounds between evaluations on validation data; the last round always is
    seed: int = 0

    def __post_init__(self) -> None:
        check_choices(self)
        known = self.weighting in WEIGHTINGS
        problem = f"there is no weighting {self.weighting!r}{suggestion(self.weighting, WEIGHTINGS)}"
        require(known, "weighting", problem)
        for key in ("rounds", "local_epochs", "local_steps", "batch_size", "evaluate_every"):
            value = getattr(self, key)
            valid = value is None or 1 <= value <= MAX_TIMES
            require(valid, key, f"must be from 1 to {MAX_TIMES:,}, got {value}")
        require(self.seed >= 0, "seed", f"must be 0 or more, got {self.seed}")
        valid = 0 <= self.warmup_rounds < self.rounds
        problem = f"must be 0 or more, and below the number of rounds, {self.rounds}; got {self.warmup_rounds}"
        require(valid, "warmup_rounds", problem)
        for key in ("learning_rate", "server_learning_rate", "strong_convexity", "smoothness", "projection_radius"):
            value = getattr(self, key)
            valid = value is None or 0 < value <= MAX_FACTOR
            require(valid, key, f"must be above 0, up to {MAX_FACTOR:g}, got {value}")
        mu, smoothness = self.strong_convexity, self.smoothness
        require((mu is None) == (smoothness is None), "strong_convexity", "goes with smoothness; give both or none")
        valid = mu is None or smoothness is None or mu <= smoothness
        require(valid, "strong_convexity", f"must be at most smoothness, {smoothness}, got {mu}")
        for key in ("final_learning_rate", "weight_decay"):
            value = getattr(self, key)
            require(0 <= value <= MAX_FACTOR, key, f"must be from 0 to {MAX_FACTOR:g}, got {value}")
        require(0 <= self.momentum < 1, "momentum", f"must be from 0 to below 1, got {self.momentum}")
        require(0 < self.participation <= 1, "participation", f"must be above 0, up to 1, got {self.participation}")
        require(0 <= self.help_probability <= 1, "help_probability", f"must be 0 to 1, got {self.help_probability}")
        for key in ("distillation_weight", "proximal_weight"):
            value = getattr(self, key)
            require(0 <= value <= MAX_FACTOR, key, f"must be from 0 to {MAX_FACTOR:g}, got {value}")
        for key in ("distillation_start", "distillation_ramp"):
            value = getattr(self, key)
            require(0 <= value <= 1, key, f"must be from 0 to 1, got {value}")
        temperature = self.distillation_temperature
        valid = 0 < temperature <= MAX_FACTOR
        require(valid, "distillation_temperature", f"must be above 0, up to {MAX_FACTOR:g}, got {temperature}")
        share = self.objective != "soft-labels" or self.distillation_weight <= 1
        problem = f"is the share of the soft labels here, 0 to 1, got {self.distillation_weight}"
        require(share, "distillation_weight", problem)
        weights = self.exit_weights
        valid = not weights or (all(0 <= weight <= MAX_FACTOR for weight in weights) and sum(weights) > 0)
        require(valid, "exit_weights", f"must be 0 or more, and not all 0, got {list(weights)}")
        if self.local_exits in ("all", "each-step"):
            problem = 'is about which one exit a node trains; it needs local_exits = "one"'
            require(self.help_probability == 0, "help_probability", problem)
            require(not self.sampling, "sampling", problem)
        if self.schedule == "theorem":
            require(mu is not None, "schedule", "'theorem' needs strong_convexity (mu) and smoothness (L)")

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
        return self.joint_loss == "element-mean" and self.local_exits != "each-step"

    @property
    def weighting_name(self) -> str:
        """What the weights are called: the weighting that works them out, or GIVEN."""
        return GIVEN if self.exit_weights else self.weighting

    @property
    def exit_weighting(self) -> ExitWeighting:
        """The weighting by name, or the weights that are given."""
        return fixed_weights(self.exit_weights) if self.exit_weights else WEIGHTINGS[self.weighting]
