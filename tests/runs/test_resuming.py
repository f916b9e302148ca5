"""A run that is cut off, at any moment and in any way, goes on where it was; one that is damaged says so."""

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import fields, replace

import pytest

from exitflow.config import encode
from exitflow.errors import ConfigError, RunError, TrainingError
from exitflow.federated.measuring import GradientTable
from exitflow.federated.places.serial import SerialBackend
from exitflow.runs.runs import Run, evaluate
from exitflow.runs.training import Training, resume, train
from exitflow.system.assembly import Assembly
from exitflow.tensors import load_tensors, save_tensors
from tests.runs.cut_off import DATA, Stop, same_weights, stop_at, unfinished
from tests.small import TINY, image_dataset, record_of, tiny_system

pytestmark = pytest.mark.heavy

BOUND_MIN = "training.weighting=exitflow.federated.weighting:bound_min"


def test_what_was_measured_is_kept_and_not_measured_again(tmp_path, monkeypatch):
    run = unfinished(tmp_path / "run", BOUND_MIN)
    monkeypatch.setattr("exitflow.runs.training.measure_gradients", None)
    records = resume(run.path, dataset=DATA).records
    assert records[-1].exit_weights == records[0].exit_weights


INTERRUPTED = {
    "plain": (),
    "help and partial participation": ("training.help_probability=0.2", "training.participation=0.7"),
    "momentum kept": ("training.optimiser.momentum_between_rounds=keep",),
    "bfloat16": ("training.optimiser.precision=bfloat16",),
    "measured weighting": ("training.weighting=balanced-adj",),
    "minimised bound": (BOUND_MIN, "training.help_probability=0.2"),
    "all exits at once": ("training.weighting=auto", "training.optimiser.momentum_between_rounds=keep"),
    "an exit each step": ("training.local_exits=each-step", "federation.compression=int8"),
    "what compression lost": ("federation.compression=top-k", "federation.top_k_fraction=0.2"),
}


@pytest.mark.parametrize("variant", INTERRUPTED)
@pytest.mark.parametrize("moment", [0.2, 1.0, 1.5, 2.0, 2.9])
def test_a_run_that_was_cut_off_ends_with_the_bits_of_an_uninterrupted_one(tmp_path, variant, moment):
    system = tiny_system(*INTERRUPTED[variant])
    whole = train(system, tmp_path / "whole", dataset=DATA)
    with pytest.raises(Stop):
        train(system, tmp_path / "cut", dataset=DATA, observer=stop_at(moment))
    cut = resume(tmp_path / "cut", dataset=DATA)
    assert same_weights(whole, cut)
    drop_times = [replace(record, seconds=0) for record in cut.records]
    assert drop_times == [replace(record, seconds=0) for record in whole.records]


@pytest.mark.parametrize("backend", ["serial", "processes"])
def test_a_run_killed_with_sigkill_ends_with_the_bits_of_an_uninterrupted_one(tmp_path, backend):
    overrides = [*TINY, "training.rounds=20", "training.optimiser.momentum_between_rounds=keep"]
    system = tiny_system(*overrides)
    whole = train(system, tmp_path / "whole")
    command = [sys.executable, "-m", "exitflow", "train", "paper-7:80-15-5", "--out", str(tmp_path / "cut")]
    command += ["--backend", backend, "--workers", "2", *(part for each in overrides for part in ("--set", each))]
    records = tmp_path / "cut" / "rounds.jsonl"
    for kill_after in (3, 12):
        process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
        while process.poll() is None and (not records.exists() or records.read_bytes().count(b"\n") < kill_after):
            time.sleep(0.002)
        assert process.poll() is None, "the run ended before it could be killed"
        os.kill(process.pid, signal.SIGKILL)  # the workers must notice by themselves
        process.wait()
        command = [sys.executable, "-m", "exitflow", "train", "--resume", str(tmp_path / "cut"), "--backend", backend]
    cut = resume(tmp_path / "cut", backend=backend)
    assert same_weights(whole, cut)
    assert [record.round for record in cut.records] == list(range(1, 21))
    assert not list(cut.path.glob("**/*.tmp"))


def test_workers_end_when_their_parent_is_killed(tmp_path):
    command = [sys.executable, "-m", "exitflow", "train", "paper-7:80-15-5", "--out", str(tmp_path / "run")]
    process = subprocess.Popen(
        [*command, "--workers", "2", "--set", "training.rounds=1000"], start_new_session=True, stderr=subprocess.DEVNULL
    )
    try:
        while not (tmp_path / "run" / "rounds.jsonl").exists() or not (tmp_path / "run" / "rounds.jsonl").read_bytes():
            assert process.poll() is None
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        for _ in range(1000):
            try:
                os.killpg(process.pid, 0)
            except ProcessLookupError:
                break
            time.sleep(0.01)
        else:
            pytest.fail("a worker outlived its parent")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_a_line_that_was_cut_off_does_not_count(tmp_path):
    run = Run.create(tmp_path / "run", "")
    run.append(record_of(1))
    with (run.path / "rounds.jsonl").open("a") as file:
        file.write('{"round": 2, "los')
    assert run.records == [record_of(1)]
    run.forget_records_after(1)
    assert (run.path / "rounds.jsonl").read_text() == record_of(1).to_json().decode() + "\n"


def test_a_record_that_is_newer_than_the_checkpoint_does_not_count(tmp_path):
    run = Run.create(tmp_path / "run", "")
    for round in (1, 2, 3):
        run.append(record_of(round))
    run.forget_records_after(2)
    assert run.records == [record_of(1), record_of(2)]


def test_what_a_kill_left_of_the_first_file_is_no_reason_to_refuse_the_directory(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".spec.toml.123.tmp").write_text("half")
    run = Run.create(tmp_path / "run", "whole")
    assert (run.path / "spec.toml").read_text() == "whole"


def test_resuming_a_finished_run_changes_nothing(tmp_path):
    run = train(tiny_system(), tmp_path / "run", dataset=DATA)
    before = {path.name: path.stat().st_mtime_ns for path in run.path.iterdir()}
    assert resume(run.path, dataset=DATA).finished
    assert {path.name: path.stat().st_mtime_ns for path in run.path.iterdir()} == before


def test_two_processes_cannot_train_one_run(tmp_path):
    run = Run.create(tmp_path / "run", tiny_system().to_toml())
    command = [sys.executable, "-m", "exitflow", "train", "--resume", str(run.path)]
    with run.lock():
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "another process is training this run" in done.stderr
    assert not (run.path / "rounds.jsonl").exists()


def test_a_directory_without_a_run_cannot_be_resumed(tmp_path):
    with pytest.raises(RunError, match="is not a run directory"):
        resume(tmp_path)


def test_an_unfinished_run_is_evaluated_where_it_stands(tmp_path):
    assert unfinished(tmp_path / "run").state().round == 1
    assert 0 <= evaluate(tmp_path / "run", dataset=DATA).accuracy <= 1


def test_a_run_without_a_finished_round_says_so(tmp_path):
    Run.create(tmp_path / "run", tiny_system().to_toml())
    with pytest.raises(RunError, match="no round has been finished yet"):
        evaluate(tmp_path / "run", dataset=DATA)


WITHOUT_TIME = json.dumps(encode(record_of(1)) | {"seconds": "soon"})


@pytest.mark.parametrize("line", ["garbage", "[1]", "{}", '"x"', WITHOUT_TIME])
def test_a_line_that_is_no_record_is_named(tmp_path, line):
    run = unfinished(tmp_path / "run")
    (run.path / "rounds.jsonl").write_text(line + "\n")
    with pytest.raises(RunError, match=r"rounds.jsonl: line 1 is no record of a round"):
        resume(run.path, dataset=DATA)


ANOTHER_SHAPE = json.dumps({"gradients": {field.name: [[1.0]] for field in fields(GradientTable)}})


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"gradients": "x"}', '{"gradients": {}}', ANOTHER_SHAPE])
def test_a_damaged_profile_is_named(tmp_path, text):
    with pytest.raises(Stop):
        train(tiny_system(), tmp_path / "run", dataset=DATA, observer=stop_at(0.5))
    (tmp_path / "run" / "profile.json").write_text(text)
    with pytest.raises(RunError, match=r"profile.json: is damaged, or was not written by exitflow"):
        resume(tmp_path / "run", dataset=DATA)


def test_a_lost_profile_is_measured_again_as_it_was(tmp_path):
    whole = train(tiny_system("training.weighting=balanced-adj"), tmp_path / "whole", dataset=DATA)
    run = unfinished(tmp_path / "run", "training.weighting=balanced-adj")
    (run.path / "profile.json").unlink()
    assert same_weights(whole, resume(run.path, dataset=DATA))


def test_a_checkpoint_that_does_not_fit_the_spec_is_not_gone_on_with(tmp_path):
    run = unfinished(tmp_path / "run")
    (run.path / "spec.toml").write_text((run.path / "spec.toml").read_text().replace("width = 2", "width = 3"))
    with pytest.raises(RunError, match=r"the weights do not fit the model in spec.toml"):
        resume(run.path, dataset=DATA, accept=["edited-spec"])


KEEPING = ("training.optimiser.momentum_between_rounds=keep", "federation.compression=int8")


def flip(path, where):
    """Flip a bit of a file; `where` from 0, its begin, to 1."""
    data = bytearray(path.read_bytes())
    data[int(where * (len(data) - 1))] ^= 4
    path.write_bytes(data)


def zero_the_end(path):
    data = path.read_bytes()
    path.write_bytes(data[:-100] + bytes(100))


def change_a_digit(path):
    text = path.read_text()
    at = text.index('"losses": {"1": ') + 20
    path.write_text(text[:at] + ("1" if text[at] != "1" else "2") + text[at + 1 :])


DAMAGES = {
    "a bit of the checkpoint": ("checkpoint.safetensors", lambda path: flip(path, 0.5)),
    "a bit of the checkpoint's header": ("checkpoint.safetensors", lambda path: flip(path, 0.01)),
    "the end of the checkpoint": ("checkpoint.safetensors", zero_the_end),
    "a bit of a node's momentum": ("nodes/device-1/exit-1/1.safetensors", lambda path: flip(path, 0.7)),
    "the end of a node's momentum": ("nodes/cloud-0/exit-3/1.safetensors", zero_the_end),
    "a bit of a node's residuals": ("residuals/device-1/exit-1/1.safetensors", lambda path: flip(path, 0.7)),
    "another node's momentum": (
        "nodes/device-1/exit-1/1.safetensors",
        lambda path: shutil.copy(path.parents[2] / "device-0/exit-1/1.safetensors", path),
    ),
    "residuals of another round": (
        "residuals/edge-0/exit-2/1.safetensors",
        lambda path: save_tensors(path, load_tensors(path)[0], "edge-0/exit-2/0.safetensors"),
    ),
    "a digit of a record": ("rounds.jsonl", change_a_digit),
    "a digit of the profile": ("profile.json", lambda path: path.write_text(path.read_text().replace("32", "33"))),
    "nothing left of a node's momentum": ("nodes/edge-0/exit-2/1.safetensors", lambda path: path.unlink()),
    "nothing left of momentum": ("nodes", shutil.rmtree),
    "nothing left of residuals": ("residuals", shutil.rmtree),
    "the system edited": ("spec.toml", lambda path: path.write_text(path.read_text().replace("0.1\n", "0.2\n"))),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_run_of_which_something_is_damaged_or_lost_is_not_gone_on_with(tmp_path, what):
    run = unfinished(tmp_path / "run", *KEEPING)
    name, damage = DAMAGES[what]
    damage(run.path / name)
    with pytest.raises(RunError) as caught:
        resume(run.path, dataset=DATA)
    file, _, reason = str(caught.value).removeprefix(f"{run.path}/").partition(": ")
    assert name.startswith(file)
    assert reason.startswith(
        (
            "is damaged",
            "is what was kept as device-0/exit-1/1.safetensors; restore what belongs here",
            "is what was kept as edge-0/exit-2/0.safetensors; restore what belongs here",
            "cannot be read",
            "the records are not those that were written; restore it",
            "is not what it was when the run was cut off; restore it",
            "lacks what node 'edge-0' has kept; restore it, or begin anew there with --accept lost-states",
            "lacks what node 'cloud-0' has kept, and of 6 more nodes; restore it, or begin anew",
            "was edited after the run was begun, so that its rounds would be of two different systems; undo that, or",
        )
    )
    assert not run.finished


def test_lost_states_and_another_system_are_gone_on_with_where_that_is_accepted(tmp_path):
    run = unfinished(tmp_path / "run", *KEEPING)
    shutil.rmtree(run.path / "nodes")
    shutil.rmtree(run.path / "residuals")
    spec = run.path / "spec.toml"
    spec.write_text(spec.read_text().replace("rounds = 3", "rounds = 5"))
    done = resume(run.path, dataset=DATA, accept=["edited-spec", "lost-states"])
    assert [record.round for record in done.records] == [1, 2, 3, 4, 5]
    assert len(done.records[1].state_lost) == 7


def test_what_may_be_accepted_is_one_of_two_things(tmp_path):
    with pytest.raises(
        ConfigError, match="accept: there is nothing called 'spec' to accept; did you mean 'edited-spec'"
    ):
        resume(unfinished(tmp_path / "run").path, dataset=DATA, accept=["spec"])


def test_data_that_were_moved_do_not_make_another_system(tmp_path):
    run = unfinished(tmp_path / "run")
    spec = run.path / "spec.toml"
    spec.write_text(spec.read_text().replace("[data]\n", '[data]\ndir = "/elsewhere"\n'))
    assert resume(run.path, dataset=DATA).finished


def test_a_node_whose_last_update_was_no_number_has_lost_nothing(tmp_path):
    """It kept nothing of that round, and goes on from the one before."""
    system = tiny_system("training.optimiser.momentum_between_rounds=keep", "training.rounds=4")

    def train_in(path, until):
        assembly = Assembly(system, DATA)
        run_dir = Run(path) if path.exists() else Run.create(path, system.to_toml())
        trainer = assembly.trainer(run_dir.states_folder)
        return Training(assembly, run_dir).run(lambda state: nullcontext(OnceInfinite(trainer)), stop_at(until))

    with pytest.raises(Stop):
        train_in(tmp_path / "run", 2.1)
    assert Run(tmp_path / "run").records[-1].dropped == ("device-0",)
    assert not any(record.state_lost for record in resume(tmp_path / "run", dataset=DATA).records)


class OnceInfinite(SerialBackend):
    """The update of `device-0` in round 2 is none, and it keeps nothing of it."""

    def run(self, state, tasks):
        for task in tasks:
            if (task.node, task.round) == ("device-0", 2):
                first = next(iter(super().run(state, [replace(task, node="device-1")])))
                yield replace(first, task=task, losses=(math.nan,) * len(task.exits))
            else:
                yield from super().run(state, [task])


@pytest.mark.parametrize("kept", [slice(0, 0), slice(1, None), slice(0, -1)])
def test_a_run_whose_records_are_lost_is_not_gone_on_with(tmp_path, kept):
    with pytest.raises(Stop):
        train(tiny_system("training.rounds=4"), tmp_path / "run", dataset=DATA, observer=stop_at(2.5))
    run = Run(tmp_path / "run")
    records = run.path / "rounds.jsonl"
    lines = records.read_text().splitlines(keepends=True)
    assert len(lines) == 2
    records.write_text("".join(lines[kept]))
    with pytest.raises(RunError, match=r"rounds\.jsonl: expected a record of each of the 2 rounds that are done, got"):
        resume(run.path, dataset=DATA)
    assert records.read_text() == "".join(lines[kept])
    records.write_text("".join(lines))
    assert len(resume(run.path, dataset=DATA).records) == 4


def test_lost_records_are_named(tmp_path):
    with pytest.raises(RunError, match=r"rounds.jsonl: the records of the rounds are gone"):
        _ = Run.create(tmp_path / "run", "").last_record


def test_a_worker_that_dies_loses_no_finished_round(tmp_path):
    """The run stops with an error, and goes on where it was."""
    from exitflow.federated.places.processes import ProcessesBackend

    system = tiny_system("training.rounds=6")
    whole = train(system, tmp_path / "whole", dataset=DATA)
    workers = []
    original = ProcessesBackend.run

    def run(self, state, tasks):
        workers[:] = self.workers
        if state.round == 3:
            os.kill(self.workers[0].process.pid, signal.SIGKILL)
        return original(self, state, tasks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessesBackend, "run", run)
        with pytest.raises(TrainingError, match="a worker process died"):
            train(system, tmp_path / "cut", dataset=DATA, backend="processes", workers=2)
    assert not any(worker.process.is_alive() for worker in workers)
    assert Run(tmp_path / "cut").state().round == 3
    assert same_weights(whole, resume(tmp_path / "cut", dataset=DATA))


def test_a_run_that_another_process_finishes_meanwhile_keeps_its_records(tmp_path, monkeypatch):
    unfinished(tmp_path / "run")
    finish, prepared = Run.lock, []

    def lock(self):
        if not prepared:  # this process is ready to go on, and the other one has just ended
            prepared.append(True)
            prepared.append(resume(tmp_path / "run", dataset=DATA).records)
        return finish(self)

    monkeypatch.setattr(Run, "lock", lock)
    run = resume(tmp_path / "run", dataset=DATA)
    assert run.finished
    assert run.records == prepared[1]  # to the seconds that they took


def test_a_run_goes_on_with_the_data_that_it_was_begun_with(tmp_path):
    unfinished(tmp_path / "run")
    with pytest.raises(RunError, match="was begun with other data than these"):
        resume(tmp_path / "run", dataset=image_dataset(64))
    (tmp_path / "run" / "run-id").write_text("abc")
    with pytest.raises(RunError, match="was begun in a federation, whose nodes have the data; go on with --superlink"):
        resume(tmp_path / "run", dataset=DATA)


@pytest.mark.parametrize("backend", ["serial", "processes"])
def test_what_nodes_keep_is_safely_on_disk_before_the_checkpoint_of_its_round(tmp_path, monkeypatch, backend):
    events = []
    monkeypatch.setattr("exitflow.federated.node_state.sync_files", events.append)
    original = Run.save_checkpoint
    monkeypatch.setattr(Run, "save_checkpoint", lambda run, state: events.append(state.round) or original(run, state))
    system = tiny_system("training.optimiser.momentum_between_rounds=keep", "training.rounds=2")
    run = train(system, tmp_path / "run", backend=backend, dataset=DATA)
    nodes = {node.name: node.exit for node in system.topology.nodes}

    def files(round):
        return {run.path / "nodes" / node / f"exit-{exit}" / f"{round}.safetensors" for node, exit in nodes.items()}

    assert [event if isinstance(event, int) else set(event) for event in events] == [files(1), 1, files(2), 2]
