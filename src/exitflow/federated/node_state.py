"""Momentum of each node between rounds: small files, kept where the node is and not on the server.

The state of a node's exit after round t lies in `NODE/exit-e/t.safetensors`. The one before it is kept too, so that
a run that is killed in the middle of a round, and repeats it, finds the state with which the round began.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from exitflow.errors import RunError
from exitflow.federated.types import Task
from exitflow.files import make_folder, sync_files
from exitflow.tensors import Tensors, load_tensors, save_tensors


class NodeStates:
    """The states of any number of nodes, below one folder.

    Waiting for the disk takes longer than many a task. Where somebody calls `settle` at the end of every round, the
    states of the round are waited for together; else each is when it is saved.
    """

    def __init__(self, folder: Path, *, settled_together: bool = False) -> None:
        self.folder = folder
        self._settled_together = settled_together

    def load(self, task: Task) -> dict[str, Tensor]:
        """The newest state from before the task's round; {} where there is none."""
        earlier = self._earlier(task)
        if not earlier:
            return {}
        state, name = load_tensors(earlier[-1])
        if name not in ("", self._name(earlier[-1])):  # earlier versions wrote none
            raise RunError(f"{earlier[-1]}: is what was kept as {name}; restore what belongs here")
        return state

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
        path = folder / f"{task.round}.safetensors"
        save_tensors(path, state, self._name(path), lasting=not self._settled_together)
        for path in self._earlier(task)[:-1]:
            path.unlink(missing_ok=True)

    def settle(self, tasks: Iterable[Task]) -> None:
        """Wait until the states after these tasks are safely on disk; a task that failed has left none."""
        files = [self._folder_of(task.node, task.deepest) / f"{task.round}.safetensors" for task in tasks]
        if self._settled_together:
            sync_files([file for file in files if file.is_file()])

    def _earlier(self, task: Task) -> list[Path]:
        """The states from before the task's round, the newest last."""
        return [path for path in self._files(task.node, task.deepest) if int(path.stem) < task.round]

    def _files(self, node: str, exit: int) -> list[Path]:
        files = self._folder_of(node, exit).glob("[0-9]*.safetensors")
        return sorted(files, key=lambda path: int(path.stem))

    def _name(self, path: Path) -> str:
        """What a file says that it is, so that no node goes on with the state of another, or of another round."""
        return path.relative_to(self.folder).as_posix()

    def _folder_of(self, node: str, exit: int) -> Path:
        return self.folder / node / f"exit-{exit}"
