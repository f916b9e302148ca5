"""What happened in a round."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from exitflow.errors import TrainingError
from exitflow.federated.types import ServerState, Task

NOT_FINITE = "its update held NaN or infinity"


@dataclass
class RoundReport:
    """A round as it went; whatever wraps its updates writes here what it has seen of them."""

    round: int
    exit_weights: npt.NDArray[np.float64]
    tasks: Sequence[Task]
    losses: dict[int, list[float]] = field(default_factory=dict)  # exit -> the mean loss of each node that trained it
    dropped: list[str] = field(default_factory=list)  # nodes whose update was not finite
    missing: dict[str, str] = field(default_factory=dict)  # node -> why no update of it came
    refused: dict[str, str] = field(default_factory=dict)  # node -> why its update was not believed
    lost_weight: npt.NDArray[np.float64] | None = None  # (E,) share of the exit's weight that did not arrive
    state_lost: list[str] = field(default_factory=list)  # nodes that kept momentum, and have lost or old one
    wire_bytes: dict[str, tuple[int, int]] = field(default_factory=dict)  # node -> bytes down and up, where known
    started: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0

    @property
    def lost(self) -> dict[str, str]:
        """Each node whose update does not count, and why."""
        return {**dict.fromkeys(self.dropped, NOT_FINITE), **self.missing, **self.refused}

    @property
    def num_updates(self) -> int:
        """How many updates of this round count."""
        return len(self.tasks) - len(self.lost)

    @property
    def attendance(self) -> dict[str, bool]:
        """Whether each node that was asked has answered; an answer that was refused is one."""
        return {task.node: task.node not in self.missing for task in self.tasks}

    def ended(self, state: ServerState) -> RoundReport:
        """The report of a round that led to `state`."""
        from exitflow.tensors import all_finite  # with PyTorch, which readers of reports do not need

        if not all_finite(state.tensors):
            raise TrainingError(f"round {self.round}: the global model is not finite any more; choose a smaller step")
        self.seconds = time.perf_counter() - self.started
        return self
