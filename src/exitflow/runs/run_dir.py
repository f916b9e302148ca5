"""The directory of a run, in which nothing that was finished is ever lost.

    spec.toml              the system, resolved
    profile.json           what the weighting knew
    rounds.jsonl           a record per round
    checkpoint.safetensors the global model after the last round that counts
    run-id                 under which the nodes of a federation keep their states
    nodes/, residuals/     momentum of each node, where it is kept between rounds; what compression lost
    noise.secret           where updates are clipped: what their noise comes from
    start.safetensors      the weights that the training began with, where these were given
    model.safetensors      the trained model, once training has ended

A round first gets its record, then its checkpoint. A run that is killed in between repeats the round: records that
are newer than the checkpoint do not count and are removed when it is resumed. A checkpoint holds digests of itself,
of the records before it and of the other files that decide what comes next, so that nothing damaged is gone on with.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from exitflow.config import parse_json, read_toml
from exitflow.errors import RunError
from exitflow.federated.types import ServerState
from exitflow.files import MEDIUM_FILE, append_line, is_leftover, locked, make_folder, read_file, write_atomically
from exitflow.runs.records import Record, read_lines, read_records
from exitflow.tensors import load_tensors, read_description, save_tensors

SPEC, PROFILE = "spec.toml", "profile.json"
EVIDENCE = (SPEC, PROFILE, "run-id", "noise.secret")  # files that decide how a run goes on
Accepted = Literal["edited-spec", "lost-states"]  # what a user may knowingly go on with

MEMORY = "server memory: "  # before the names of what a server step of one's own remembers; no module has such a name


class RunDir:
    """Reads and writes the files of one run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.spec = self.path / SPEC
        self.records_file = self.path / "rounds.jsonl"
        self.checkpoint = self.path / "checkpoint.safetensors"
        self.model = self.path / "model.safetensors"
        self.start = self.path / "start.safetensors"
        self.node_states = self.path / "nodes"
        self._records_digest = _blake(b"")  # of the records so far

    @staticmethod
    def open(path: str | Path) -> RunDir:
        """Open the directory of an existing run."""
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
            make_folder(run.path)
            write_atomically(run.spec, spec.encode())
        except OSError as error:
            raise RunError(f"{run.path}: cannot be written: {error.strerror}") from None
        return run

    @property
    def finished(self) -> bool:
        """Whether the training has ended, with a model."""
        return self.model.is_file()

    def write_run_id(self, run_id: str) -> None:
        """Under what name the nodes of a federation keep their states of this run."""
        write_atomically(self.path / "run-id", run_id.encode())

    @property
    def in_federation(self) -> bool:
        """Whether its nodes are elsewhere."""
        return (self.path / "run-id").is_file()

    def run_id(self) -> str:
        """The name that `write_run_id` wrote."""
        try:
            return (self.path / "run-id").read_text()
        except OSError:
            raise RunError(f"{self.path}: was not begun in a federation, so it cannot go on in one") from None

    def node_samples(self) -> dict[str, int]:
        """How many samples each node had when the run began; {} where no round has been begun."""
        file = self.path / PROFILE
        try:
            return dict(parse_json(read_file(file, MEDIUM_FILE))["node_samples"]) if file.is_file() else {}
        except (ValueError, KeyError, TypeError):
            raise RunError(f"{file}: was not written by exitflow; delete it, and it will be measured again") from None

    def lock(self) -> AbstractContextManager[None]:
        """Only one process trains a run at a time."""
        return locked(self.path / ".lock", f"{self.path}: another process is training this run")

    def append(self, record: Mapping[str, Any]) -> None:
        """Add the record of a round."""
        line = json.dumps(record, allow_nan=False).encode()
        self._records_digest.update(line + b"\n")
        append_line(self.records_file, line)

    def records(self) -> list[Record]:
        """All whole records; a line that was cut off by a kill does not count."""
        return read_records(self.records_file)

    def last_record(self) -> Record:
        """The last record of a training that has ended."""
        if not (records := self.records()):
            raise RunError(f"{self.records_file}: the records of the rounds are gone")
        return records[-1]

    def check_unchanged(self, accept: Collection[Accepted] = ()) -> None:
        """Refuse to go on where a file was edited, damaged or lost since the last checkpoint, which would show later.

        Checkpoints of versions that kept no digests vouch for nothing.
        """
        then = self._vouched_for()
        for name in EVIDENCE:
            path, digest = self.path / name, _digest_of(self.path / name)
            if digest == then.get(name, digest) or (digest is None and name == PROFILE):  # it is measured again
                continue
            if name != SPEC:
                advice = ", or delete it, and it will be measured again" if name == PROFILE else ", or start a new run"
                raise RunError(f"{path}: is not what it was when the run was cut off; restore it{advice}")
            if "edited-spec" not in accept:
                problem = "was edited after the run was begun, so that its rounds would be of two different systems"
                raise RunError(f"{path}: {problem}; undo that, or ask for it with --accept edited-spec")

    def forget_records_after(self, round: int) -> None:
        """Remove records of rounds that will be repeated, and what a kill has left half written.

        Those of all rounds before must be there as they were written: weightings, costs and the privacy loss are
        worked out from them.
        """
        kept = [line for line, record in read_lines(self.records_file) if record["round"] <= round]
        if [json.loads(line)["round"] for line in kept] != list(range(1, round + 1)):
            problem = f"expected a record of each of the {round} rounds that are done, got {len(kept)}; restore it"
            raise RunError(f"{self.records_file}: {problem}, or start a new run")
        text = b"".join(kept)
        self._records_digest = _blake(text)
        digest = self._records_digest.hexdigest()
        if self._vouched_for().get(self.records_file.name, digest) != digest:
            problem = "the records are not those that were written; restore it, or start a new run"
            raise RunError(f"{self.records_file}: {problem}")
        write_atomically(self.records_file, text)
        for path in filter(is_leftover, self.path.glob("**/.*")):
            path.unlink(missing_ok=True)

    def save_checkpoint(self, state: ServerState) -> None:
        """Make `state` the point from which a resumed run goes on."""
        digests = {**self._evidence, self.records_file.name: self._records_digest.hexdigest()}
        save_state(self.checkpoint, state, digests)

    def load_checkpoint(self) -> ServerState | None:
        """The last state that counts; None before the first round has ended."""
        return load_state(self.checkpoint) if self.checkpoint.is_file() else None

    def _vouched_for(self) -> dict[str, str]:
        """The digests that files had when the last checkpoint was written."""
        if not self.checkpoint.is_file():
            return {}
        try:
            return dict(parse_json((read_description(self.checkpoint) or "{}").encode()).get("digests", {}))
        except (ValueError, TypeError, AttributeError):
            raise RunError(f"{self.checkpoint}: is damaged, or was not written by exitflow") from None

    @cached_property
    def _evidence(self) -> dict[str, str]:
        """The digests of the files that stay as they are from the first round on."""
        found = {name: _digest_of(self.path / name) for name in EVIDENCE}
        return {name: digest for name, digest in found.items() if digest}


def _digest_of(path: Path) -> str | None:
    """The digest of a file of the run, None for no file; of its system without where the data lie, as they may move."""
    if not path.is_file():
        return None
    if path.name != SPEC:
        return _blake(read_file(path, MEDIUM_FILE)).hexdigest()
    table = read_toml(path, MEDIUM_FILE)
    if isinstance(data := table.get("data"), dict):
        data.pop("dir", None)
    return _blake(json.dumps(table, sort_keys=True, default=str).encode()).hexdigest()


def _blake(data: bytes) -> hashlib.blake2b:
    return hashlib.blake2b(data, digest_size=16)


def save_state(path: Path, state: ServerState, digests: Mapping[str, str] | None = None) -> None:
    """A state as a safetensors file that says which of its tensors are buffers, and what other files then were."""
    memory = {f"{MEMORY}{name}": tensor for name, tensor in state.memory.items()}
    description = {"round": state.round, "buffers": sorted(state.buffers), "digests": digests or {}}
    save_tensors(path, {**state.tensors, **memory}, json.dumps(description))


def load_state(path: Path) -> ServerState:
    """Read the state that `save_state` wrote."""
    tensors, description = load_tensors(path)
    try:
        known = parse_json(description.encode())
        buffers = {name: tensors.pop(name) for name in known["buffers"]}
        memory = {name: tensors.pop(name) for name in list(tensors) if name.startswith(MEMORY)}
        remembered = {name.removeprefix(MEMORY): tensor for name, tensor in memory.items()}
        return ServerState(known["round"], tensors, buffers, remembered)
    except (KeyError, ValueError, TypeError):
        raise RunError(f"{path}: is damaged, or was not written by exitflow") from None
