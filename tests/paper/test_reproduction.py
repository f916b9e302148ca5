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
from exitflow.runs.runs import Run
from exitflow.runs.training import train
from exitflow.runs.training_costs import TrainingCosts
from paper import reproduction as module
from paper import results as results_module
from paper import tables as tables_module
from paper.figures import TableFigures
from paper.reproduction import Reproduction
from paper.results import Answers, Results
from paper.tables import Row, Table
from tests.paper import tiny_tables
from tests.paper.command import call
from tests.paper.synthetic import remove, rewrite, write_gradient_variance, write_training
from tests.paper.tiny_tables import DISTINCT, TABLE
from tests.small import record_of

pytestmark = pytest.mark.heavy

LONG = 10  # rounds, which give time to interrupt
PLACE = Path(__file__).parents[2]


def store(folder):
    return folder / "small.jsonl"


def reproduction(folder):
    return Reproduction(store(folder), "small")


def missing(folder, seeds=(9,)):
    return reproduction(folder).missing([TABLE], seeds, ["cifar10"])


def results(folder):
    return Results(store(folder))


def figures(folder):
    """All that must not depend on interruptions."""
    return {each.name: (replace(each.line, seconds=None), each.records, each.profile) for each in results(folder).all()}


def work_of(folder, job):
    return folder / ".work" / "small" / job.name


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """An uninterrupted reproduction of the tiny table, from the command line."""
    folder = tmp_path_factory.mktemp("reproduction") / "results"
    with pytest.MonkeyPatch.context() as patch:
        tiny_tables.patch(patch.setattr, 4)
        options = ("--seeds", "9", "--datasets", "cifar10", "--workers", "2")
        result = call("reproduce", "tiny", "--out", store(folder), *options)
        return folder, result.output


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    tiny_tables.patch(monkeypatch.setattr, 4)


def test_every_distinct_training_leaves_a_result_and_no_weights(done):
    folder, _ = done
    found = results(folder).all()
    assert len(found) == DISTINCT
    for result in found:
        assert len(result.records) == 4
        assert result.profile.num_steps > 0
        assert result.line.seconds > 0
        assert result.line.provenance.commit
        assert result.system.training.seed == 9
    names = {"small.jsonl", "small.curves.jsonl.gz", ".small.lock"}
    assert {path.name for path in folder.iterdir()} == names  # .work is gone


def test_of_a_long_training_some_records_are_kept_and_the_costs_of_all(tmp_path, monkeypatch):
    monkeypatch.setattr(results_module, "NUM_RECORDS", 2)
    system = tiny_tables.tiny(4)("paper-7:80-15-5", ["training.evaluate_every=4"])
    (job, *_) = missing(tmp_path)
    monkeypatch.setattr(module, "_reports", mp.SimpleQueue(), raising=False)
    all_costs = TrainingCosts.of(train(system, tmp_path / "whole").records)
    module._do(reproduction(tmp_path), job.training, system, job.served_as)
    kept = results(tmp_path).get(job.training)
    assert [record.round for record in kept.records] == [2, 4]
    assert kept.costs == all_costs
    assert all_costs.bytes_sent > 0
    assert not work_of(tmp_path, job).exists()


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
    result = call("reproduce", "tiny", "--out", store(folder), "--seeds", "9", "--datasets", "cifar10", "--json")
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
    figures = TableFigures(table, results(tmp_path), (9,))
    found = {row.label: figures.found(figures.table.cell("cifar10", row.label, "33-33-33"))[0] for row in table.rows}
    assert found["each by itself"].exit_accuracy == found["trained so"].exit_accuracy
    assert found["each by itself"].accuracy("33-33-33") == found["trained so"].accuracy("33-33-33")
    assert found["together"].accuracy("33-33-33") != found["trained so"].accuracy("33-33-33")


def test_a_result_without_the_answers_that_a_row_wants_is_refused_before_anything_is_trained(tmp_path, monkeypatch):
    together = Row("together", "auto", ("training.answers=blended",))
    alone = replace(together, label="each by itself", own_answers_of="together")
    table = Table("tiny", "", (together, alone), settings=("80-15-5",))
    (job,) = reproduction(tmp_path).missing([table], [9], ["cifar10"])
    monkeypatch.setattr(tables_module, "TABLES", {"tiny": table})
    write_training(store(tmp_path), job, np.random.default_rng(0))
    assert reproduction(tmp_path).missing([table], [9], ["cifar10"]) == []
    rewrite(store(tmp_path), job.name, own_answers=None)
    assert reproduction(tmp_path).missing([replace(table, rows=(together,))], [9], ["cifar10"]) == []
    with pytest.raises(RunError, match=r"own_answers: the accuracies of exits by themselves are missing"):
        reproduction(tmp_path).missing([table], [9], ["cifar10"])


def test_only_the_columns_that_are_asked_for_are_trained_and_printed(done, tmp_path):
    options = ("--out", store(tmp_path), "--seeds", "9", "--datasets", "cifar10", "--settings", "33-33-33", "--json")
    shutil.copytree(done[0], tmp_path, dirs_exist_ok=True)
    remove(store(tmp_path), "_80-15-5_")
    (table,) = json.loads(call("reproduce", "tiny", *options).output)
    assert {cell["setting"] for cell in table["cells"]} == {"33-33-33"}
    assert {cell["seeds"] for cell in table["cells"]} == {1}
    assert len(missing(tmp_path)) == 1  # serving-rate at 80-15-5, which was not asked for


def test_results_of_another_system_are_refused(done, monkeypatch):
    folder, _ = done
    tiny_tables.patch(monkeypatch.setattr, 5)
    with pytest.raises(RunError, match=r"seed-9 is of another system .* choose another file for results, or remove"):
        missing(folder)
    with pytest.raises(RunError, match="is of another system"):
        missing(folder, (42,))  # none of which is there, but what is must not be mixed with it


def test_a_result_that_does_not_know_a_setting_is_told_before_anything_is_trained(done, tmp_path):
    shutil.copytree(done[0], tmp_path / "r")
    rewrite(store(tmp_path / "r"), "equal-weight", answers=Answers((0.1,) * 3, {"33-33-33": 0.1}))
    with pytest.raises(RunError, match=r"equal-weight.*: says nothing of the serving setting 80-15-5"):
        missing(tmp_path / "r", (9, 42))


def test_what_another_process_is_training_is_left_to_it(tmp_path):
    jobs = missing(tmp_path)
    busy = Run.create(work_of(tmp_path, jobs[1]), jobs[1].system.to_toml())
    with busy.lock():
        result = call("reproduce", "tiny", "--out", store(tmp_path), "--seeds", "9", "--datasets", "cifar10")
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
    module._do(reproduction(tmp_path), job.training, job.system, job.served_as)
    assert busy == [0]
    assert results(tmp_path).get(job.training)
    assert not any((tmp_path / ".work" / "small").iterdir())


def _expect_busy(folder, job):
    try:
        module._do(reproduction(folder), job.training, job.system, job.served_as)
    except BusyError:
        os._exit(0)
    os._exit(1)


def test_what_cannot_be_used_of_a_training_is_told_with_a_way_out(tmp_path):
    (job, *_) = missing(tmp_path)
    work_of(tmp_path, job).mkdir(parents=True)
    (work_of(tmp_path, job) / "notes.txt").write_text("not empty")
    result = call("reproduce", "tiny", "--out", store(tmp_path), "--seeds", "9", "--datasets", "cifar10", code=2)
    assert f"to begin this training anew, delete {work_of(tmp_path, job)}" in result.stderr


def test_a_damaged_result_is_told_before_anything_is_trained(done, tmp_path):
    shutil.copytree(done[0], tmp_path / "r")
    store(tmp_path / "r").write_text("{}")
    with pytest.raises(RunError, match=r"small\.jsonl, line 1: .*is missing; remove the line"):
        missing(tmp_path / "r", (9, 42))


def test_what_somebody_else_has_trained_meanwhile_is_not_trained_again(done, monkeypatch):
    folder, _ = done
    (job, *_) = missing(folder, (42,))
    monkeypatch.setattr(module, "resume_or_train", None)
    module._do(reproduction(folder), replace(job.training, seed=9), job.system, job.served_as)
    with pytest.raises(TypeError):
        module._do(reproduction(folder), job.training, job.system, job.served_as)


def test_the_seconds_of_a_resumed_training_are_of_all_its_rounds(tmp_path, monkeypatch):
    (job, *_) = missing(tmp_path)
    run = train(job.system, work_of(tmp_path, job))
    records = run.path / "rounds.jsonl"
    slow = [{**json.loads(line), "seconds": 1000.0} for line in records.read_text().splitlines()]
    records.write_text("".join(json.dumps(record) + "\n" for record in slow))
    monkeypatch.setattr(module, "_reports", mp.SimpleQueue(), raising=False)
    module._do(reproduction(tmp_path), job.training, job.system, job.served_as)
    assert 4000 <= results(tmp_path).get(job.training).line.seconds < 4100


def test_gradient_variances_of_another_scale_are_refused(tmp_path):
    write_gradient_variance(store(tmp_path), "cifar10", 9)
    options = ("--out", store(tmp_path), "--seeds", "9", "--datasets", "cifar10")
    assert "4.00e-03" in call("reproduce", "table3", *options).output
    result = call("reproduce", "gradient-variance", "--scale", "paper", *options, code=2)
    assert "cifar10, seed 9 is of the scale small, not paper; choose another file" in result.stderr


@pytest.mark.parametrize("table", ["tiny", "gradient-variance"])
def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path, table):
    (tmp_path / "file").write_text("")
    result = call("reproduce", table, "--out", tmp_path / "file" / "r" / "x.jsonl", "--seeds", "9", code=2)
    assert "file/r/x.jsonl: cannot be read: Not a directory" in result.stderr
    assert result.stderr.count("\n") == 1


def test_gradient_variance_is_measured_once(tmp_path):
    path = store(tmp_path / "r")
    options = ("--out", path, "--seeds", "9", "--datasets", "cifar10,cifar10")
    call("reproduce", "gradient-variance", *options)
    found = Results(path).gradient_variance("cifar10", 9)
    assert len(found) == 3
    assert min(found) > 0
    written = path.stat().st_mtime_ns
    (table,) = json.loads(call("reproduce", "gradient-variance", *options, "--json").output)
    assert table["variance"] == {"cifar10": {"9": list(found)}}
    assert path.stat().st_mtime_ns == written


def test_progress_counts_what_an_earlier_attempt_has_done(tmp_path):
    jobs = missing(tmp_path)
    work = work_of(tmp_path, jobs[0])
    work.mkdir(parents=True)
    (work / "rounds.jsonl").write_text("".join(record_of(round).to_json().decode() + "\n" for round in (1, 2)))
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
    work = work_of(tmp_path, jobs[0])
    work.mkdir(parents=True)
    (work / "spec.toml").write_text(missing(tmp_path, (42,))[0].system.to_toml())
    with pytest.raises(RunError, match=f"^{jobs[0].name}: .*another system"):
        reproduction(tmp_path).run(jobs[:1], workers=1)


@contextlib.contextmanager
def program(folder):
    """`python -m paper reproduce` in a process group of its own, until some training has had two rounds."""
    command = [sys.executable, "-m", "tests.paper.tiny_tables", str(LONG), "reproduce", "tiny", "--out", store(folder)]
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
    while not any(path.read_text().count("\n") > 1 for path in folder.glob(".work/small/*/rounds.jsonl")):
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
        assert len(results(tmp_path / "killed").all()) < DISTINCT
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
        assert len(results(tmp_path).all()) < DISTINCT  # they have not simply run to their end


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
    result = call("reproduce", *options, "--out", tmp_path / "r" / "x.jsonl", code=2)
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "r").exists()


def test_data_that_are_not_there_are_missed_before_anything_is_begun(tmp_path, monkeypatch):
    monkeypatch.undo()
    result = call("reproduce", "table1", "--out", tmp_path / "r" / "x.jsonl", code=2)
    assert "say where with --data-dir" in result.stderr
    result = call("reproduce", "table1", "--out", tmp_path / "r" / "x.jsonl", "--data-dir", tmp_path, code=2)
    assert "data set 'cifar10' is not there: looked for" in result.stderr
    assert f"_seed-9 and 89 more have no result yet in {tmp_path / 'r' / 'x.jsonl'}" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "r").exists()


def test_a_file_where_results_should_be_is_named(tmp_path):
    (tmp_path / "r").write_text("x")
    result = call("reproduce", "tiny", "--out", tmp_path / "r" / "x.jsonl", code=2)
    assert f"{tmp_path / 'r'}" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_folder_where_the_store_should_be_is_named(tmp_path):
    result = call("reproduce", "tiny", "--out", tmp_path, code=2)
    assert f"{tmp_path}: " in result.stderr
    assert result.stderr.count("\n") == 1


def test_an_unknown_scale_is_refused():
    assert "'tiny', 'small', 'paper'" in call("reproduce", "table1", "--scale", "huge", code=2).stderr
