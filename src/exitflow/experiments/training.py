"""Train a system into a run directory, or go on where a run was cut off."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from exitflow.data.dataset import Dataset
from exitflow.errors import RunError
from exitflow.evaluation.accuracy import evaluate_plan
from exitflow.evaluation.outputs import exit_outputs
from exitflow.experiments.assembly import Assembly, dataset_of
from exitflow.experiments.runs import Run, check_fit, with_weights
from exitflow.experiments.system import System
from exitflow.federated.backends import open_backend
from exitflow.federated.loop import RoundReport, TrainingPlan, measure_gradient_variance, run_rounds
from exitflow.federated.run_dir import RunDir, save_state
from exitflow.federated.traffic import link_bytes
from exitflow.federated.types import Backend, ServerState
from exitflow.federated.weighting import NEEDS_GRADIENT_VARIANCE, WEIGHTINGS, ExitProfile
from exitflow.files import write_atomically

Observer = Callable[[float], None]  # is told the rounds done so far, with fractions


def train(
    system: System,
    out: str | Path,
    *,
    backend: str = "serial",
    workers: int | None = None,
    dataset: Dataset | None = None,
    observer: Observer | None = None,
) -> Run:
    """Train `system` into the new directory `out`. The result does not depend on the backend or its workers."""
    assembly = Assembly(system, dataset or dataset_of(system))
    assembly.profile  # noqa: B018 - whatever does not fit is refused before anything is written
    run_dir = RunDir.create(out, system.to_toml())
    return Training(assembly, run_dir).run(backend, workers, observer)


def resume(
    path: str | Path,
    *,
    backend: str = "serial",
    workers: int | None = None,
    dataset: Dataset | None = None,
    observer: Observer | None = None,
) -> Run:
    """Go on with the run in `path`. The result is that of an uninterrupted run, bit for bit."""
    run = Run(path)
    if run.finished:
        return run
    assembly = Assembly(run.system, dataset or dataset_of(run.system))
    return Training(assembly, run.directory).run(backend, workers, observer)


def _measured_variance(file: Path, num_exits: int) -> list[float] | None:
    """What an earlier part of this run measured."""
    try:
        variance: list[float] | None = json.loads(file.read_bytes())["gradient_variance"]
        if variance is None or np.array(variance, dtype=float).shape == (num_exits,):
            return variance
    except (ValueError, KeyError, TypeError):
        pass
    raise RunError(f"{file}: was not written by exitflow; delete it, and it will be measured again")


class Training:
    """The rounds of Algorithm 1, with their records and checkpoints."""

    def __init__(self, assembly: Assembly, run_dir: RunDir) -> None:
        self._assembly = assembly
        self._spec = assembly.system.training
        self._run_dir = run_dir

    def run(self, backend_name: str, workers: int | None, observer: Observer | None) -> Run:
        """All rounds that are left, and then the trained model."""
        with self._run_dir.lock():
            state = self._run_dir.load_checkpoint() or self._assembly.initial_state()
            check_fit(self._assembly.model, state, source=str(self._run_dir.path))
            self._run_dir.forget_records_after(state.round)
            trainer = self._assembly.trainer(self._run_dir.node_states)
            with open_backend(backend_name, trainer, state, workers=workers) as backend:
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
        for state, report in run_rounds(plan, state, backend, progress):
            self._run_dir.append(self._record(state, report))
            self._run_dir.save_checkpoint(state)
            yield state

    def _plan(self, backend: Backend) -> TrainingPlan:
        assembly = self._assembly
        model = assembly.model
        coverage = {exit: model.coverage(exit) for exit in range(1, model.num_exits + 1)}
        nodes = [node.name for node in assembly.system.topology.nodes]
        return TrainingPlan(
            nodes, self._profile(nodes, backend), WEIGHTINGS[self._spec.weighting], coverage, self._spec
        )

    def _profile(self, nodes: list[str], backend: Backend) -> ExitProfile:
        """Measured once, before the first round, and then kept with the run."""
        profile, file = self._assembly.profile, self._run_dir.path / "profile.json"
        if file.is_file():
            variance = _measured_variance(file, profile.serve_share.size)
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
            "link_bytes": link_bytes(self._assembly.system.topology, report.tasks, exit_bytes),
            "seconds": report.seconds,
        }

    def _validate(self, state: ServerState) -> dict[str, Any] | None:
        """Accuracy on validation data: of each exit, and of the system as served."""
        if state.round % self._spec.evaluate_every and state.round != self._spec.rounds:
            return None
        assembly = self._assembly
        model = with_weights(assembly.model, state, source=str(self._run_dir.path))
        outputs = exit_outputs(model, assembly.dataset.validation, assembly.dataset.preparation)
        evaluation = evaluate_plan(outputs, assembly.system.topology, assembly.plan)
        return {"exit_accuracy": list(evaluation.exit_accuracy), "accuracy": evaluation.accuracy}
