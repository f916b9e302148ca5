"""Train a system into a run directory, or go on where a run was cut off."""

from __future__ import annotations

import functools
import logging
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import numpy.typing as npt

from exitflow.config import require
from exitflow.data.dataset import Dataset
from exitflow.errors import RunError, TrainingError, suggestion
from exitflow.evaluation.accuracy import evaluate_plan
from exitflow.evaluation.blending import blended, fit_blends
from exitflow.evaluation.outputs import exit_outputs
from exitflow.federated.loop import run_rounds
from exitflow.federated.measuring import GradientTable, measure_gradients
from exitflow.federated.node_state import NodeStates
from exitflow.federated.options.around import Options
from exitflow.federated.options.faults import Attendance
from exitflow.federated.options.privacy import Privacy, PrivacyLoss, run_secret
from exitflow.federated.plan import TrainingPlan
from exitflow.federated.round_report import RoundReport
from exitflow.federated.sampling import sample_tasks
from exitflow.federated.types import Backend, ServerState, Status
from exitflow.federated.weighting import ExitProfile, measures_gradients
from exitflow.models.specs import SeparateNetworks
from exitflow.parts import Part
from exitflow.runs.arguments import check_callable, check_dataset, check_device, check_system, checked_path
from exitflow.runs.backends import Place, check_backend, one_thread, open_backend
from exitflow.runs.callbacks import Callback, RoundDone, load_callbacks
from exitflow.runs.losses import LossWatch
from exitflow.runs.records import Profile, Record, Validation, WireBytes
from exitflow.runs.round_costs import forward_multiply_adds, link_bytes
from exitflow.runs.runs import NOISE_SECRET, PROFILE, Accepted, Run, is_run
from exitflow.runs.states import check_fit, load_state, save_state, start_from, whole, with_weights
from exitflow.system.assembly import Assembly, dataset_of
from exitflow.system.system import System, same_training, with_absolute_dir
from exitflow.tensors import load_tensors, num_bytes, take
from exitflow.theory.error_costs import calibrated_costs

if TYPE_CHECKING:
    from exitflow.flower.joining import Membership, Session

log = logging.getLogger("exitflow.runs")

FloatArray = npt.NDArray[np.float64]
Observer = Callable[[float], None]  # is told the rounds done so far, with fractions


def train(
    system: System,
    out: str | Path,
    *,
    backend: str = "serial",
    workers: int | None = None,
    address: str | None = None,
    federation: Membership | None = None,
    dataset: Dataset | None = None,
    device: str = "cpu",
    observer: Observer | None = None,
    status: Status | None = None,
    callbacks: Sequence[Part] = (),
    start: Run | str | Path | None = None,
) -> Run:
    """Train `system` into the new directory `out`. The result does not depend on the backend or its workers.

    `address` is that of a Ray cluster; `federation` says where the nodes of a real federation meet, for backend
    "flower". `status` is told what is being waited for. `callbacks` see every round, and may end the training: see
    `exitflow.runs.callbacks`. `start` is a run, or a file of weights, whose weights the training begins with instead of
    fresh ones.
    """
    check_system(system)
    out = checked_path(out)
    check_dataset(dataset)
    check_callable(observer, "observer")
    system.training.check_own_parts()
    told = load_callbacks(callbacks)
    check_backend(backend)
    check_device(device)
    place = Place(workers, address, system.federation, status or _silent)
    dataset = dataset or dataset_of(system)
    if federation:
        from exitflow.flower.joining import join, new_run_id  # needs Flower

        dataset.require("validation", "the server of a federation")  # else nobody knows what came out
        run_id = new_run_id()
        with join(federation, system, run_id, run=out, status=status) as session:
            assembly = Assembly(system, dataset, session.samples)
            assembly.profile  # noqa: B018 - as below
            run = Run.create(out, with_absolute_dir(system).to_toml())
            run.write_run_id(run_id)
            if start:
                save_state(run.start_file, _given_weights(start, assembly))
            training = Training(assembly, run, device, told)
            return training.run(lambda state: _joined(session, assembly), observer)
    dataset.require("validation", "a training")
    assembly = Assembly(system, dataset)
    assembly.profile  # noqa: B018 - whatever does not fit is refused before anything is written
    given = _given_weights(start, assembly) if start else None
    run = Run.create(out, with_absolute_dir(system).to_toml())
    if given:
        save_state(run.start_file, given)
    return Training(assembly, run, device, told).run_at(backend, place, observer)


def resume(
    path: str | Path,
    *,
    backend: str = "serial",
    workers: int | None = None,
    address: str | None = None,
    federation: Membership | None = None,
    dataset: Dataset | None = None,
    device: str = "cpu",
    observer: Observer | None = None,
    status: Status | None = None,
    accept: Collection[Accepted] = (),
    callbacks: Sequence[Part] = (),
) -> Run:
    """Go on with the run in `path`. The result is that of an uninterrupted run, bit for bit.

    What would change that is refused, unless it is among what to `accept`: an edited spec.toml, or lost states of
    nodes (momentum, and what compression left over), which then begin anew.
    """
    run = Run(checked_path(path))
    check_dataset(dataset)
    check_callable(observer, "observer")
    check_backend(backend)
    check_device(device)
    for each in accept:
        choices = get_args(Accepted)
        require(each in choices, "accept", f"there is nothing called {each!r} to accept{suggestion(each, choices)}")
    if run.finished:
        run.state()  # a damaged model is not taken for the end
        return run
    run.check_unchanged(accept)
    system = run.system
    place = Place(workers, address, system.federation, status or _silent)
    dataset = dataset or dataset_of(system)
    dataset.require("validation", "a training")
    if federation:
        from exitflow.flower.joining import join  # needs Flower

        known = run.profile.node_samples
        with join(federation, system, run.run_id(), run=run.path, known=known, status=status) as session:
            assembly = Assembly(system, dataset, session.samples)
            training = Training(assembly, run, device, load_callbacks(callbacks))
            return training.run(lambda state: _joined(session, assembly), observer)
    if run.in_federation:
        raise RunError(f"{run.path}: was begun in a federation, whose nodes have the data; go on with --superlink")
    assembly = Assembly(system, dataset)
    if run.profile.node_samples not in ({}, assembly.samples):
        raise RunError(f"{run.path}: was begun with other data than these, which give nodes other numbers of samples")
    training = Training(assembly, run, device, load_callbacks(callbacks))
    return training.run_at(backend, place, observer, lost_states="lost-states" in accept)


def _given_weights(source: Run | str | Path, assembly: Assembly) -> ServerState:
    """The weights of a run, or of a file of weights by name, as what a training begins with."""
    path = source.path if isinstance(source, Run) else checked_path(source)
    if path.is_file():
        return start_from(load_tensors(path)[0], assembly.model, source=str(path))
    run = Run(path)
    return start_from(run.state().tensors, assembly.model, source=str(run.path))


@contextmanager
def _joined(session: Session, assembly: Assembly) -> Iterator[Backend]:
    with one_thread():
        yield session.backend(assembly)


def check_somebody_trained(records: Sequence[Record]) -> None:
    """Refuse to call a model trained that no update has changed."""
    if not any(record.losses for record in records):
        problem = f"no node has trained in any of the {len(records):,} rounds: none was drawn, or no update counted"
        raise TrainingError(f"{problem}; see training.participation, and the records in rounds.jsonl")


def _silent(text: str) -> None:
    """Tell nobody, where nobody asked to be told."""


def resume_or_train(system: System, path: Path, **execution: Any) -> Run:
    """The run of `system` in `path`: found there, gone on with, or trained."""
    if not is_run(path):
        return train(system, path, **execution)
    if not same_training(Run(path).system, system):
        raise RunError(f"{path}: holds a run of another system; choose another --out")
    return resume(path, **execution)


def _measured_gradients(run: Run, shape: tuple[int, ...]) -> GradientTable | None:
    """What an earlier part of this run measured."""
    known = run.profile
    try:
        table = None if known.gradients is None else GradientTable.from_json(known.gradients)
        if known.num_steps is not None and (table is None or table.variance.shape == shape):
            return table
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    problem = "is damaged, or was not written by exitflow: it does not say what was measured of these nodes and exits"
    raise RunError(f"{run.path / PROFILE}: {problem}; delete it, and that will be measured again")


class Training:
    """The rounds of Algorithm 1, with their records and checkpoints."""

    def __init__(self, assembly: Assembly, run: Run, device: str = "cpu", callbacks: Sequence[Callback] = ()) -> None:
        self._assembly = assembly
        self._spec = assembly.system.training
        self._run = run
        self._device = device
        self._callbacks = callbacks
        self._coverage = functools.cache(assembly.model.coverage)
        self._multiply_adds = functools.cache(assembly.multiply_adds)
        self._drawn: Counter[str] = Counter()  # node -> rounds in which it was asked, for the privacy loss ...
        self._counted_rounds = 0  # ... of so many rounds
        self._settled: tuple[NodeStates, ...] = ()  # what nodes keep, which is waited for at the end of a round
        self._kept: tuple[NodeStates, ...] = ()  # what must be there of nodes that have trained

    def run_at(self, backend_name: str, place: Place, observer: Observer | None, *, lost_states: bool = False) -> Run:
        """With a backend by name, which trains the nodes of this program's own data.

        What nodes keep between rounds must then be in the run directory, unless `lost_states` are accepted; but a
        cluster of other machines has it there.
        """
        here = backend_name in ("serial", "processes")  # whose files are this process's to settle
        folder = self._run.states_folder
        trainer = self._assembly.trainer(folder, device=self._device, settled_together=here)
        self._settled = tuple(states for states in (trainer.states, trainer.residuals) if states and here)
        if not lost_states and place.address is None:
            self._kept = tuple(states for states in (trainer.states, trainer.residuals) if states)
        return self.run(lambda state: open_backend(backend_name, trainer, state, place=place), observer)

    def run(self, opened: Callable[[ServerState], AbstractContextManager[Backend]], observer: Observer | None) -> Run:
        """All rounds that are left, and then the trained model."""
        with self._run.lock():
            if self._run.finished:  # by another process, while this one was getting ready
                return self._run
            state = self._run.load_checkpoint() or self._initial_state()
            check_fit(self._assembly.model, state, source=str(self._run.path))
            self._run.forget_records_after(state.round)
            with opened(state) as backend:
                for state in self.rounds(state, backend, observer):  # noqa: B007 - the last one counts
                    pass
            if state.round == self._spec.rounds:
                check_somebody_trained(self._run.records)
                save_state(self._run.model_file, whole(self._assembly.model, state))
                self._run.checkpoint_file.unlink(missing_ok=True)
                shutil.rmtree(self._run.path / "features", ignore_errors=True)
                log.info("%s: training has ended after %d rounds", self._run.path, state.round)
        return self._run

    def rounds(self, state: ServerState, backend: Backend, observer: Observer | None = None) -> Iterator[ServerState]:
        """The state after each round, once it is safely on disk."""
        plan = self._plan(backend)

        def progress(round: int, done: int, total: int) -> None:
            if observer:
                observer(round - 1 + done / total)

        if observer:
            observer(state.round)
        attendance, watch = Attendance.of(self._run.records), LossWatch()
        self._check_kept(plan, attendance, state.round)
        options = Options(self._assembly.system.federation, self._privacy(), attendance, progress)
        for state, report in run_rounds(plan, state, backend, options):
            watch.see(report)
            record = self._record(state, report)
            for states in self._settled:
                states.settle(report.tasks)
            self._run.append(record)
            self._run.save_checkpoint(state)
            self._log(record)
            yield state
            done = RoundDone(state.round, record, state, self._run)
            answers = [callback(done) for callback in self._callbacks]
            if any(answers):
                log.info("%s: a callback has ended training after round %d", self._run.path, state.round)
                return

    def _log(self, record: Record) -> None:
        total, validation = self._spec.rounds, record.validation
        found = f"; {100 * validation.accuracy:.1f} % right as served, on validation data" if validation else ""
        level = logging.INFO if validation else logging.DEBUG
        log.log(level, "round %d of %d took %.1f s%s", record.round, total, record.seconds, found)

    def _initial_state(self) -> ServerState:
        """What training begins with: the weights that were given, or fresh ones."""
        given = self._run.start_file
        return load_state(given) if given.is_file() else self._assembly.initial_state()

    def _plan(self, backend: Backend) -> TrainingPlan:
        assembly = self._assembly
        nodes = [node.name for node in assembly.system.topology.nodes]
        return TrainingPlan(nodes, self._profile(nodes, backend), self._spec.exit_weighting, self._coverage, self._spec)

    def _check_kept(self, plan: TrainingPlan, attendance: Attendance, round: int) -> None:
        """Refuse to go on without what nodes have kept, from which their next updates follow."""
        if not self._kept:
            return
        attendance.recall(plan, round)
        for states in self._kept:
            if lost := states.missing(attendance.trained):
                more = f", and of {len(lost) - 1:,} more nodes" if len(lost) > 1 else ""
                advice = "restore it, or begin anew there with --accept lost-states"
                raise RunError(f"{states.folder}: lacks what node {lost[0]!r} has kept{more}; {advice}")

    def _privacy(self) -> Privacy | None:
        federation = self._assembly.system.federation
        if federation.clip_norm is None:
            return None
        return Privacy.of(federation, run_secret(self._run.path / NOISE_SECRET))

    def _profile(self, nodes: list[str], backend: Backend) -> ExitProfile:
        """Measured once, before the first round, and then kept with the run."""
        assembly = self._assembly
        if (self._run.path / PROFILE).is_file():
            table = _measured_gradients(self._run, assembly.profile.probabilities.shape)
        elif measures_gradients(self._spec.named_weighting):
            table = measure_gradients(nodes, assembly.profile.probabilities, self._initial_state(), backend)
        else:
            table = None
        profile = assembly.measured_profile(table) if table else assembly.profile
        self._run.write_profile(self._written(profile, table))
        return profile

    def _written(self, profile: ExitProfile, table: GradientTable | None) -> Profile:
        costs = self._assembly.exit_costs
        variance = profile.gradient_variance
        return Profile(
            num_steps=self._assembly.num_steps,
            serve_share=tuple(profile.serve_share.tolist()),
            multiply_adds=tuple(cost.multiply_adds for cost in costs),
            num_parameters=tuple(cost.num_parameters for cost in costs),
            exit_samples=tuple(profile.exit_samples.tolist()),
            node_samples=self._assembly.samples,
            gradient_variance=None if variance is None else tuple(variance.tolist()),
            gradients=table.to_json() if table else None,
            error_terms=self._error_terms(profile),
        )

    def _error_terms(self, profile: ExitProfile) -> dict[str, float] | None:
        """What the weights of the last round cost by Theorem 1, calibrated; None where nothing was measured."""
        if profile.bound is None:
            return None
        weights = self._spec.exit_weighting(profile, self._spec.rounds)
        return calibrated_costs(profile.bound).terms(weights).to_json()

    def _record(self, state: ServerState, report: RoundReport) -> Record:
        def covered_bytes(*exits: int) -> int:
            return num_bytes(take(state.tensors, self._coverage(*self._sent(exits))))

        assembly = self._assembly
        privacy = self._privacy_loss(report.round)
        return Record(
            report.round,
            tuple(report.exit_weights.tolist()),
            link_bytes(assembly.system.topology, report.tasks, covered_bytes),
            {str(exit): float(np.mean(values)) for exit, values in sorted(report.losses.items())},
            self._validate(state),
            num_asked=len(report.tasks),
            num_tasks=report.num_updates,
            dropped=tuple(report.dropped),
            missing=report.missing,
            refused=report.refused,
            state_lost=tuple(report.state_lost),
            lost_weight=() if report.lost_weight is None else tuple(report.lost_weight.tolist()),
            attendance=report.attendance if assembly.system.federation.on_missing == "reweight" else {},
            wire_bytes={node: WireBytes(*sent) for node, sent in report.wire_bytes.items()},
            privacy=asdict(privacy) if privacy else None,
            multiply_adds=forward_multiply_adds(
                report.tasks,
                self._spec,
                num_steps=assembly.num_steps,
                samples=assembly.samples,
                cost=self._multiply_adds,
            ),
            seconds=report.seconds,
        )

    def _privacy_loss(self, round: int) -> PrivacyLoss | None:
        """For the node that is hit hardest: sampled most often so far, or the most likely to be."""
        if self._assembly.system.federation.noise_multiplier is None:
            return None
        probabilities = self._assembly.profile.probabilities
        # which weights does not matter: none that is above 0 changes who is drawn
        joint_weights = np.ones(probabilities.shape[1]) if self._spec.trains_all_exits else None
        while self._counted_rounds < round:
            self._counted_rounds += 1
            tasks = sample_tasks(
                list(self._assembly.samples),
                probabilities,
                round=self._counted_rounds,
                seed=self._spec.seed,
                joint_weights=joint_weights,
            )
            self._drawn.update(task.node for task in tasks)
        most = max(self._drawn.values(), default=0)
        largest = (probabilities.max(axis=1) if self._spec.trains_all_exits else probabilities.sum(axis=1)).max()
        return PrivacyLoss.after(self._assembly.system.federation, most, round, float(largest))

    def _sent(self, exits: tuple[int, ...]) -> tuple[int, ...]:
        """Not separate networks that one node alone trains: what it has trained is what it would be sent."""
        if not isinstance(self._assembly.system.model, SeparateNetworks):
            return exits
        num_nodes = (self._assembly.profile.probabilities > 0).sum(axis=0)
        return tuple(exit for exit in exits if num_nodes[exit - 1] > 1)

    def _validate(self, state: ServerState) -> Validation | None:
        """Accuracy on validation data: of each exit, and of the system as served."""
        if state.round % self._spec.evaluate_every and state.round != self._spec.rounds:
            return None
        assembly = self._assembly
        model = with_weights(assembly.model, state, source=str(self._run.path))
        outputs = exit_outputs(model, assembly.dataset.validation, assembly.dataset.preparation, device=self._device)
        if self._spec.blends_answers:
            outputs = blended(outputs, fit_blends(outputs))
        evaluation = evaluate_plan(outputs, assembly.system.topology, assembly.plan)
        served = tuple(served.accuracy for served in evaluation.exits)
        metrics = {name: float(metric(outputs)) for name, metric in self._spec.named_metrics.items()}
        return Validation(evaluation.accuracy, tuple(evaluation.exit_accuracy), served, metrics)
