"""Train a system into a run directory, or go on where a run was cut off."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from exitflow.data.dataset import Dataset
from exitflow.evaluation.accuracy import evaluate_plan
from exitflow.evaluation.outputs import exit_outputs
from exitflow.experiments.assembly import Assembly, dataset_of
from exitflow.experiments.runs import Run, with_weights
from exitflow.experiments.system import System
from exitflow.federated.backends import Place, Status, open_backend
from exitflow.federated.faults import Attendance
from exitflow.federated.loop import RoundReport, TrainingPlan, measure_gradient_variance, run_rounds
from exitflow.federated.privacy import Privacy, PrivacyLoss, run_secret
from exitflow.federated.run_dir import RunDir, save_state
from exitflow.federated.sampling import sample_tasks
from exitflow.federated.traffic import link_bytes
from exitflow.federated.types import Backend, ServerState
from exitflow.federated.weighting import NEEDS_GRADIENT_VARIANCE, WEIGHTINGS, ExitProfile
from exitflow.files import write_atomically

if TYPE_CHECKING:
    from exitflow.experiments.federation import Membership

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
    observer: Observer | None = None,
    status: Status | None = None,
) -> Run:
    """Train `system` into the new directory `out`. The result does not depend on the backend or its workers.

    `address` is that of a Ray cluster; `federation` says where the nodes of a real federation meet, for backend
    "flower". `status` is told what is being waited for.
    """
    dataset = dataset or dataset_of(system)
    if federation:
        from exitflow.experiments.federation import join, new_run_id  # needs Flower

        run_id = new_run_id()
        with join(federation, system, run_id, status=status) as session:
            assembly = Assembly(system, dataset, session.samples)
            assembly.profile  # noqa: B018 - as below
            run_dir = RunDir.create(out, system.to_toml())
            run_dir.write_run_id(run_id)
            return Training(assembly, run_dir).run(lambda state: nullcontext(session.backend(assembly)), observer)
    assembly = Assembly(system, dataset)
    assembly.profile  # noqa: B018 - whatever does not fit is refused before anything is written
    run_dir = RunDir.create(out, system.to_toml())
    place = Place(workers, address, system.federation, status or _silent)
    return Training(assembly, run_dir).run_at(backend, place, observer)


def resume(
    path: str | Path,
    *,
    backend: str = "serial",
    workers: int | None = None,
    address: str | None = None,
    federation: Membership | None = None,
    dataset: Dataset | None = None,
    observer: Observer | None = None,
    status: Status | None = None,
) -> Run:
    """Go on with the run in `path`. The result is that of an uninterrupted run, bit for bit."""
    run = Run(path)
    if run.finished:
        return run
    system = run.system
    dataset = dataset or dataset_of(system)
    if federation:
        from exitflow.experiments.federation import join  # needs Flower

        known = run.directory.node_samples()
        with join(federation, system, run.directory.run_id(), known=known, status=status) as session:
            assembly = Assembly(system, dataset, session.samples)
            training = Training(assembly, run.directory)
            return training.run(lambda state: nullcontext(session.backend(assembly)), observer)
    place = Place(workers, address, system.federation, status or _silent)
    return Training(Assembly(system, dataset), run.directory).run_at(backend, place, observer)


def _silent(text: str) -> None:
    """Nobody asked."""


class Training:
    """The rounds of Algorithm 1, with their records and checkpoints."""

    def __init__(self, assembly: Assembly, run_dir: RunDir) -> None:
        self._assembly = assembly
        self._spec = assembly.system.training
        self._run_dir = run_dir
        self._drawn: Counter[str] = Counter()  # node -> rounds in which it was asked, for the privacy loss ...
        self._counted_rounds = 0  # ... of so many rounds

    def run_at(self, backend_name: str, place: Place, observer: Observer | None) -> Run:
        """With a backend by name, which trains the nodes of this program's own data."""
        trainer = self._assembly.trainer(self._run_dir.node_states)
        return self.run(lambda state: open_backend(backend_name, trainer, state, place=place), observer)

    def run(self, opened: Callable[[ServerState], AbstractContextManager[Backend]], observer: Observer | None) -> Run:
        """All rounds that are left, and then the trained model."""
        with self._run_dir.lock():
            state = self._run_dir.load_checkpoint() or self._assembly.initial_state()
            self._run_dir.forget_records_after(state.round)
            with opened(state) as backend:
                for state in self.rounds(state, backend, observer):  # noqa: B007 - the last one counts
                    pass
            save_state(self._run_dir.model, state)
            self._run_dir.checkpoint.unlink(missing_ok=True)
        return Run(self._run_dir.path)

    def rounds(self, state: ServerState, backend: Backend, observer: Observer | None = None) -> Iterator[ServerState]:
        """The state after each round, once it is safely on disk."""
        plan = self._plan(backend)

        def progress(round: int, done: int, total: int) -> None:
            if observer:
                observer(round - 1 + done / total)

        if observer:
            observer(state.round)
        attendance = Attendance.of(self._run_dir.records())
        for state, report in run_rounds(plan, state, backend, progress, attendance):
            self._run_dir.append(self._record(state, report))
            self._run_dir.save_checkpoint(state)
            yield state

    def _plan(self, backend: Backend) -> TrainingPlan:
        assembly = self._assembly
        model = assembly.model
        coverage = {exit: model.coverage(exit) for exit in range(1, model.num_exits + 1)}
        nodes = [node.name for node in assembly.system.topology.nodes]
        weighting, federation = WEIGHTINGS[self._spec.weighting], assembly.system.federation
        profile = self._profile(nodes, backend)
        return TrainingPlan(nodes, profile, weighting, coverage, self._spec, federation, self._privacy())

    def _privacy(self) -> Privacy | None:
        federation = self._assembly.system.federation
        if federation.clip_norm is None:
            return None
        return Privacy.of(federation, run_secret(self._run_dir.path / "noise.secret"))

    def _profile(self, nodes: list[str], backend: Backend) -> ExitProfile:
        """Measured once, before the first round, and then kept with the run."""
        profile, file = self._assembly.profile, self._run_dir.path / "profile.json"
        if file.is_file():
            variance = json.loads(file.read_text())["gradient_variance"]
        elif self._spec.weighting in NEEDS_GRADIENT_VARIANCE:
            variance = measure_gradient_variance(nodes, profile, self._assembly.initial_state(), backend).tolist()
        else:
            variance = None
        if variance is not None:
            profile = replace(profile, gradient_variance=np.array(variance))
        write_atomically(file, json.dumps(self._profile_json(profile), indent=1).encode())
        return profile

    def _profile_json(self, profile: ExitProfile) -> dict[str, Any]:
        costs = self._assembly.costs
        variance = profile.gradient_variance
        return {
            "num_steps": self._assembly.num_steps,
            "serve_share": profile.serve_share.tolist(),
            "multiply_adds": [cost.multiply_adds for cost in costs],
            "num_parameters": [cost.num_parameters for cost in costs],
            "exit_samples": profile.exit_samples.tolist(),
            "node_samples": self._assembly.samples,
            "gradient_variance": None if variance is None else variance.tolist(),
        }

    def _record(self, state: ServerState, report: RoundReport) -> dict[str, Any]:
        exit_bytes = {exit: cost.num_bytes for exit, cost in enumerate(self._assembly.costs, start=1)}
        losses = {str(exit): float(np.mean(values)) for exit, values in sorted(report.losses.items())}
        return {
            "round": report.round,
            "exit_weights": report.exit_weights.tolist(),
            "losses": losses,
            "validation": self._validate(state),
            "num_tasks": len(report.tasks),
            "dropped": report.dropped,
            **self._faults(report),
            "link_bytes": link_bytes(self._assembly.system.topology, report.tasks, exit_bytes),
            "seconds": report.seconds,
        }

    def _faults(self, report: RoundReport) -> dict[str, Any]:
        """What only trainings with nodes elsewhere have to tell."""
        faults: dict[str, Any] = {}
        if report.wire_bytes:
            faults["wire_bytes"] = {node: {"down": down, "up": up} for node, (down, up) in report.wire_bytes.items()}
        for what in ("missing", "refused", "state_lost"):
            if nodes := getattr(report, what):
                faults[what] = nodes
        if report.lost_weight is not None:
            faults["lost_weight"] = report.lost_weight.tolist()
        if self._assembly.system.federation.on_missing == "reweight":
            faults["attendance"] = report.attendance
        if loss := self._privacy_loss(report.round):
            faults["privacy"] = asdict(loss)
        return faults

    def _privacy_loss(self, round: int) -> PrivacyLoss | None:
        """For the node that is hit hardest: sampled most often so far, or the most likely to be."""
        if self._assembly.system.federation.noise_multiplier is None:
            return None
        probabilities = self._assembly.profile.probabilities
        while self._counted_rounds < round:
            self._counted_rounds += 1
            tasks = sample_tasks(
                list(self._assembly.samples), probabilities, round=self._counted_rounds, seed=self._spec.seed
            )
            self._drawn.update(task.node for task in tasks)
        most = max(self._drawn.values(), default=0)
        return PrivacyLoss.after(self._assembly.system.federation, most, round, float(probabilities.sum(axis=1).max()))

    def _validate(self, state: ServerState) -> dict[str, Any] | None:
        """Accuracy on validation data: of each exit, and of the system as served."""
        if state.round % self._spec.evaluate_every and state.round != self._spec.rounds:
            return None
        assembly = self._assembly
        model = with_weights(assembly.model, state, source=str(self._run_dir.path))
        outputs = exit_outputs(model, assembly.dataset.validation, assembly.dataset.preparation)
        evaluation = evaluate_plan(outputs, assembly.system.topology, assembly.plan)
        return {"exit_accuracy": list(evaluation.exit_accuracy), "accuracy": evaluation.accuracy}
