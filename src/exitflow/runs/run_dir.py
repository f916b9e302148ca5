"""The directory of a run, in which nothing that was finished is ever lost.

    spec.toml              the system, resolved
    profile.json           what the weighting knew
    rounds.jsonl           a record per round
    checkpoint.safetensors the global model after the last round that counts
    run-id                 under which the nodes of a federation keep their states
    nodes/, residuals/     momentum of each node, where it is kept between rounds; what compression lost
    noise.secret           where updates are clipped: what their noise comes from
    model.safetensors      the trained model, once training has ended

A round first gets its record, then its checkpoint. A run that is killed in between repeats the round: records that
are newer than the checkpoint do not count and are removed when it is resumed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from exitflow.errors import RunError
from exitflow.federated.types import ServerState
from exitflow.files import is_leftover, locked, write_atomically
from exitflow.runs.records import Record, read_records
from exitflow.tensors import load_tensors, save_tensors


class RunDir:
    """Reads and writes the files of one run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.spec = self.path / "spec.toml"
        self.records_file = self.path / "rounds.jsonl"
        self.checkpoint = self.path / "checkpoint.safetensors"
        self.model = self.path / "model.safetensors"
        self.node_states = self.path / "nodes"

    @staticmethod
    def open(path: str | Path) -> RunDir:
        """An existing run."""
        run = RunDir(path)
        if not run.spec.is_file():
            raise RunError(f"{run.path}: is not a run directory (it has no spec.toml)")
        return run

    @staticmethod
    def create(path: str | Path, spec: str) -> RunDir:
        """A new run; refuses a directory that holds anything, but for what a kill has left half written."""
        run = RunDir(path)
        if run.spec.is_file():
            raise RunError(f"{run.path}: holds a run already; resume it with --resume, or choose another directory")
        if run.path.exists() and (not run.path.is_dir() or not all(map(is_leftover, run.path.iterdir()))):
            raise RunError(f"{run.path}: is not an empty directory; choose another one for the run")
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            write_atomically(run.spec, spec.encode())
        except OSError as error:
            raise RunError(f"{run.path}: cannot be written: {error.strerror}") from None
        return run

    @property
    def finished(self) -> bool:
        """Whether training has ended."""
        return self.model.is_file()

    def write_run_id(self, run_id: str) -> None:
        """Under what name the nodes of a federation keep their states of this run."""
        write_atomically(self.path / "run-id", run_id.encode())

    @property
    def in_federation(self) -> bool:
        """Whether its nodes are elsewhere."""
        return (self.path / "run-id").is_file()

    def run_id(self) -> str:
        """What `write_run_id` wrote."""
        try:
            return (self.path / "run-id").read_text()
        except OSError:
            raise RunError(f"{self.path}: was not begun in a federation, so it cannot go on in one") from None

    def node_samples(self) -> dict[str, int]:
        """How many samples each node had when the run began; {} where no round has been begun."""
        file = self.path / "profile.json"
        try:
            return dict(json.loads(file.read_text())["node_samples"]) if file.is_file() else {}
        except (ValueError, KeyError, TypeError):
            raise RunError(f"{file}: was not written by exitflow; delete it, and it will be measured again") from None

    def lock(self) -> AbstractContextManager[None]:
        """Only one process trains a run at a time."""
        return locked(self.path / ".lock", f"{self.path}: another process is training this run")

    def append(self, record: Mapping[str, Any]) -> None:
        """Add the record of a round."""
        line = json.dumps(record, allow_nan=False) + "\n"
        with self.records_file.open("a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def records(self) -> list[Record]:
        """All whole records; a line that was cut off by a kill does not count."""
        return read_records(self.records_file)

    def last_record(self) -> Record:
        """Of a training that has ended."""
        if not (records := self.records()):
            raise RunError(f"{self.records_file}: the records of the rounds are gone")
        return records[-1]

    def forget_records_after(self, round: int) -> None:
        """Remove records of rounds that will be repeated, and what a kill has left half written.

        Those of all rounds before must be there: weightings, costs and the privacy loss are worked out from them.
        """
        kept = [record for record in self.records() if record["round"] <= round]
        if [record["round"] for record in kept] != list(range(1, round + 1)):
            problem = f"expected a record of each of the {round} rounds that are done, got {len(kept)}; restore it"
            raise RunError(f"{self.records_file}: {problem}, or start a new run")
        write_atomically(self.records_file, "".join(json.dumps(record) + "\n" for record in kept).encode())
        for path in filter(is_leftover, self.path.glob("**/.*")):
            path.unlink(missing_ok=True)

    def save_checkpoint(self, state: ServerState) -> None:
        """Make `state` the point from which a resumed run goes on."""
        save_state(self.checkpoint, state)

    def load_checkpoint(self) -> ServerState | None:
        """The last state that counts; None before the first round has ended."""
        return load_state(self.checkpoint) if self.checkpoint.is_file() else None


def save_state(path: Path, state: ServerState) -> None:
    """A state as a safetensors file that says which of its tensors are buffers."""
    description = {"round": state.round, "buffers": sorted(state.buffers)}
    save_tensors(path, state.tensors, {"exitflow": json.dumps(description)})


def load_state(path: Path) -> ServerState:
    """What `save_state` wrote."""
    tensors, metadata = load_tensors(path)
    try:
        description = json.loads(metadata["exitflow"])
        buffers = {name: tensors.pop(name) for name in description["buffers"]}
        return ServerState(description["round"], tensors, buffers)
    except (KeyError, ValueError, TypeError):
        raise RunError(f"{path}: was not written by exitflow") from None
