"""What passes between the server and the nodes in a round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # planning draws tasks without PyTorch
    from torch import Tensor

    from exitflow.tensors import Tensors


@dataclass(frozen=True, slots=True)
class Task:
    """Node `node` trains exit `exit` in this round."""

    round: int  # t, from 1
    node: str  # i
    exit: int  # e
    probability: float  # p_{i,e}
    seed: int  # of all that is random in it


@dataclass(frozen=True, slots=True)
class Update:
    """What came of a task. Holds the slices that the exit covers, and only those."""

    task: Task
    delta: Tensors  # g_{i,e} = w^(t,J) - w^(t)
    buffers: Tensors  # batch-norm statistics after the last step
    num_samples: int  # |S_i|
    num_steps: int  # J
    loss: float  # mean over the steps
    wire_bytes: tuple[int, int] | None = None  # sent down to the node, and up from it; None: nothing was sent
    state_round: int | None = None  # from which the node's momentum came; None: it began from 0


UPDATE_FIGURES = tuple(  # all of an update that is no tensor, and that the node itself knows
    item.name for item in fields(Update) if item.name not in ("task", "delta", "buffers", "wire_bytes")
)


@dataclass(frozen=True, slots=True)
class Missing:
    """No update came of a task, or none that can be used."""

    task: Task
    reason: str
    refused: bool = False  # one came, and was not fit to be believed
    wire_bytes: tuple[int, int] | None = None  # sent down to the node, and up from it


@dataclass(frozen=True)
class ServerState:
    """The global model after `round` rounds."""

    round: int
    params: Tensors
    buffers: Tensors

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers together."""
        return {**self.params, **self.buffers}


class Backend(Protocol):
    """Where local training happens."""

    def run(self, state: ServerState, tasks: Sequence[Task]) -> Iterator[Update | Missing]:
        """What came of each task, in the order of the tasks. An update is valid until the next one is asked for."""

    def gradient_variances(self, state: ServerState, pairs: Sequence[tuple[str, int]]) -> list[float]:
        """The gradient variance at each (node, exit), NaN where a node has too little data."""

    def close(self) -> None:
        """End what was started."""
