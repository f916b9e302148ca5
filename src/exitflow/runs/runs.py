"""A run on disk, in which nothing that was finished is ever lost: one type for whoever trains, reads or asks it.

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

What a run has written is read without PyTorch, which is loaded for its weights alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from exitflow.config import encode, read_toml
from exitflow.errors import MissingExtraError, RunError
from exitflow.evaluation.accuracy import Evaluation, evaluate_plan
from exitflow.evaluation.blending import Blend, blended, fit_blends
from exitflow.evaluation.gains import fit_gains
from exitflow.evaluation.outputs import ExitOutputs, exit_outputs
from exitflow.files import MEDIUM_FILE, append_line, is_leftover, locked, make_folder, read_file, write_atomically
from exitflow.models.specs import without_weights
from exitflow.parts import Part, part_name
from exitflow.routing import GAIN
from exitflow.runs.losses import TrainingLosses
from exitflow.runs.notebook import run_html
from exitflow.runs.records import Profile, Record, read_lines, read_profile, read_records
from exitflow.runs.training_costs import TrainingCosts
from exitflow.system.system import System, load_resolved, serving_as

if TYPE_CHECKING:
    from pandas import DataFrame

    from exitflow.data.dataset import Dataset
    from exitflow.federated.types import ServerState
    from exitflow.models.nested import NestedModel

SPEC, PROFILE, ROUNDS, RUN_ID, NOISE_SECRET = "spec.toml", "profile.json", "rounds.jsonl", "run-id", "noise.secret"
EVIDENCE = (SPEC, PROFILE, RUN_ID, NOISE_SECRET)  # files that decide how a run goes on
Accepted = Literal["edited-spec", "lost-states"]  # what a user may knowingly go on with


class Run:
    """A training on disk, begun, cut off or finished."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not is_run(self.path):
            raise RunError(f"{self.path}: is not a run directory (it has no {SPEC})")
        self._records_digest = _blake(b"")  # of the records so far

    @staticmethod
    def create(path: str | Path, spec: str) -> Run:
        """A new run; refuses a directory that holds anything, but for what a kill has left half written."""
        path = Path(path)
        if is_run(path):
            raise RunError(f"{path}: holds a run already; resume it with --resume, or choose another directory")
        if path.exists() and (not path.is_dir() or not all(map(is_leftover, path.iterdir()))):
            raise RunError(f"{path}: is not an empty directory; choose another one for the run")
        try:
            make_folder(path)
            write_atomically(path / SPEC, spec.encode())
        except OSError as error:
            raise RunError(f"{path}: cannot be written: {error.strerror}") from None
        return Run(path)

    # What it is, and what it has written

    @property
    def name(self) -> str:
        """The name of its directory."""
        return self.path.name

    @cached_property
    def system(self) -> System:
        """The system that was trained."""
        return load_resolved(self.path / SPEC)

    @property
    def records(self) -> list[Record]:
        """A record per round, as far as it has come; a line that a kill has cut off does not count."""
        try:
            found = (self.path / ROUNDS).stat()
        except OSError:
            return read_records(self.path / ROUNDS)
        return self._records_of(found.st_mtime_ns, found.st_size)

    def _records_of(self, *version: int) -> list[Record]:
        """Read once, until the file changes."""
        known = self.__dict__.get("_known_records")
        if known is None or known[0] != version:
            known = self.__dict__["_known_records"] = (version, read_records(self.path / ROUNDS))
        return list(known[1])

    @property
    def last_record(self) -> Record:
        """The record of the last round."""
        if not (records := self.records):
            raise RunError(f"{self.path / ROUNDS}: the records of the rounds are gone")
        return records[-1]

    @property
    def profile(self) -> Profile:
        """What the weighting knew; an empty one before the first round."""
        return read_profile(self.path / PROFILE)

    @property
    def costs(self) -> TrainingCosts:
        """What all rounds so far have cost."""
        return TrainingCosts.of(self.records)

    @property
    def losses(self) -> TrainingLosses:
        """Which nodes' updates did not count in the rounds so far, and what went with them."""
        return TrainingLosses.of(self.records)

    def to_pandas(self) -> DataFrame:
        """A row for each round, with its losses, weights and, where it was validated, accuracies."""
        try:
            import pandas
        except ModuleNotFoundError:
            raise MissingExtraError("pandas", "pandas") from None
        rows = [{"round": record.round, **dict(record.figures())} for record in self.records]
        return pandas.DataFrame(rows).set_index("round") if rows else pandas.DataFrame()

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return run_html(self)

    # Its weights, and what they answer

    @property
    def model_file(self) -> Path:
        """Where the trained model lies, once training has ended."""
        return self.path / "model.safetensors"

    @property
    def checkpoint_file(self) -> Path:
        """Where the state after the last round lies, until training has ended."""
        return self.path / "checkpoint.safetensors"

    @property
    def start_file(self) -> Path:
        """Where the weights lie that the training began with, where these were given."""
        return self.path / "start.safetensors"

    @property
    def finished(self) -> bool:
        """Whether the training has ended, with a model."""
        return self.model_file.is_file()

    def state(self) -> ServerState:
        """The trained model, or where an unfinished training stands."""
        from exitflow.runs.states import load_state

        if self.finished:
            return load_state(self.model_file)
        if (state := self.load_checkpoint()) is None:
            raise RunError(
                f"{self.path}: no round has been finished yet; go on with: exitflow train --resume {self.path}"
            )
        return state

    def model(self, dataset: Dataset | None = None) -> NestedModel:
        """The network with its trained weights."""
        from exitflow.runs.states import with_weights
        from exitflow.system.assembly import Assembly

        system = self.system
        if self.finished:  # what is saved then is whole, so the file that the weights once came from is not needed
            system = replace(system, model=without_weights(system.model))
        model = Assembly(system, self._dataset(dataset)).model
        return with_weights(model, self.state(), source=str(self.path))

    def outputs(self, dataset: Dataset | None = None, *, device: str = "cpu") -> ExitOutputs:
        """The answers of all exits on the test set: one pass, from which any serving setting can be evaluated."""
        from exitflow.runs.arguments import check_device

        check_device(device)
        dataset = self._dataset(dataset)
        return blended(self.own_outputs(dataset, device=device), self.blends(dataset, device=device))

    def validation_outputs(self, dataset: Dataset | None = None, *, device: str = "cpu") -> ExitOutputs:
        """The answers of all exits to validation data, as they are served: what thresholds and plans are made from."""
        dataset = self._dataset(dataset)
        validation = dataset.require("validation", "a plan from what a run's exits say")
        own = exit_outputs(self.model(dataset), validation, dataset.preparation, device=device)
        return blended(own, fit_blends(own)) if self.system.training.blends_answers else own

    def own_outputs(self, dataset: Dataset, *, device: str = "cpu") -> ExitOutputs:
        """What each exit says to the test set by itself."""
        dataset = self._dataset(dataset)
        test = dataset.require("test", "an evaluation")
        return exit_outputs(self.model(dataset), test, dataset.preparation, device=device)

    def blends(self, dataset: Dataset, *, device: str = "cpu") -> tuple[Blend, ...]:
        """How exits answer together; none where each answers by itself."""
        if not self.system.training.blends_answers:
            return ()
        dataset = self._dataset(dataset)
        validation = dataset.require("validation", "a run whose exits answer together (training.answers)")
        return fit_blends(exit_outputs(self.model(dataset), validation, dataset.preparation, device=device))

    def _dataset(self, given: Dataset | None) -> Dataset:
        """As the model takes it."""
        from exitflow.system.assembly import dataset_of, prepared_for

        return prepared_for(self.system, given) if given else dataset_of(self.system)

    # What a training asks of it

    @property
    def states_folder(self) -> Path:
        """Where nodes keep their momentum; what compression left over lies beside it."""
        return self.path / "nodes"

    def write_run_id(self, run_id: str) -> None:
        """Under what name the nodes of a federation keep their states of this run."""
        write_atomically(self.path / RUN_ID, run_id.encode())

    @property
    def in_federation(self) -> bool:
        """Whether its nodes are elsewhere."""
        return (self.path / RUN_ID).is_file()

    def run_id(self) -> str:
        """What `write_run_id` wrote."""
        try:
            return (self.path / RUN_ID).read_text()
        except OSError:
            raise RunError(f"{self.path}: was not begun in a federation, so it cannot go on in one") from None

    def lock(self) -> AbstractContextManager[None]:
        """Only one process trains a run at a time."""
        return locked(self.path / ".lock", f"{self.path}: another process is training this run")

    def write_profile(self, profile: Profile) -> None:
        """Keep what the weighting knows."""
        write_atomically(self.path / PROFILE, json.dumps(encode(profile), indent=1).encode())

    def append(self, record: Record) -> None:
        """Add the record of a round."""
        line = record.to_json()
        self._records_digest.update(line + b"\n")
        append_line(self.path / ROUNDS, line)

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
        file = self.path / ROUNDS
        kept = [(line, record) for line, record in read_lines(file) if record.round <= round]
        if [record.round for _, record in kept] != list(range(1, round + 1)):
            problem = f"expected a record of each of the {round} rounds that are done, got {len(kept)}; restore it"
            raise RunError(f"{file}: {problem}, or start a new run")
        text = b"".join(line for line, _ in kept)
        self._records_digest = _blake(text)
        digest = self._records_digest.hexdigest()
        if self._vouched_for().get(ROUNDS, digest) != digest:
            raise RunError(f"{file}: the records are not those that were written; restore it, or start a new run")
        write_atomically(file, text)
        for path in filter(is_leftover, self.path.glob("**/.*")):
            path.unlink(missing_ok=True)

    def save_checkpoint(self, state: ServerState) -> None:
        """Make `state` the point from which a resumed run goes on."""
        from exitflow.runs.states import save_state

        save_state(self.checkpoint_file, state, {**self._evidence, ROUNDS: self._records_digest.hexdigest()})

    def load_checkpoint(self) -> ServerState | None:
        """The last state that counts; None before the first round has ended."""
        from exitflow.runs.states import load_state

        return load_state(self.checkpoint_file) if self.checkpoint_file.is_file() else None

    def _vouched_for(self) -> dict[str, str]:
        """The digests that files had when the last checkpoint was written."""
        from exitflow.runs.states import saved_digests

        return saved_digests(self.checkpoint_file) if self.checkpoint_file.is_file() else {}

    @cached_property
    def _evidence(self) -> dict[str, str]:
        """The digests of the files that stay as they are from the first round on."""
        found = {name: _digest_of(self.path / name) for name in EVIDENCE}
        return {name: digest for name, digest in found.items() if digest}


def is_run(path: Path) -> bool:
    """Whether a run lies there."""
    return (path / SPEC).is_file()


def _digest_of(path: Path) -> str | None:
    """The digest of a file of the run; None for no file. The system counts without where its data lie."""
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


def evaluate(
    run: Run | str | Path,
    *,
    serving: str | None = None,
    confidence: Part = "entropy",
    dataset: Dataset | None = None,
    outputs: ExitOutputs | None = None,
) -> Evaluation:
    """How accurately the run's system answers on test data, as planned or at another serving setting.

    `confidence` ranks what a node sees: "entropy", "max-softmax", "margin", a function of (N, C) logits, or
    "gain": by how much more often deeper answers are right, as validation data say.
    `outputs`, from `run.outputs()`, saves the pass over the test set when one run is evaluated often.
    """
    from exitflow.runs.arguments import check_dataset, checked_path

    run = run if isinstance(run, Run) else Run(checked_path(run))
    check_dataset(dataset)
    topology = run.system.topology
    if serving is not None:
        topology = serving_as(run.system, serving)
    kind = part_name("confidence", confidence)
    outputs = outputs or run.outputs(dataset)
    if kind == GAIN and not outputs.gains:
        outputs = replace(outputs, gains=fit_gains(run.validation_outputs(dataset)))
    return evaluate_plan(outputs, topology, confidence_kind=kind)
