"""The journal of a federation: what a training writes is what the log repeats and the status adds up."""

import json
import logging
import multiprocessing as mp

import pytest

pytest.importorskip("flwr")

from exitflow.errors import TrainingError
from exitflow.federated.types import Missing, Update
from exitflow.flower.federation_status import Present, added_up
from exitflow.flower.journal import FILE, ROTATED_AT, Follower, is_being_kept, keeping_journal, read_journal, tell
from tests.small import task_of

KEYS = {"device-0": "aa", "cloud-0": "bb"}


def update(round, node, *losses):
    task = task_of(round, node, 1, 1.0, 0)
    return Update(task, {}, {}, 10, 5, losses, wire_bytes=(2000, 1000), seconds=1.25)


def write(folder, *answers, run="run", problem=None):
    """A training of 3 rounds."""
    try:
        with keeping_journal(folder, run=folder / run, rounds=3) as journal:
            for answer in answers:
                journal.tasks([answer.task])
                journal.answer(answer)
            if problem:
                raise TrainingError(problem)
    except TrainingError:
        pass


def status(folder, present=(), going_on=False):
    return added_up(read_journal(folder), KEYS, present, going_on=going_on)


def test_status_has_the_last_update_of_each_node_and_the_last_training(tmp_path):
    write(tmp_path, update(1, "device-0", 2.5), update(2, "device-0", 1.5, None, 0.5), problem="the server is away")
    nodes, training = status(tmp_path)
    assert (nodes["device-0"].round, nodes["device-0"].loss, nodes["device-0"].bytes) == (2, 1.0, 1000)
    assert nodes["cloud-0"].round is None
    assert (training.round, training.rounds, training.problem) == (2, 3, "the server is away")
    write(tmp_path, run="second")
    _, training = status(tmp_path)
    assert (training.run, training.round, training.problem) == (str(tmp_path / "second"), None, None)


def test_a_problem_stands_until_an_update_counts(tmp_path):
    late = Missing(task_of(2, "device-0", 1, 1.0, 0), "no answer in time", seconds=60.0)
    write(tmp_path, update(1, "device-0", 2.5), late)
    assert status(tmp_path)[0]["device-0"].problem == "no answer in time"
    assert status(tmp_path)[0]["device-0"].round == 1
    write(tmp_path, update(3, "device-0", 2.0))
    assert status(tmp_path)[0]["device-0"].problem is None


def test_only_nodes_with_the_key_of_the_federation_are_connected(tmp_path):
    nodes, training = status(tmp_path, [Present("device-0", "aa", True, "t"), Present("cloud-0", "other", True, "t")])
    assert training is None
    assert (nodes["device-0"].connected, nodes["cloud-0"].connected) == (True, False)
    assert status(tmp_path, None)[0]["device-0"].connected is None


def test_losses_that_are_no_numbers_leave_json_whole(tmp_path):
    write(tmp_path, update(1, "device-0", float("nan")))
    assert status(tmp_path)[0]["device-0"].loss is None


def _keep(folder, ready, done):
    with keeping_journal(folder, run=folder, rounds=1):
        ready.set()
        done.wait(30)


@pytest.mark.heavy
def test_a_training_that_was_killed_does_not_go_on(tmp_path):
    assert not is_being_kept(tmp_path)
    context = mp.get_context("spawn")
    ready, done = context.Event(), context.Event()
    process = context.Process(target=_keep, args=(tmp_path, ready, done))
    process.start()
    assert ready.wait(60)
    assert is_being_kept(tmp_path)
    process.kill()
    process.join()
    assert not is_being_kept(tmp_path)
    assert status(tmp_path)[1].problem == "it was killed"


def test_lines_that_a_kill_cut_off_or_that_are_no_events_are_passed_over(tmp_path):
    write(tmp_path, update(1, "device-0", 2.5))
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'[]\n{"event": 1}\n\xff\n{"event": "upda')
    assert [event["event"] for event in read_journal(tmp_path)] == ["training", "round", "update", "end"]


def test_a_follower_reads_each_event_once_also_from_a_new_journal(tmp_path):
    write(tmp_path, update(1, "device-0", 2.5))
    follower = Follower(tmp_path)
    assert follower.new() == []
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'{"event": "end"')
    assert follower.new() == []
    with (tmp_path / FILE).open("ab") as file:
        file.write(b', "problem": null}\n')
    assert [event["event"] for event in follower.new()] == ["end"]
    (tmp_path / FILE).write_text(json.dumps({"event": "training"}) + "\n")
    assert [event["event"] for event in follower.new()] == ["training"]
    assert follower.new() == []


def test_a_journal_does_not_grow_for_ever(tmp_path):
    (tmp_path / FILE).write_bytes(b"\n" * (ROTATED_AT + 1))
    write(tmp_path, update(1, "device-0", 2.5))
    assert (tmp_path / FILE).stat().st_size < 2000
    assert len(read_journal(tmp_path)) == 4


def test_the_log_is_told_in_sentences_and_warned_of_what_went_wrong(tmp_path, caplog):
    caplog.set_level(logging.INFO, "exitflow.federation")
    refused = Missing(task_of(1, "cloud-0", 1, 1.0, 0), "its delta is too large", True, (9, 8), 1.0)
    write(tmp_path, update(1, "device-0", 2.5), refused)
    caplog.clear()
    for event in read_journal(tmp_path):
        tell(event)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", f"a training of 3 rounds has come: {tmp_path / 'run'}"),
        ("INFO", "round 1: tasks for 1 nodes"),
        ("INFO", "round 1: node 'device-0' has sent its update, 1000 bytes"),
        ("INFO", "round 1: tasks for 1 nodes"),
        ("WARNING", "round 1: the update of node 'cloud-0' is refused: its delta is too large"),
        ("INFO", "the training ended: all rounds are done"),
    ]
