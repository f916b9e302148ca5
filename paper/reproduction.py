"""Run the trainings that some tables need: each once, several at a time, and none again that has a result.

Every training runs in a process of its own with one thread. It lives in .work/SCALE beside the store until it is
finished, with the checkpoints of every run directory, so a kill costs at most a round of each. Workers end with the
process that started them, however that ends.
"""

from __future__ import annotations

import errno
import multiprocessing as mp
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import torch

from exitflow.data.dataset import Dataset
from exitflow.data.sources import load_dataset
from exitflow.errors import BusyError, ConfigError, RunError, TrainingError
from exitflow.evaluation.blending import blended
from exitflow.evaluation.outputs import ExitOutputs
from exitflow.federated.measuring import exit_means, measure_gradients
from exitflow.federated.places.serial import SerialBackend
from exitflow.files import locked
from exitflow.runs.records import read_records
from exitflow.runs.runs import ROUNDS, Run, evaluate
from exitflow.runs.training import resume_or_train
from exitflow.runs.training_costs import TrainingCosts
from exitflow.system.assembly import Assembly
from exitflow.system.system import System
from paper.named_results import check_systems
from paper.provenance import commit, provenance
from paper.results import Answers, GradientVariance, Results, TrainingResult, curves_json, publish
from paper.tables import Job, Scale, Table, distinct_trainings, system_for_variance
from paper.training import Training, system_digest

WORK = ".work"

Reports = SimpleQueue[tuple[str, float]]  # the name of a training, and how much of it is done
Observer = Callable[[str, float], None]  # what is being done; trainings done so far, with fractions


@dataclass(frozen=True)
class Reproduction:
    """Where results are kept, and how to come by those that are missing."""

    store: Path
    scale: Scale
    data_dir: str | None = None
    device: str = "cpu"

    @property
    def results(self) -> Results:
        """As they are now."""
        return Results(self.store)

    @property
    def work(self) -> Path:
        """Where trainings live until they are finished."""
        return self.store.parent / WORK / self.store.stem

    def check(self, datasets: Sequence[str]) -> None:
        """Refuse a device, a folder or data that cannot be used, before anything is begun."""
        try:
            torch.ones(1, device=self.device).sum().item()
        except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
            reason = re.split(r"\.\s|\n", str(error))[0].rstrip(".")
            raise ConfigError(f"PyTorch cannot compute on {self.device!r} here: {reason}", key="--device") from None
        for name in datasets:
            load_dataset(name, data_dir=self.data_dir)
        self._make_folder()

    def missing(self, tables: Sequence[Table], seeds: Sequence[int], datasets: Sequence[str]) -> list[Job]:
        """The distinct trainings without a result."""
        results = self.results
        check_systems(results, self.scale)
        jobs = distinct_trainings(tables, seeds, self.scale, datasets)
        return [job for job in jobs if not _has_result(job, results)]

    def unmeasured(self, datasets: Sequence[str], seeds: Sequence[int]) -> list[tuple[str, int]]:
        """The data sets and seeds whose gradient variance is not there."""
        results = self.results
        return [(name, seed) for name in datasets for seed in seeds if not results.gradient_variance(name, seed)]

    def _make_folder(self) -> None:
        folder = self.store.parent
        if self.store.is_dir():
            raise RunError(f"{self.store}: is a folder, expected a file for results, such as small.jsonl")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise RunError(f"{folder}: is a file, expected a folder for results") from None
        except OSError as error:
            raise RunError(f"{folder}: cannot be written: {error.strerror}") from None
        if not os.access(folder, os.W_OK):
            read_only = os.statvfs(folder).f_flag & os.ST_RDONLY
            raise RunError(f"{folder}: cannot be written: {os.strerror(errno.EROFS if read_only else errno.EACCES)}")

    def run(self, jobs: Sequence[Job], *, workers: int, observer: Observer | None = None) -> list[str]:
        """Train and evaluate all of `jobs`; the names of those that are left to another process, which is at them."""
        if not jobs:
            return []
        self._make_folder()
        context = mp.get_context("spawn")
        reports: Reports = context.SimpleQueue()
        pool = ProcessPoolExecutor(
            min(workers, len(jobs)), mp_context=context, initializer=_start_worker, initargs=(reports,)
        )
        try:
            running = {pool.submit(_do, self, job.training, job.system, job.served_as): job.name for job in jobs}
            left = self._watch(running, reports, {job.name: self._fraction_done(job) for job in jobs}, observer)
        except BrokenProcessPool:
            raise TrainingError("a training process was killed; run the same command again to go on") from None
        finally:
            for process in list((pool._processes or {}).values()):
                process.terminate()
            pool.shutdown(wait=True, cancel_futures=True)
            reports.close()
        with suppress(OSError):  # where they hold anything
            self.work.rmdir()
            self.work.parent.rmdir()
        return left

    def _fraction_done(self, job: Job) -> float:
        """How far an earlier attempt came."""
        done = read_records(self.work / job.name / ROUNDS)
        return min(1.0, len(done) / job.system.training.rounds)

    def _watch(
        self,
        running: Mapping[Future[None], str],
        reports: Reports,
        fractions: dict[str, float],
        observer: Observer | None,
    ) -> list[str]:
        waiting = set(running)
        left = []
        active: set[str] = set()
        while waiting:
            if observer:
                observer(_activity(active), sum(fractions.values()))
            done, waiting = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
            for name, fraction in _drain(reports):
                fractions[name] = fraction
                active.add(name)
            for future in done:
                name = running[future]
                try:
                    _check_result(future, name, self.work)
                except BusyError:
                    left.append(name)
                fractions[name] = 1.0
                active.discard(name)
        if observer:
            observer("done", sum(fractions.values()))
        return left

    def measure_gradient_variance(self, dataset: str, seed: int) -> None:
        """The paper's Table 3, at this scale: before training, on the data of the equal partition."""
        self._make_folder()
        system = system_for_variance(dataset, seed, self.scale)
        assembly = Assembly(system, _dataset(system.data.name, self.data_dir))
        nodes = [node.name for node in system.topology.nodes]
        trainer = assembly.trainer(self.work, device=self.device)
        profile = assembly.profile
        table = measure_gradients(nodes, profile.probabilities, assembly.initial_state(), SerialBackend(trainer))
        variance = exit_means(table.mean_variance, profile.samples)
        found = tuple(map(float, variance))
        publish(self.store, GradientVariance(dataset, seed, self.scale, system_digest(system), found, provenance()))


def _has_result(job: Job, results: Results) -> bool:
    found = results.get(job.training, own_answers=any(cell.row.shows_own_answers for cell in job.cells))
    if found is None:
        return False
    for cell in job.cells:  # damage is told now, not after hours of training
        found.accuracy(cell.setting)
    return True


def _activity(active: Collection[str]) -> str:
    """What is being trained, short enough for a progress bar."""
    first = min(active, default="starting")
    return f"{first} and {len(active) - 1} more" if len(active) > 1 else first


def _drain(reports: Reports) -> Iterator[tuple[str, float]]:
    while not reports.empty():
        yield reports.get()


def _check_result(future: Future[None], name: str, work: Path) -> None:
    """An error of a training says which one it was, and how to begin it anew where what is there cannot be used."""
    try:
        future.result()
    except BusyError:
        raise
    except RunError as error:
        raise RunError(f"{name}: {error}; to begin this training anew, delete {work / name}") from None
    except TrainingError as error:
        raise TrainingError(f"{name}: {error}") from None


_reports: Reports  # of a worker


def _start_worker(reports: Reports) -> None:
    global _reports
    _reports = reports
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to end
    torch.set_num_threads(1)
    commit()  # of the source as it is being loaded, not as it may be when a training ends
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@cache
def _dataset(name: str, data_dir: str | None) -> Dataset:
    return load_dataset(name, data_dir=data_dir)


def _do(reproduction: Reproduction, training: Training, system: System, served_as: Mapping[str, str]) -> None:
    """One training, from wherever it stands to its result; nothing where somebody else has it by now."""
    reproduction.work.mkdir(parents=True, exist_ok=True)
    lock = reproduction.work / f"{training.name}.lock"
    with locked(lock, f"{training.name}: another process is at it"):
        if not reproduction.results.get(training):
            _train_and_publish(reproduction, training, system, served_as)
        lock.unlink(missing_ok=True)  # whoever locks it from now on finds the result


def _train_and_publish(
    reproduction: Reproduction, training: Training, system: System, served_as: Mapping[str, str]
) -> None:
    started = time.perf_counter()
    folder = reproduction.work / training.name
    seconds_before = sum(record.seconds or 0.0 for record in read_records(folder / ROUNDS))
    dataset = _dataset(system.data.name, reproduction.data_dir)
    run = resume_or_train(
        system,
        folder,
        backend="serial",
        device=reproduction.device,
        dataset=dataset,
        observer=lambda rounds: _reports.put((training.name, rounds / system.training.rounds)),
    )
    own = run.own_outputs(dataset, device=reproduction.device)
    blends = run.blends(dataset, device=reproduction.device)
    line = TrainingResult(
        training,
        reproduction.scale,
        system_digest(system),
        _answers(run, blended(own, blends), served_as),
        _answers(run, own, served_as) if blends else None,
        TrainingCosts.of(run.records),
        round(seconds_before + time.perf_counter() - started, 1),
        provenance(),
    )
    _publish(reproduction.store, line, run)
    _reports.put((training.name, 1.0))


def _answers(run: Run, outputs: ExitOutputs, served_as: Mapping[str, str]) -> Answers:
    evaluations = {setting: evaluate(run, serving=own, outputs=outputs) for setting, own in served_as.items()}
    return Answers(
        tuple(outputs.exit_accuracy.tolist()),
        {setting: evaluation.accuracy for setting, evaluation in evaluations.items()},
        {setting: tuple(served.accuracy for served in evaluation.exits) for setting, evaluation in evaluations.items()},
    )


def _publish(store: Path, line: TrainingResult, run: Run) -> None:
    """The run's records and figures, without its weights; then the run itself can go."""
    publish(store, line, curves_json(line.training, run.records, run.profile))
    shutil.rmtree(run.path)
