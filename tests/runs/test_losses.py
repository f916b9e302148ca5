"""What a training went without is said when it happens, and when it has ended."""

import logging
from contextlib import nullcontext

import pytest

from exitflow.cli.training import print_training
from exitflow.federated.places.serial import SerialBackend
from exitflow.federated.types import Missing
from exitflow.runs.losses import TrainingLosses
from exitflow.runs.runs import Run
from exitflow.runs.training import Training
from exitflow.system.assembly import Assembly
from tests.runs.cut_off import DATA
from tests.small import record_of, tiny_system

SYSTEM = tiny_system("federation.on_missing=skip", "training.rounds=4")


class Absent(SerialBackend):
    """`device-0` is away in rounds 2 and 3."""

    def run(self, state, tasks):
        for task in tasks:
            if task.node == "device-0" and task.round in (2, 3):
                yield Missing(task, "it was there, and is gone")
            else:
                yield from super().run(state, [task])


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """A run that was without a node for a while, and its log."""
    path, lines = tmp_path_factory.mktemp("runs") / "run", []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("exitflow.runs").addHandler(handler)
    assembly, run_dir = Assembly(SYSTEM, DATA), Run.create(path, SYSTEM.to_toml())
    backend = Absent(assembly.trainer(run_dir.states_folder))
    run = Training(assembly, run_dir).run(lambda state: nullcontext(backend), None)
    logging.getLogger("exitflow.runs").removeHandler(handler)
    return run, lines


def test_a_node_that_goes_and_comes_back_is_told_once_each(told):
    assert told[1] == [
        "round 2: node 'device-0' is lost: it was there, and is gone",
        "round 4: node 'device-0' is back; lost since round 2",
    ]


def test_records_tell_who_was_asked_from_whose_update_counted(told):
    assert [record.num_asked for record in told[0].records] == [7, 7, 7, 7]
    assert [record.num_tasks for record in told[0].records] == [7, 6, 6, 7]


def test_the_summary_says_who_how_long_why_and_how_much_of_which_exit(told, capsys):
    print_training(told[0], as_json=False)
    said = capsys.readouterr().out
    assert "Node 'device-0' was lost in 2 of 4 rounds: it was there, and is gone.\n" in said
    # one of four devices in two of four rounds; the deeper nodes train exit 1 too, and half of the data are theirs
    share = told[0].records[1].lost_weight[0] / 2
    assert f"of the weight of all rounds, {100 * share:.1f} % of exit 1.\n" in said
    assert told[0].losses.to_json()["lost"] == {"device-0": {"rounds": 2, "reason": "it was there, and is gone"}}


def test_nothing_is_said_where_nothing_was_lost():
    assert TrainingLosses.of([record_of(1), record_of(2)]).sentences() == []


def test_a_summary_names_a_few_nodes_and_counts_the_others():
    records = [record_of(1, dropped=tuple(f"n{number}" for number in range(9)), lost_weight=(1.0, 0.0, 0.0))]
    sentences = TrainingLosses.of(records).sentences()
    assert sentences[0] == "Node 'n0' was lost in 1 of 1 rounds: its update held NaN or infinity."
    assert sentences[5] == "4 more nodes were lost in some rounds; see rounds.jsonl."
    assert sentences[6] == "With them went, of the weight of all rounds, 100.0 % of exit 1."
