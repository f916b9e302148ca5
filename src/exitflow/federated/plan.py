"""The input of Algorithm 1, and what follows from it for a round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from exitflow.federated.aggregation import Aggregation, ServerStep, aggregate, own_step
from exitflow.federated.sampling import sample_tasks
from exitflow.federated.training_spec import SERVER_STEPS, TrainingSpec
from exitflow.federated.types import Task
from exitflow.federated.weighting import ExitProfile, ExitWeighting
from exitflow.models.nested import Coverage
from exitflow.parts import load_part

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class TrainingPlan:
    """The input of Algorithm 1."""

    nodes: Sequence[str]
    profile: ExitProfile
    weighting: ExitWeighting
    coverage: Callable[..., Coverage]  # of any exits
    spec: TrainingSpec
    server_learning_rate: float = 1.0  # eta_s
    projection_radius: float | None = None  # W: the ball of this radius around 0

    def tasks(self, round: int, exit_weights: FloatArray) -> list[Task]:
        """N^(t): who trains which exits in a round."""
        spec, drawn_later = self.spec, self.spec.local_exits == "each-step"
        return sample_tasks(
            self.nodes,
            self.profile.probabilities,
            round=round,
            seed=spec.seed,
            joint_weights=self._joint_weights(exit_weights) if spec.trains_all_exits else None,
            as_sum=drawn_later or spec.objective.joint_loss == "sum",
        )

    def rule(self, exit_weights: FloatArray) -> Aggregation:
        """How the server adds up the updates of a round under these weights."""
        step = self.spec.server_step
        return Aggregation(
            exit_weights,
            self.profile.exit_samples,
            self.coverage,
            step=step if step in SERVER_STEPS else "coverage",
            server_learning_rate=self.server_learning_rate,
            projection_radius=self.projection_radius,
        )

    @cached_property
    def aggregate(self) -> ServerStep:
        """How the updates of a round become the next global model: ours, or the user's own."""
        name = self.spec.server_step
        return aggregate if name in SERVER_STEPS else own_step(load_part(name, key="training.server_step"), name)

    def _joint_weights(self, exit_weights: FloatArray) -> FloatArray:
        """(E,) of the losses of a node that trains several exits: as the server counts their updates."""
        if self.spec.local_exits == "each-step":
            return np.ones_like(exit_weights)
        if self.spec.server_step in ("sample-mean", "node-mean"):  # these count nodes, and leave exits to them
            return exit_weights
        return exit_weights / self.profile.exit_samples
