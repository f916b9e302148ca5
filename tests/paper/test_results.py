"""The store of results: read with care, written whole, by one process at a time."""

import gzip
import json
import multiprocessing as mp
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from exitflow.config import encode
from exitflow.errors import RunError
from exitflow.runs.records import Profile, Validation
from paper.results import Answers, Results, TrainingResult, curves_json, publish, records_to_keep
from paper.tables import TABLES, distinct_trainings
from paper.training import system_digest
from tests.paper.synthetic import COSTS, rewrite, write_gradient_variance, write_training
from tests.small import record_of

JOBS = distinct_trainings([TABLES["table1"], TABLES["ours"]], [9], "small", ["cifar10"])
ANSWERS = Answers((0.25, 0.5, 0.75), {"80-15-5": 0.3})


def line_of(job, **changes):
    given = {"answers": ANSWERS, "costs": COSTS} | changes
    return TrainingResult(job.training, "small", system_digest(job.system), **given)


def curves_of(job, rounds=None):
    last = record_of(rounds or job.system.training.rounds, losses={"1": 1.23456789})
    return curves_json(job.training, [last], Profile(num_steps=3))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "small.jsonl"


@pytest.fixture
def result(path):
    publish(path, line_of(JOBS[0]), curves_of(JOBS[0]))
    return Results(path).get(JOBS[0].training)


def test_what_was_published_is_read(result, path):
    assert result.accuracy("80-15-5") == 0.3
    assert result.exit_accuracy == [0.25, 0.5, 0.75]
    assert result.costs == COSTS
    assert result.name == JOBS[0].name
    assert result.system == JOBS[0].system
    assert result.profile == Profile(num_steps=3)
    assert [(record.round, record.losses) for record in result.records] == [(800, {"1": 1.23457})]
    assert Results(path).seeds() == (9,)
    assert Results(path).get(JOBS[1].training) is None


def test_nothing_is_read_where_nothing_is(path):
    assert Results(path).all() == []
    assert Results(path).seeds() == ()
    assert Results(path).scale is None


def test_lines_are_sorted_whatever_was_published_first(path):
    write_gradient_variance(path, "cifar10", 42)
    for job in random.Random(1).sample(JOBS, len(JOBS)):
        publish(path, line_of(job), curves_of(job))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line.get("training") for line in lines] == [*(encode(t) for t in sorted(j.training for j in JOBS)), None]
    curves = [json.loads(line)["training"] for line in gzip.decompress(Results(path).curves.read_bytes()).splitlines()]
    assert curves == [encode(each) for each in sorted(job.training for job in JOBS)]
    assert Results(path).seeds() == (9, 42)


def test_the_same_results_are_the_same_bytes(path, tmp_path):
    other = tmp_path / "other.jsonl"
    for job in JOBS[:3]:
        publish(path, line_of(job), curves_of(job))
    for job in reversed(JOBS[:3]):
        publish(other, line_of(job), curves_of(job))
    assert path.read_bytes() == other.read_bytes()
    assert Results(path).curves.read_bytes() == Results(other).curves.read_bytes()


def test_a_training_that_is_published_again_replaces_what_was_there(path, result):
    publish(path, line_of(JOBS[0], seconds=5.0), curves_of(JOBS[0]))
    (only,) = Results(path).all()
    assert only.line.seconds == 5.0


def test_own_answers_stand_beside_those_that_are_given_together(path, result):
    rewrite(path, "", own_answers=Answers((0.25, 0.4, 0.5), {"80-15-5": 0.2}))
    by_itself = Results(path).get(JOBS[0].training, own_answers=True)
    assert (by_itself.accuracy("80-15-5"), by_itself.exit_accuracy) == (0.2, [0.25, 0.4, 0.5])
    with pytest.raises(RunError, match=r"_seed-9: own_answers: says nothing of the serving setting 1-2-3; remove"):
        by_itself.accuracy("1-2-3")
    assert result.accuracy("80-15-5") == 0.3


def test_what_a_result_does_not_say_is_named(path, result):
    with pytest.raises(RunError, match="says nothing of the serving setting 1-2-3; remove the line"):
        result.accuracy("1-2-3")
    rewrite(path, "", costs=None)
    with pytest.raises(RunError, match="does not say what the training took; remove the line"):
        _ = Results(path).get(JOBS[0].training).costs


@pytest.mark.parametrize(("num_rounds", "num_kept"), [(1, 1), (4, 4), (100, 100), (101, 51), (350, 88), (800, 100)])
def test_a_hundred_records_are_kept_the_last_and_those_with_a_validation_among_them(num_rounds, num_kept):
    plain = [record_of(round) for round in range(1, num_rounds + 1)]
    kept = records_to_keep(plain)
    assert len(kept) == num_kept
    assert kept[-1] is plain[-1]
    validated = [replace(record, validation=Validation(1.0) if record.round == 7 else None) for record in plain]
    assert num_rounds < 7 or validated[6] in records_to_keep(validated)


def given(**changes):
    return json.dumps(encode(line_of(JOBS[0])) | changes)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ("[]", "expected a table, got the list"),
        ('{"training": 1, "scale": "small", "system": "0", "answers": {}}', "training: expected a table, got 1"),
        (given(answers={}), "answers.exit_accuracy: is missing"),
        (
            given(answers={"accuracy": {"a": "x"}, "exit_accuracy": []}),
            "answers.accuracy.a: expected a number, got 'x'",
        ),
        (
            given(answers={"accuracy": {"a": 42.4}, "exit_accuracy": []}),
            "answers.accuracy: expected numbers from 0 to 1",
        ),
        (given(answers={"accuracy": {"a": float("nan")}, "exit_accuracy": []}), "NaN is no number of JSON"),
        (given(answers={"accuracy": {"a": 1}, "exit_accuracy": [None]}), r"exit_accuracy.*\[0\]: expected a number"),
        (given(own_answers={}), "own_answers.exit_accuracy: is missing"),
        (given(seconds="x"), "seconds: expected a number, got 'x'"),
        (given(seconds=10**400), "seconds: expected a number of at most 64 bits, got one of 401 digits"),
        (given(costs={"bytes_sent": 1}), "costs.multiply_adds: is missing"),
        (given(provenance={"date": 5}), "provenance.date: expected a string, got 5"),
        (given(scale="huge"), "scale: must be one of"),
        (given(seedless=1), "unknown key"),
        (given() + "\n" + given(), "line 3: training: is there already, in a line above"),
    ],
)
def test_a_damaged_line_is_one_sentence(path, text, problem):
    write_gradient_variance(path, "cifar10", 42)
    path.write_text(path.read_text() + text + "\n")
    with pytest.raises(RunError, match=rf"small\.jsonl, line [23]: .*{problem}|small\.jsonl, {problem}") as caught:
        _ = Results(path).lines
    assert str(caught.value).endswith("; remove the line, and what it is about will be made again")


@pytest.mark.parametrize("values", [[1.0], [1, 1, -1], [1, 1, 10**400], ["a", 1, 1]])
def test_damaged_gradient_variances_are_one_sentence(path, values):
    line = {"gradients_of": "cifar10", "seed": 9, "scale": "small", "system": "0", "variance": values}
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(RunError, match=r"line 1: variance.*: expected .*; remove the line"):
        _ = Results(path).lines


def with_curves(path, text):
    Results(path).curves.write_bytes(text if isinstance(text, bytes) else gzip.compress(text.encode()))
    return Results(path).get(JOBS[0].training)


def test_records_that_are_missing_or_end_too_early_are_one_sentence(path, result):
    with pytest.raises(RunError, match=r"curves\.jsonl\.gz: .*seed-9: is missing; restore it, or remove"):
        _ = with_curves(path, "").records
    with pytest.raises(RunError, match=r"expected records up to round 800, got them up to 3"):
        _ = with_curves(path, json.dumps(curves_of(JOBS[0], 3))).records


@pytest.mark.parametrize(
    "change",
    [
        {"rounds": [1, 800]},
        {"rounds": ["800"]},
        {"exit_weights": [["a"]]},
        {"validation": [[1]]},
        {"validation": [{"accuracy": "x"}]},
        {"validation": [{"accuracy": 0.5, "exit_accuracy": [True]}]},
        {"losses": [1]},
    ],
)
def test_damaged_records_are_one_sentence(path, result, change):
    damaged = with_curves(path, json.dumps(curves_of(JOBS[0]) | change) + "\n")
    with pytest.raises(RunError, match=r"curves\.jsonl\.gz: .*seed-9: .*restore it, or remove the training's line"):
        _ = damaged.records


@pytest.mark.parametrize(
    "damage", [b"no gzip", gzip.compress(b'{"a": 1}' * 99, mtime=0)[:-9], gzip.compress(b"x", mtime=0), b"\x1f\x8b"]
)
def test_a_damaged_file_of_curves_is_one_sentence(path, result, damage):
    with pytest.raises(RunError, match=r"curves\.jsonl\.gz: is damaged: .*; restore it"):
        _ = with_curves(path, damage).records


def test_a_line_of_curves_that_belongs_to_nothing_is_one_sentence(path, result):
    with pytest.raises(RunError, match="a line of curves says not of which training they are"):
        _ = with_curves(path, '{"rounds": []}\n').records


def test_a_folder_in_the_place_of_the_store_is_one_sentence(path):
    path.mkdir()
    with pytest.raises(RunError, match=r"small\.jsonl: cannot be read: .*directory"):
        _ = Results(path).lines


def test_nothing_that_is_no_number_is_written(path, result):
    written = path.read_bytes()
    with pytest.raises(ValueError, match="Out of range"):
        publish(path, line_of(JOBS[1], seconds=float("nan")))
    assert path.read_bytes() == written


def _publish_all(path, jobs):
    for job in jobs:
        publish(path, line_of(job), curves_of(job))


@pytest.mark.heavy
def test_of_many_that_publish_at_once_none_is_lost(path):
    context = mp.get_context("fork")
    writers = [context.Process(target=_publish_all, args=(path, JOBS[index::4])) for index in range(4)]
    for each in writers:
        each.start()
    for each in writers:
        each.join()
    results = Results(path)
    assert {result.training for result in results.all()} == {job.training for job in JOBS}
    assert all(result.records for result in results.all())


@pytest.mark.heavy
def test_kill_9_leaves_every_line_that_was_there_and_whole_ones_only(path):
    _publish_all(path, JOBS[:4])
    kept = set(path.read_text().splitlines())
    for attempt in range(8):
        writer = mp.get_context("fork").Process(target=_publish_all, args=(path, JOBS[4:]))
        writer.start()
        time.sleep(0.005 * attempt)
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        results = Results(path)
        assert kept <= set(path.read_text().splitlines())
        assert all(result.records for result in results.all())  # whoever has a line has curves
    _publish_all(path, JOBS)  # no lock is left behind
    assert len(Results(path).all()) == len(JOBS)


def test_a_store_is_read_once(path, monkeypatch):
    rng = np.random.default_rng(0)
    for job in JOBS[:5]:
        write_training(path, job, rng)
    read = []
    from paper import results as module

    real = module.read_file
    monkeypatch.setattr(module, "read_file", lambda file, limit: read.append(file.name) or real(file, limit))
    results = Results(path)
    for result in results.all():
        assert result.records
        assert result.accuracy("80-15-5")
    assert sorted(read) == ["small.curves.jsonl.gz", "small.jsonl"]


@pytest.mark.heavy
def test_reading_results_needs_no_pytorch():
    program = "import sys, paper.documents; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
