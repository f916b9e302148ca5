"""A training whose nodes fail, cut off and gone on with: what the server knew of them is not forgotten."""

import shutil
from contextlib import nullcontext

import pytest

from exitflow.federated.places.serial import SerialBackend
from exitflow.federated.types import Missing
from exitflow.runs.runs import Run
from exitflow.runs.training import Training
from exitflow.seeds import derive
from exitflow.system.assembly import Assembly
from tests.runs.cut_off import DATA, Stop, same_weights, stop_at
from tests.small import tiny_system

SYSTEM = tiny_system(
    "federation.on_missing=reweight",
    "training.optimiser.momentum_between_rounds=keep",
    "training.rounds=6",
    "training.seed=9",
)


class OftenSilent(SerialBackend):
    """A third of the updates never comes."""

    def run(self, state, tasks):
        for task in tasks:
            if derive(0, "silent", task.round, task.node) % 3:
                yield from super().run(state, [task])
            else:
                yield Missing(task, "no answer within 5 s")


def advance(path, *, until=99.0):
    """Train in `path`, from wherever it stands; `Stop` after so many rounds."""
    assembly = Assembly(SYSTEM, DATA)
    run_dir = Run(path) if path.exists() else Run.create(path, SYSTEM.to_toml())
    backend = OftenSilent(assembly.trainer(run_dir.states_folder))
    return Training(assembly, run_dir).run(lambda state: nullcontext(backend), stop_at(until))


def cut_off(path, *, after):
    with pytest.raises(Stop):
        advance(path, until=after)


def test_a_run_that_was_cut_off_weighs_updates_by_all_the_absences_before(tmp_path):
    whole = advance(tmp_path / "whole")
    assert any(record.missing for record in whole.records[:4])
    cut_off(tmp_path / "cut", after=4.0)
    cut = advance(tmp_path / "cut")
    assert same_weights(whole, cut)
    assert [record.attendance for record in cut.records] == [record.attendance for record in whole.records]


def test_a_node_that_lost_its_momentum_while_the_run_was_cut_off_is_named(tmp_path):
    cut_off(tmp_path / "run", after=4.0)
    run = Run(tmp_path / "run")
    assert not any(record.state_lost for record in run.records)
    shutil.rmtree(run.states_folder)
    records = advance(run.path).records
    assert records[4].state_lost
    assert set(records[4].state_lost) <= {node for node, came in records[4].attendance.items() if came}
