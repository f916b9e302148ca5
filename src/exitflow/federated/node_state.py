"""Momentum of each node between rounds: small files, kept where the node is and not on the server.

The state of a node's exit after round t lies in `NODE/exit-e/t.safetensors`. The one before it is kept too, so that
a run that is killed in the middle of a round, and repeats it, finds the state with which the round began.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from exitflow.federated.types import Task
from exitflow.tensors import Tensors, load_tensors, save_tensors


class NodeStates:
    """The states of any number of nodes, below one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, task: Task) -> dict[str, Tensor]:
        """The newest state from before the task's round; {} where there is none."""
        earlier = [path for path in self._files(task) if int(path.stem) < task.round]
        return load_tensors(earlier[-1])[0] if earlier else {}

    def round_of(self, task: Task) -> int | None:
        """After which round the state that `load` gives was kept."""
        return max((int(path.stem) for path in self._files(task) if int(path.stem) < task.round), default=None)

    def save(self, task: Task, state: Tensors) -> None:
        """Keep the state after the task, and the newest from before it."""
        folder = self._task_folder(task)
        folder.mkdir(parents=True, exist_ok=True)
        save_tensors(folder / f"{task.round}.safetensors", state)
        earlier = [path for path in self._files(task) if int(path.stem) < task.round]
        for path in earlier[:-1]:
            path.unlink(missing_ok=True)

    def _files(self, task: Task) -> list[Path]:
        files = self._task_folder(task).glob("[0-9]*.safetensors")
        return sorted(files, key=lambda path: int(path.stem))

    def _task_folder(self, task: Task) -> Path:
        return self._folder / task.node / f"exit-{task.deepest}"
