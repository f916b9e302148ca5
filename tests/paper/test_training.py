"""A training's identity, and the digest of what decides it."""

from dataclasses import replace

import pytest

from exitflow.system.system import load_system, same_training
from paper.tables import SCALES, SEEDS, TABLES, distinct_trainings
from paper.training import Training, system_digest
from tests.small import tiny_system

PRESET = "paper-7:80-15-5"


def test_the_name_of_a_training_says_all_of_it():
    training = Training("cifar10", 7, "equal", "flops-prop + grid + coverage", "33-33-33", 9)
    assert training.name == "cifar10_7-nodes_equal_flops-prop+grid+coverage_33-33-33_seed-9"


@pytest.mark.parametrize(
    "change",
    [
        "training.seed=10",
        "training.rounds=7",
        "training.weighting=flops-prop",
        "model.width=7",
        'model.heads=["gap","gap","grid"]',
        "data.partition=biased",
        "federation.compression=int8",
    ],
)
def test_what_decides_a_training_changes_the_digest(change):
    assert system_digest(load_system(PRESET, [change])) != system_digest(load_system(PRESET))


def test_the_topology_changes_the_digest():
    assert system_digest(load_system("paper-7:60-30-10")) != system_digest(load_system(PRESET))


def test_where_the_data_lie_and_whether_it_says_how_exits_answer_do_not():
    system = tiny_system("training.weighting=auto")
    answers = "blended" if system.training.blends_answers else "own"
    for change in (
        {"data": replace(system.data, dir="elsewhere")},
        {"training": replace(system.training, answers=answers)},
    ):
        assert system_digest(replace(system, **change)) == system_digest(system)


def test_a_key_at_its_default_makes_no_difference_so_that_keys_can_be_added():
    system = load_system(PRESET)
    given = load_system(PRESET, [f"training.optimiser.momentum={system.training.optimiser.momentum}"])
    assert system_digest(given) == system_digest(system)


@pytest.mark.parametrize("scale", SCALES)
def test_two_trainings_have_the_same_digest_only_if_they_train_the_same(scale):
    jobs = distinct_trainings(list(TABLES.values()), SEEDS[:1], scale, ["cifar10"])
    by_digest = {}
    for job in jobs:
        by_digest.setdefault(system_digest(job.system), []).append(job.system)
    assert len(by_digest) == len(jobs)
    assert not any(same_training(jobs[0].system, job.system) for job in jobs[1:])
