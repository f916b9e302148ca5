"""What passes between the server and the nodes in a round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # planning draws tasks without PyTorch
    from torch import Tensor

    from exitflow.tensors import Tensors

Status = Callable[[str], None]  # is told what is being waited for


@dataclass(frozen=True, slots=True)
class Task:
    """Node `node` trains these exits in this round: one of them, in Algorithm 1."""

    round: int  # t, from 1
    node: str  # i
    exits: tuple[int, ...]  # rising
    loss_weights: tuple[float, ...]  # of each exit's loss in the local loss; above 0
    probability: float  # p_{i,e}, of each of them
    seed: int  # of all that is random in it

    @property
    def deepest(self) -> int:
        """The deepest exit that is trained."""
        return self.exits[-1]


def task_from_json(values: Mapping[str, Any]) -> Task:
    """The task whose fields came through JSON."""
    return Task(**{**values, "exits": tuple(values["exits"]), "loss_weights": tuple(values["loss_weights"])})


@dataclass(frozen=True, slots=True)
class Update:
    """What came of a task. Holds the slices that its exits cover, and only those."""

    task: Task
    delta: Tensors  # g_{i,e} = w^(t,J) - w^(t)
    buffers: Tensors  # batch-norm statistics after the last step
    num_samples: int  # |S_i|
    num_steps: int  # J
    losses: tuple[float | None, ...]  # of each exit, mean over the steps that trained it; None where none did
    wire_bytes: tuple[int, int] | None = None  # sent down to the node, and up from it; None: nothing was sent
    seconds: float | None = None  # from when the task was sent until the update was there, likewise
    state_round: int | None = None  # from which the node's momentum came; None: it began from 0


UPDATE_FIGURES = tuple(  # all of an update that is no tensor, and that the node itself knows
    item.name for item in fields(Update) if item.name not in ("task", "delta", "buffers", "wire_bytes", "seconds")
)


@dataclass(frozen=True, slots=True)
class Missing:
    """No update came of a task, or none that can be used."""

    task: Task
    reason: str
    refused: bool = False  # one came, and was not fit to be believed
    wire_bytes: tuple[int, int] | None = None  # sent down to the node, and up from it
    seconds: float | None = None  # from when the task was sent until this was known


@dataclass(frozen=True, slots=True)
class GradientFigures:
    """What a node found of an exit's gradients, for batches of `batch_size`; NaN where it has too little data."""

    mean_variance: float  # v: the variance of a weight's gradient from batch to batch, mean over the weights (appendix)
    variance: float  # sigma^2_{i,e}: the same, summed over the weights (Assumption 5)
    second_moment: float  # E||gradient||^2, which G_{i,e} bounds
    loss: float


@dataclass(frozen=True)
class ServerState:
    """The global model after `round` rounds."""

    round: int
    params: Tensors
    buffers: Tensors
    memory: Tensors = field(default_factory=dict)  # what a server step of the user's own remembers between rounds

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers in one dictionary."""
        return {**self.params, **self.buffers}


class Backend(Protocol):
    """Where nodes train: in this process, in others, on a cluster, or on machines of their own."""

    def run(self, state: ServerState, tasks: Sequence[Task]) -> Iterator[Update | Missing]:
        """What came of each task, in the order of the tasks. An update is valid until the next one is asked for."""

    def measure_gradients(self, state: ServerState, pairs: Sequence[tuple[str, int]]) -> list[GradientFigures]:
        """The figures of each (node, exit)."""

    def close(self) -> None:
        """End whatever was started for this backend."""
