"""Run the trainings that some tables need: each once, several at a time, and none again that has a result.

Every training runs in a process of its own with one thread. It lives in RESULTS/.work until it is finished, with
the checkpoints of every run directory, so a kill costs at most a round of each.
"""

from __future__ import annotations

import multiprocessing as mp
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import Empty
from typing import Any

import torch

from exitflow.data.dataset import Dataset
from exitflow.data.sources import load_dataset
from exitflow.errors import TrainingError
from exitflow.evaluation.outputs import ExitOutputs
from exitflow.experiments.assembly import Assembly
from exitflow.experiments.results import Results, provenance, write_json
from exitflow.experiments.runs import Run, evaluate
from exitflow.experiments.system import System
from exitflow.experiments.tables import Job, Scale, Table, distinct_trainings, system_for_variance
from exitflow.experiments.training import resume_or_train
from exitflow.federated.backends.serial import SerialBackend
from exitflow.federated.measuring import exit_means, measure_gradients

KEPT = ("spec.toml", "rounds.jsonl", "profile.json")

Observer = Callable[[str, float], None]  # what is being done; trainings done so far, with fractions


@dataclass(frozen=True)
class Reproduction:
    """Where results lie, and how to come by those that are missing."""

    results: Results
    scale: Scale
    data_dir: str | None = None
    device: str = "cpu"

    def missing(self, tables: Sequence[Table], seeds: Sequence[int], datasets: Sequence[str]) -> list[Job]:
        """The distinct trainings without a result."""
        jobs = distinct_trainings(tables, seeds, self.scale, datasets)
        return [job for job in jobs if self.results.get(job.name) is None]

    def run(self, jobs: Sequence[Job], *, workers: int, observer: Observer | None = None) -> None:
        """Train and evaluate all of `jobs`."""
        if not jobs:
            return
        self.results.folder.mkdir(parents=True, exist_ok=True)
        context = mp.get_context("spawn")
        with context.Manager() as manager:
            reports: Any = manager.Queue()
            pool = ProcessPoolExecutor(min(workers, len(jobs)), mp_context=context, initializer=_start_worker)
            try:
                running = {pool.submit(_do, self, job.name, job.system, job.served_as, reports) for job in jobs}
                self._watch(running, reports, observer)
            except BrokenProcessPool:
                raise TrainingError("a training process was killed; run the same command again to go on") from None
            finally:
                for process in (pool._processes or {}).values():
                    process.terminate()
                pool.shutdown(wait=True, cancel_futures=True)

    def _watch(self, running: set[Future[None]], reports: Any, observer: Observer | None) -> None:
        fractions: dict[str, float] = {}
        while running:
            done, running = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()
            try:
                while True:
                    name, fraction = reports.get_nowait()
                    fractions[name] = fraction
            except Empty:
                pass
            if observer:
                active = [name for name, fraction in fractions.items() if fraction < 1]
                observer(", ".join(active[:1]) or "starting", sum(fractions.values()))

    def measure_gradient_variance(self, dataset: str, seed: int) -> None:
        """The paper's Table 3, at this scale: before training, on the data of the equal partition."""
        path = self.results.gradient_variance_file(dataset, seed)
        if path.is_file():
            return
        system = system_for_variance(dataset, seed, self.scale)
        assembly = Assembly(system, _dataset(dataset, self.data_dir))
        nodes = [node.name for node in system.topology.nodes]
        trainer = assembly.trainer(path.parent / ".work", device=self.device)
        profile = assembly.profile
        table = measure_gradients(nodes, profile.probabilities, assembly.initial_state(), SerialBackend(trainer))
        variance = exit_means(table.mean_variance, profile.samples)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"gradient_variance": variance.tolist(), **provenance()})


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to end
    torch.set_num_threads(1)


@cache
def _dataset(name: str, data_dir: str | None) -> Dataset:
    return load_dataset(name, data_dir=data_dir)


def _do(reproduction: Reproduction, name: str, system: System, served_as: Mapping[str, str], reports: Any) -> None:
    """One training, from wherever it stands to its result."""
    started = time.perf_counter()
    folder = reproduction.results.folder
    dataset = _dataset(system.data.name, reproduction.data_dir)
    run = resume_or_train(
        system,
        folder / ".work" / name,
        backend="serial",
        device=reproduction.device,
        dataset=dataset,
        observer=lambda rounds: reports.put((name, rounds / system.training.rounds)),
    )
    outputs = run.outputs(dataset, device=reproduction.device)
    _publish(run, outputs, served_as, folder / name, {"seconds": round(time.perf_counter() - started, 1)})
    reports.put((name, 1.0))


def _publish(run: Run, outputs: ExitOutputs, served_as: Mapping[str, str], folder: Path, extra: dict[str, Any]) -> None:
    """The run's records and figures, without its weights; then the run itself can go."""
    evaluations = {setting: evaluate(run, serving=own, outputs=outputs) for setting, own in served_as.items()}
    folder.mkdir(parents=True, exist_ok=True)
    for file in KEPT:
        shutil.copyfile(run.path / file, folder / file)
    figures = {
        "exit_accuracy": outputs.exit_accuracy.tolist(),
        "accuracy": {setting: evaluation.accuracy for setting, evaluation in evaluations.items()},
        "served_accuracy": {
            setting: [served.accuracy for served in evaluation.exits] for setting, evaluation in evaluations.items()
        },
        **extra,
        **provenance(),
    }
    write_json(folder / "result.json", figures)
    shutil.rmtree(run.path)
