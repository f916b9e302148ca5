"""Trainings for tables: each once, several at a time, gone on with after any death, refused in one sentence."""

import contextlib
import json
import multiprocessing as mp
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from exitflow.errors import BusyError, RunError, TrainingError
from exitflow.runs.run_dir import RunDir
from exitflow.runs.training import train
from exitflow.runs.training_costs import TrainingCosts
from paper import reproduction as module
from paper import results as results_module
from paper.figures import TableFigures
from paper.reproduction import Reproduction
from paper.results import Result, Results, read_json
from paper.tables import Row, Table
from tests.paper import tiny_tables
from tests.paper.command import call
from tests.paper.synthetic import write_gradient_variance, write_training
from tests.paper.tiny_tables import DISTINCT, TABLE
from tests.small import record_of

LONG = 10  # rounds, which give time to interrupt
PLACE = Path(__file__).parents[2]


def reproduction(folder):
    return Reproduction(Results(folder), "small")


def missing(folder, seeds=(9,)):
    return reproduction(folder).missing([TABLE], seeds, ["cifar10"])


def figures(folder):
    """All that must not depend on interruptions."""
    found = {}
    for result in Results(folder).all():
        kept = {key: result.figures[key] for key in ("accuracy", "exit_accuracy", "served_accuracy")}
        records = [{**record, "seconds": None} for record in result.records]
        found[result.name] = (kept, records, (result.folder / "spec.toml").read_text())
    return found


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """An uninterrupted reproduction of the tiny table, from the command line."""
    folder = tmp_path_factory.mktemp("reproduction") / "results"
    with pytest.MonkeyPatch.context() as patch:
        tiny_tables.patch(patch.setattr, 4)
        result = call("reproduce", "tiny", "--out", folder, "--seeds", "9", "--datasets", "cifar10", "--workers", "2")
        return folder, result.output


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    tiny_tables.patch(monkeypatch.setattr, 4)


def test_every_distinct_training_leaves_a_result_and_no_weights(done):
    folder, _ = done
    results = Results(folder).all()
    assert len(results) == DISTINCT
    for result in results:
        names = {path.name for path in result.folder.iterdir()}
        assert names == {"spec.toml", "rounds.jsonl", "profile.json", "result.json"}
        assert len(result.records) == 4
        assert result.figures["seconds"] > 0
        assert result.figures["commit"]
        assert result.system.training.seed == 9
    assert {path.name for path in folder.iterdir()} == {result.name for result in results}  # .work is gone


def test_of_a_long_training_some_records_are_kept_and_the_costs_of_all(tmp_path, monkeypatch):
    monkeypatch.setattr(results_module, "NUM_RECORDS", 2)
    system = tiny_tables.tiny(4)("paper-7:80-15-5", ["training.evaluate_every=4"])
    run = train(system, tmp_path / "run")
    all_costs = TrainingCosts.of(run.records)
    module._publish(run, {"accuracy": {}, "exit_accuracy": []}, tmp_path / "kept")
    kept = Result(tmp_path / "kept")
    assert [record["round"] for record in kept.records] == [2, 4]
    assert kept.costs == all_costs
    assert all_costs.bytes_sent == 2 * TrainingCosts.of(kept.records).bytes_sent > 0
    assert not run.path.exists()


def test_the_table_is_printed_beside_the_papers(done):
    _, output = done
    assert "A tiny table, cifar10: accuracy as served in %, seeds 9 (the paper's)" in output
    assert "(54.2)" in output
    assert "33-33-33" in output


def test_what_has_a_result_is_not_trained_again(done, monkeypatch):
    folder, _ = done
    assert missing(folder) == []
    assert len(missing(folder, (9, 42))) == DISTINCT
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    monkeypatch.setattr(module, "ProcessPoolExecutor", None)  # nothing may be started
    monkeypatch.setattr(module, "load_dataset", None)  # nor are data asked for
    result = call("reproduce", "tiny", "--out", folder, "--seeds", "9", "--datasets", "cifar10", "--json")
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    (table,) = json.loads(result.output)
    assert {cell["seeds"] for cell in table["cells"]} == {1}
    assert {cell["dataset"] for cell in table["cells"]} == {"cifar10"}


def test_rows_that_differ_only_in_how_exits_answer_share_a_training(tmp_path, monkeypatch):
    tiny_tables.patch(monkeypatch.setattr, 20)  # rounds, after which exits have something to say
    together = Row("together", "auto", ("training.answers=blended",))
    shared = replace(together, label="each by itself", own_answers_of="together")
    trained_so = Row("trained so", "auto", ("training.answers=own",))
    table = Table("tiny", "", (together, shared, trained_so), settings=("33-33-33",))
    jobs = reproduction(tmp_path).missing([table], [9], ["cifar10"])
    assert len(jobs) == 2
    reproduction(tmp_path).run(jobs, workers=2)
    assert reproduction(tmp_path).missing([table], [9], ["cifar10"]) == []
    figures = TableFigures(table, Results(tmp_path), (9,))
    found = {row.label: figures.found(figures.table.cell("cifar10", row.label, "33-33-33"))[0] for row in table.rows}
    assert found["each by itself"].exit_accuracy == found["trained so"].exit_accuracy
    assert found["each by itself"].accuracy("33-33-33") == found["trained so"].accuracy("33-33-33")
    assert found["together"].accuracy("33-33-33") != found["trained so"].accuracy("33-33-33")


def test_a_result_without_the_answers_that_a_row_wants_is_refused_before_anything_is_trained(tmp_path):
    together = Row("together", "auto", ("training.answers=blended",))
    alone = replace(together, label="each by itself", own_answers_of="together")
    table = Table("tiny", "", (together, alone), settings=("80-15-5",))
    (job,) = reproduction(tmp_path).missing([table], [9], ["cifar10"])
    write_training(tmp_path / job.name, job, np.random.default_rng(0))
    assert reproduction(tmp_path).missing([table], [9], ["cifar10"]) == []
    path = tmp_path / job.name / "result.json"
    path.write_text(json.dumps({key: value for key, value in read_json(path).items() if key != "own_answers"}))
    assert reproduction(tmp_path).missing([replace(table, rows=(together,))], [9], ["cifar10"]) == []
    with pytest.raises(RunError, match=r"own_answers: expected the accuracies of exits by themselves, got null"):
        reproduction(tmp_path).missing([table], [9], ["cifar10"])


def test_only_the_columns_that_are_asked_for_are_trained_and_printed(done, tmp_path):
    options = ("--out", tmp_path, "--seeds", "9", "--datasets", "cifar10", "--settings", "33-33-33", "--json")
    for name in (job.name for job in missing(tmp_path) if "_33-33-33_" in job.name):
        shutil.copytree(done[0] / name, tmp_path / name)
    (table,) = json.loads(call("reproduce", "tiny", *options).output)
    assert {cell["setting"] for cell in table["cells"]} == {"33-33-33"}
    assert {cell["seeds"] for cell in table["cells"]} == {1}
    assert len(missing(tmp_path)) == 1  # serving-rate at 80-15-5, which was not asked for


def test_results_of_another_system_are_refused(done, monkeypatch):
    folder, _ = done
    tiny_tables.patch(monkeypatch.setattr, 5)
    with pytest.raises(
        RunError, match=r"seed-9: is of another system .* choose another folder for results, or delete this one"
    ):
        missing(folder)
    with pytest.raises(RunError, match="is of another system"):
        missing(folder, (42,))  # none of which is there, but what is must not be mixed with it


def test_a_result_that_does_not_know_a_setting_is_told_before_anything_is_trained(done, tmp_path):
    shutil.copytree(done[0], tmp_path / "r")
    path = next((tmp_path / "r").glob("*equal-weight*/result.json"))
    found = read_json(path)
    del found["accuracy"]["80-15-5"]
    path.write_text(json.dumps(found))
    with pytest.raises(RunError, match=r"result\.json: says nothing of the serving setting 80-15-5"):
        missing(tmp_path / "r", (9, 42))


def test_what_another_process_is_training_is_left_to_it(tmp_path):
    jobs = missing(tmp_path)
    busy = RunDir.create(tmp_path / ".work" / jobs[1].name, jobs[1].system.to_toml())
    with busy.lock():
        result = call("reproduce", "tiny", "--out", tmp_path, "--seeds", "9", "--datasets", "cifar10")
    assert f"Left to another process that is training them: {jobs[1].name}." in result.stderr
    assert [job.name for job in missing(tmp_path)] == [jobs[1].name]


def test_nobody_publishes_what_another_process_has_trained_and_is_about_to_publish(tmp_path, monkeypatch):
    (job, *_) = missing(tmp_path)
    monkeypatch.setattr(module, "_reports", mp.SimpleQueue(), raising=False)
    busy = []

    def publish(*args):
        second = mp.get_context("fork").Process(target=_expect_busy, args=(tmp_path, job))
        second.start()
        second.join()
        busy.append(second.exitcode)
        real(*args)

    real = module._publish
    monkeypatch.setattr(module, "_publish", publish)
    module._do(reproduction(tmp_path), job.name, job.system, job.served_as)
    assert busy == [0]
    assert Results(tmp_path).get(job.name)
    assert not any((tmp_path / ".work").iterdir())


def _expect_busy(folder, job):
    try:
        module._do(reproduction(folder), job.name, job.system, job.served_as)
    except BusyError:
        os._exit(0)
    os._exit(1)


def test_what_cannot_be_used_of_a_training_is_told_with_a_way_out(tmp_path):
    (job, *_) = missing(tmp_path)
    (tmp_path / ".work" / job.name).mkdir(parents=True)
    (tmp_path / ".work" / job.name / "notes.txt").write_text("not empty")
    result = call("reproduce", "tiny", "--out", tmp_path, "--seeds", "9", "--datasets", "cifar10", code=2)
    assert f"to begin this training anew, delete {tmp_path / '.work' / job.name}" in result.stderr


def test_a_damaged_result_is_told_before_anything_is_trained(done, tmp_path):
    shutil.copytree(done[0], tmp_path / "r")
    next((tmp_path / "r").glob("*/result.json")).write_text("{}")
    with pytest.raises(RunError, match=r"result\.json: accuracy: expected"):
        missing(tmp_path / "r", (9, 42))


def test_what_somebody_else_has_trained_meanwhile_is_not_trained_again(done, monkeypatch):
    folder, _ = done
    (job, *_) = missing(folder, (42,))
    monkeypatch.setattr(module, "resume_or_train", None)
    module._do(reproduction(folder), job.name.replace("seed-42", "seed-9"), job.system, job.served_as)
    with pytest.raises(TypeError):
        module._do(reproduction(folder), job.name, job.system, job.served_as)


def test_the_seconds_of_a_resumed_training_are_of_all_its_rounds(tmp_path, monkeypatch):
    (job, *_) = missing(tmp_path)
    run = train(job.system, tmp_path / ".work" / job.name)
    slow = [{**record, "seconds": 1000.0} for record in run.records]
    (run.path / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in slow))
    monkeypatch.setattr(module, "_reports", mp.SimpleQueue(), raising=False)
    module._do(reproduction(tmp_path), job.name, job.system, job.served_as)
    assert 4000 <= Results(tmp_path).get(job.name).figures["seconds"] < 4100


def test_gradient_variances_of_another_scale_are_refused(tmp_path):
    write_gradient_variance(tmp_path, "cifar10", 9)
    options = ("--out", tmp_path, "--seeds", "9", "--datasets", "cifar10")
    assert "4.00e-03" in call("reproduce", "table3", *options).output
    result = call("reproduce", "gradient-variance", "--scale", "paper", *options, code=2)
    assert "cifar10_seed-9.json: is of the scale small, not paper; choose another folder" in result.stderr


@pytest.mark.parametrize("table", ["tiny", "gradient-variance"])
def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path, table):
    (tmp_path / "file").write_text("")
    result = call("reproduce", table, "--out", tmp_path / "file" / "r", "--seeds", "9", code=2)
    assert "file/r: cannot be written: Not a directory" in result.stderr
    assert result.stderr.count("\n") == 1


def test_gradient_variance_is_measured_once(tmp_path):
    options = ("--out", tmp_path / "r", "--seeds", "9", "--datasets", "cifar10,cifar10")
    call("reproduce", "gradient-variance", *options)
    path = Results(tmp_path / "r").gradient_variance_file("cifar10", 9)
    found = read_json(path)
    assert len(found["gradient_variance"]) == 3
    assert min(found["gradient_variance"]) > 0
    written = path.stat().st_mtime_ns
    (table,) = json.loads(call("reproduce", "gradient-variance", *options, "--json").output)
    assert table["variance"] == {"cifar10": {"9": found["gradient_variance"]}}
    assert path.stat().st_mtime_ns == written


def test_progress_counts_what_an_earlier_attempt_has_done(tmp_path):
    jobs = missing(tmp_path)
    work = tmp_path / ".work" / jobs[0].name
    work.mkdir(parents=True)
    (work / "rounds.jsonl").write_text("".join(json.dumps(record_of(round)) + "\n" for round in (1, 2)))
    seen = []

    class Enough(Exception):
        pass

    def observer(label, done):
        seen.append((label, done))
        raise Enough

    with pytest.raises(Enough):
        reproduction(tmp_path).run(jobs, workers=1, observer=observer)
    assert seen == [("starting", 0.5)]  # 2 of 4 rounds of one training


def test_a_worker_that_is_killed_gives_one_sentence(tmp_path, monkeypatch):
    tiny_tables.patch(monkeypatch.setattr, 100_000)

    def kill_a_worker(label, done):
        if done:
            worker = next(each for each in mp.active_children() if each.name.startswith("SpawnProcess"))
            os.kill(worker.pid, signal.SIGKILL)

    with pytest.raises(TrainingError, match="a training process was killed; run the same command again to go on"):
        reproduction(tmp_path).run(missing(tmp_path), workers=2, observer=kill_a_worker)
    assert mp.active_children() == []


def test_an_error_of_a_training_says_which_one_it_was(tmp_path):
    jobs = missing(tmp_path)
    work = tmp_path / ".work" / jobs[0].name
    work.mkdir(parents=True)
    (work / "spec.toml").write_text(missing(tmp_path, (42,))[0].system.to_toml())
    with pytest.raises(RunError, match=f"^{jobs[0].name}: .*another system"):
        reproduction(tmp_path).run(jobs[:1], workers=1)


@contextlib.contextmanager
def program(folder):
    """`python -m paper reproduce` in a process group of its own, until some training has had two rounds."""
    command = [sys.executable, "-m", "tests.paper.tiny_tables", str(LONG), "reproduce", "tiny", "--out", folder]
    command += ["--seeds", "9", "--datasets", "cifar10", "--workers", "2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(list(map(str, command)), start_new_session=True, text=True, cwd=PLACE, **pipes)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def until_training(process, folder):
    while not any(path.read_text().count("\n") > 1 for path in folder.glob(".work/*/rounds.jsonl")):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)


def until_nobody_is_left(group):
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.killpg(group, 0)
            time.sleep(0.05)


def test_after_kill_9_of_all_processes_it_goes_on_to_the_same_figures(tmp_path, monkeypatch):
    tiny_tables.patch(monkeypatch.setattr, LONG)
    with program(tmp_path / "killed") as process:
        until_training(process, tmp_path / "killed")
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert list((tmp_path / "killed" / ".work").iterdir())
        assert len(Results(tmp_path / "killed").all()) < DISTINCT
    for folder in (tmp_path / "killed", tmp_path / "whole"):
        reproduction(folder).run(missing(folder), workers=2)
    assert len(figures(tmp_path / "whole")) == DISTINCT
    assert figures(tmp_path / "killed") == figures(tmp_path / "whole")


def test_workers_do_not_outlive_a_killed_parent(tmp_path):
    with program(tmp_path) as process:
        until_training(process, tmp_path)
        process.kill()
        process.wait()
        until_nobody_is_left(process.pid)
        assert len(Results(tmp_path).all()) < DISTINCT  # they have not simply run to their end


@pytest.mark.parametrize(
    ("send", "number", "code"),
    [(os.killpg, signal.SIGINT, 130), (os.killpg, signal.SIGTERM, 143), (os.kill, signal.SIGTERM, 143)],
)
def test_a_signal_ends_with_its_code_one_sentence_and_no_worker(tmp_path, send, number, code):
    with program(tmp_path) as process:
        until_training(process, tmp_path)
        send(process.pid, number)
        _, stderr = process.communicate()
        assert process.returncode == code
        assert stderr == "paper: interrupted; `reproduce` goes on where it was\n"
        until_nobody_is_left(process.pid)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["nothing"], "there is no table 'nothing'; known are: all"),
        (["tiny", "--seeds", "9,9"], "--seeds: expected different numbers from 0 on, such as 9,42,67, got '9,9'"),
        (["tiny", "--datasets", "mnist"], "--datasets: expected cifar10, cifar100 or both, got 'mnist'"),
        (["only", "--datasets", "cifar100"], "--datasets: only is about cifar10 only, got 'cifar100'"),
        (
            ["tiny", "--settings", "80-15-5,1-2-3"],
            "--settings: expected some of 80-15-5, 60-30-10, 45-35-20, 33-33-33, ",
        ),
        (["tiny", "--settings", "5-15-80"], "--settings: tiny has the columns 80-15-5, 33-33-33 only, got '5-15-80'"),
        (["tiny", "--device", "quantum"], "--device: PyTorch cannot compute on 'quantum' here:"),
        (["tiny", "--device", "meta"], "--device: PyTorch cannot compute on 'meta' here:"),
        (["tiny", "--device", "hpu"], "--device: PyTorch cannot compute on 'hpu' here: No module named 'torch.hpu'\n"),
        (["tiny", "--device", "mps"], "arguments from the 'MPS' backend\n"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(tmp_path, options, sentence):
    result = call("reproduce", *options, "--out", tmp_path / "r", code=2)
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "r").exists()


def test_data_that_are_not_there_are_missed_before_anything_is_begun(tmp_path, monkeypatch):
    monkeypatch.undo()
    result = call("reproduce", "table1", "--out", tmp_path / "r", code=2)
    assert "say where with --data-dir" in result.stderr
    result = call("reproduce", "table1", "--out", tmp_path / "r", "--data-dir", tmp_path, code=2)
    assert "data set 'cifar10' is not there: looked for" in result.stderr
    assert f"_seed-9 and 89 more have no result yet in {tmp_path / 'r'}" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "r").exists()


def test_a_file_where_results_should_be_is_named(tmp_path):
    (tmp_path / "r").write_text("x")
    result = call("reproduce", "tiny", "--out", tmp_path / "r", code=2)
    assert result.stderr == f"paper: {tmp_path / 'r'}: is a file, expected a folder for results\n"


def test_an_unknown_scale_is_refused():
    assert "'tiny', 'small', 'paper'" in call("reproduce", "table1", "--scale", "huge", code=2).stderr
