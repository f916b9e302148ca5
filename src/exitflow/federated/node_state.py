"""Momentum of each node between rounds: small files, kept where the node is and not on the server.

The state of a node's exit after round t lies in `NODE/exit-e/t.safetensors`. The one before it is kept too, so that
a run that is killed in the middle of a round, and repeats it, finds the state with which the round began.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from exitflow.federated.types import Task
from exitflow.files import make_folder
from exitflow.tensors import Tensors, load_tensors, save_tensors


class NodeStates:
    """The states of any number of nodes, below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, task: Task) -> dict[str, Tensor]:
        """The newest state from before the task's round; {} where there is none."""
        earlier = self._earlier(task)
        return load_tensors(earlier[-1])[0] if earlier else {}

    def round_of(self, task: Task) -> int | None:
        """After which round the state that `load` gives was kept."""
        earlier = self._earlier(task)
        return int(earlier[-1].stem) if earlier else None

    def missing(self, trained: Mapping[tuple[str, int], int]) -> list[str]:
        """Which nodes lack a state, given the last round in which each (node, deepest exit) has trained."""
        lacking = {
            node
            for (node, exit), round in trained.items()
            if max((int(path.stem) for path in self._files(node, exit)), default=0) < round
        }
        return sorted(lacking)

    def save(self, task: Task, state: Tensors) -> None:
        """Keep the state after the task, and the newest from before it."""
        folder = self._folder_of(task.node, task.deepest)
        make_folder(folder)
        save_tensors(folder / f"{task.round}.safetensors", state)
        for path in self._earlier(task)[:-1]:
            path.unlink(missing_ok=True)

    def _earlier(self, task: Task) -> list[Path]:
        """The states from before the task's round, the newest last."""
        return [path for path in self._files(task.node, task.deepest) if int(path.stem) < task.round]

    def _files(self, node: str, exit: int) -> list[Path]:
        files = self._folder_of(node, exit).glob("[0-9]*.safetensors")
        return sorted(files, key=lambda path: int(path.stem))

    def _folder_of(self, node: str, exit: int) -> Path:
        return self.folder / node / f"exit-{exit}"
