"""One task after the other, in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from exitflow.federated.local import LocalTrainer
from exitflow.federated.types import GradientFigures, ServerState, Task, Update


class SerialBackend:
    """Nodes train one after the other in this process: what all other backends must agree with."""

    def __init__(self, trainer: LocalTrainer) -> None:
        self._trainer = trainer

    def run(self, state: ServerState, tasks: Sequence[Task]) -> Iterator[Update]:
        """Train each task when its update is asked for."""
        return (self._trainer.train(state, task) for task in tasks)

    def measure_gradients(self, state: ServerState, pairs: Sequence[tuple[str, int]]) -> list[GradientFigures]:
        """The figures of each (node, exit), measured one after the other."""
        return [self._trainer.measure_gradients(state, node, exit) for node, exit in pairs]

    def close(self) -> None:
        """There is nothing to end, as nothing was started."""
