"""The [training] table. Needs no PyTorch, so that planning does not either."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from exitflow.config import require
from exitflow.errors import suggestion
from exitflow.federated.weighting import WEIGHTINGS

MAX_FACTOR = 1e30  # of what multiplies float32 tensors


@dataclass(frozen=True)
class TrainingSpec:
    """How to train. The paper's symbols stand beside the names."""

    weighting: str = "auto"  # Lambda-tilde, by name
    rounds: int = 100  # T
    local_epochs: int = 1  # passes over the largest node's data; every node makes the same number of steps
    local_steps: int | None = None  # J, instead of local_epochs
    batch_size: int = 128  # |B_i|; a node with fewer samples uses all of them
    learning_rate: float = 0.1  # eta
    final_learning_rate: float = 0.001  # where the cosine ends
    schedule: Literal["cosine", "constant", "theorem"] = "cosine"
    strong_convexity: float | None = None  # mu, for the theorem's schedule
    smoothness: float | None = None  # L, for the theorem's schedule
    momentum: float = 0.9
    momentum_between_rounds: Literal["reset", "keep"] = "reset"
    weight_decay: float = 5e-4
    help_probability: float = 0.0  # p: how often a node trains each exit below its own
    participation: float = 1.0  # the probability that a node takes part in a round
    local_exits: Literal["all", "one"] | None = None  # a node trains all exits up to its own at once, or a drawn one
    sampling: dict[str, tuple[float, ...]] = field(default_factory=dict)  # p_{i,e} in full: node -> exits 1..E_i
    server_step: Literal["coverage", "paper"] = "coverage"
    server_learning_rate: float = 1.0  # eta_s
    projection_radius: float | None = None  # W: the ball of this radius around 0
    on_nonfinite: Literal["drop", "stop"] = "drop"  # when a node returns NaN or infinity
    evaluate_every: int = 10  # rounds between evaluations on validation data; the last round always is
    seed: int = 0

    def __post_init__(self) -> None:
        known = self.weighting in WEIGHTINGS
        problem = f"there is no weighting {self.weighting!r}{suggestion(self.weighting, WEIGHTINGS)}"
        require(known, "weighting", problem)
        for key in ("rounds", "local_epochs", "local_steps", "batch_size", "evaluate_every"):
            value = getattr(self, key)
            require(value is None or value >= 1, key, f"must be at least 1, got {value}")
        require(self.seed >= 0, "seed", f"must be 0 or more, got {self.seed}")
        for key in ("learning_rate", "server_learning_rate", "strong_convexity", "smoothness", "projection_radius"):
            value = getattr(self, key)
            valid = value is None or 0 < value <= MAX_FACTOR
            require(valid, key, f"must be above 0, up to {MAX_FACTOR:g}, got {value}")
        for key in ("final_learning_rate", "weight_decay"):
            value = getattr(self, key)
            require(0 <= value <= MAX_FACTOR, key, f"must be from 0 to {MAX_FACTOR:g}, got {value}")
        require(0 <= self.momentum < 1, "momentum", f"must be from 0 to below 1, got {self.momentum}")
        require(0 < self.participation <= 1, "participation", f"must be above 0, up to 1, got {self.participation}")
        require(0 <= self.help_probability <= 1, "help_probability", f"must be 0 to 1, got {self.help_probability}")
        if self.local_exits == "all":
            problem = 'is about which one exit a node trains; it needs local_exits = "one"'
            require(self.help_probability == 0, "help_probability", problem)
            require(not self.sampling, "sampling", problem)
        if self.schedule == "theorem":
            given = self.strong_convexity is not None and self.smoothness is not None
            require(given, "schedule", "'theorem' needs strong_convexity (mu) and smoothness (L)")

    @property
    def trains_all_exits(self) -> bool:
        """Whether a node trains all exits up to its own at once. Unless it is said, only `auto` does."""
        drawn = bool(self.sampling) or self.help_probability > 0
        return self.local_exits == "all" or (self.local_exits is None and self.weighting == "auto" and not drawn)
