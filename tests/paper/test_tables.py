"""The paper's tables: which trainings they need, and what the paper reports."""

import dataclasses
import re
from pathlib import Path

import pytest

from exitflow.errors import ConfigError
from exitflow.topology.rates import serving_plan
from exitflow.topology.settings import PAPER_SETTINGS, parse_setting
from paper.tables import (
    DATASETS,
    LITE0_SHA256,
    SCALES,
    SEEDS,
    TABLES,
    distinct_trainings,
    find_table,
    published,
    published_gradient_variance,
    system_for_variance,
)
from paper.training import system_digest

ROOT = Path(__file__).parents[2]


def weightings(jobs):
    return [job.system.training.weighting for job in jobs]


def test_table_1_needs_15_trainings_for_each_data_set_and_seed():
    jobs = distinct_trainings([TABLES["table1"]], [9], "small", ["cifar10"])
    assert len(jobs) == 15
    assert weightings(jobs).count("equal-weight") == 1
    assert weightings(jobs).count("flops-prop") == 1
    assert weightings(jobs).count("serving-rate") == 6  # at 33-33-33 it is equal-weight
    assert weightings(jobs).count("balanced-adj") == 7
    assert sum(len(job.cells) for job in jobs) == 28
    everything = distinct_trainings([TABLES["table1"]], SEEDS, "small", DATASETS)
    assert len(everything) == 15 * 3 * 2


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("table2", 3),
        ("table4", 6),
        ("table5", 15),
        ("table6", 7),
        ("ours", 22),
        ("blended", 8),
        ("ours-17-nodes", 2),
        ("ours-biased", 2),
        ("ours-highly-biased", 1),
        ("parts", 17),
    ],
)
def test_the_other_tables_share_trainings_too(name, count):
    # table6: equal-weight once, the other two at 3 settings; ours: 1 + 1 + 6 + 7, and auto at 7, however it answers;
    # blended: 1 + 1 + 2 + 2, and auto at 2;
    # parts: twice 1 + 1 + 2 + 3, and one more at 3 settings
    assert len(distinct_trainings([TABLES[name]], [9], "small", ["cifar10"])) == count


def test_table_2_is_part_of_table_6():
    both = distinct_trainings([TABLES["table2"], TABLES["table6"]], [9], "small")
    assert {job.name for job in both} == {job.name for job in distinct_trainings([TABLES["table6"]], [9], "small")}


def test_seeds_come_one_after_the_other_so_that_the_whole_picture_is_there_early():
    jobs = distinct_trainings(list(TABLES.values()), [42, 9], "small")
    seeds = [job.system.training.seed for job in jobs]
    assert seeds == sorted(seeds, reverse=True)


def test_the_regimes_in_which_depth_may_pay_have_the_columns_that_were_written_down():
    log = (ROOT / "docs" / "log.md").read_text()
    assert "what `long` and `pretrained` will be asked" in log
    for name, count in (("long", 14), ("pretrained", 14), ("long-highly-biased", 4)):
        scale = name.partition("-")[0]
        table = TABLES[name]
        assert table.scales == (scale,)
        assert len(distinct_trainings([table], [9], scale, ["cifar10"])) == count, name
        assert distinct_trainings([table], [9], "small") == []


def test_long_has_the_papers_schedule_and_as_many_images_with_17_nodes():
    (seven, *_) = distinct_trainings([TABLES["long"]], [9], "long", ["cifar10"])
    (paper, *_) = distinct_trainings([TABLES["table1"]], [9], "paper", ["cifar10"])
    (seventeen, *_) = distinct_trainings([TABLES["long-17-nodes"]], [9], "long")
    training = seven.system.training
    assert dataclasses.replace(training, local_steps=None) == paper.system.training
    assert seven.system.data == paper.system.data
    assert training.rounds * training.local_steps * training.batch_size * 7 == pytest.approx(10.5e6, rel=0.01)
    assert 7 * training.local_steps == pytest.approx(17 * seventeen.system.training.local_steps, rel=0.01)


def test_pretrained_trains_a_network_that_learned_elsewhere_on_300_000_images():
    jobs = {job.name.split("_")[3]: job.system for job in distinct_trainings([TABLES["pretrained"]], [9], "pretrained")}
    training = jobs["auto"].training
    assert 7 * training.rounds * training.local_steps * training.batch_size == pytest.approx(300_000, rel=0.02)
    assert jobs["auto"].model.weights_sha256 == LITE0_SHA256
    assert jobs["auto"].model.image_size == 64
    assert (jobs["fedavg"].model.exit, jobs["fedavg+exit-3"].model.exit) == (1, 3)
    elsewhere = dataclasses.replace(jobs["auto"].model, weights="elsewhere.pth")
    assert system_digest(dataclasses.replace(jobs["auto"], model=elsewhere)) == system_digest(jobs["auto"])


@pytest.mark.heavy
@pytest.mark.parametrize("scale", SCALES)
def test_names_are_unique_and_safe_as_file_names(scale):
    jobs = distinct_trainings(list(TABLES.values()), SEEDS, scale)
    names = [job.name for job in jobs]
    assert len(set(map(str.lower, names))) == len(names)
    for name in names:
        assert re.fullmatch(r"[a-z0-9][a-zA-Z0-9._+=-]{0,150}", name), name
    systems = {dataclasses.replace(job.system, name="same").to_toml() for job in jobs}
    assert len(systems) == len(jobs)


def test_a_training_is_told_the_serving_rates_of_its_cells():
    for job in distinct_trainings([TABLES["table1"]], [9], "small", ["cifar10"]):
        share = serving_plan(job.system.topology).exit_share
        if job.system.training.weighting in ("serving-rate", "balanced-adj"):
            assert {cell.setting for cell in job.cells} == {cell.trained_for for cell in job.cells}
            assert share == pytest.approx(parse_setting(job.cells[0].setting))


def test_where_all_exits_serve_the_same_serving_rate_is_trained_as_equal_weight_with_any_parts():
    for table, suffix in (("table1", ""), ("ours", " + grid + coverage"), ("parts", " + grid")):
        jobs = distinct_trainings([TABLES[table]], [9], "small", ["cifar10"])
        (job,) = (each for each in jobs if any(cell.row.label == f"equal-weight{suffix}" for cell in each.cells))
        labels = {cell.row.label for cell in job.cells if cell.setting == "33-33-33"}
        assert labels == {f"equal-weight{suffix}", f"serving-rate{suffix}"}
        assert job.system.training.weighting == "equal-weight"


def test_the_paper_scale_is_the_papers_set_up():
    (job, *_) = distinct_trainings([TABLES["table1"]], [9], "paper", ["cifar10"])
    training, model = job.system.training, job.system.model
    assert (training.rounds, training.batch_size, training.learning_rate) == (100, 128, 0.1)
    assert (model.width, training.server_step, model.heads) == (64, "paper", ("gap", "gap", "gap"))
    small = distinct_trainings([TABLES["table1"]], [9], "small", ["cifar10"])[0].system
    assert small.topology == job.system.topology
    assert (small.data.partition, small.data.name) == (job.system.data.partition, job.system.data.name)
    assert system_for_variance("cifar100", 9, "paper").data.name == "cifar100"


@pytest.mark.parametrize(
    ("table", "dataset", "label", "setting", "mean", "std"),
    [
        ("table1", "cifar10", "serving-rate", "80-15-5", 54.2, 2.4),
        ("table1", "cifar100", "balanced-adj", "5-15-80", 60.7, None),
        ("table5", "cifar10", "equal-weight", "80-15-5", None, None),
        ("table6", "cifar10", "serving-rate p=0.2", "80-15-5", 49.2, None),
    ],
)
def test_the_papers_figures(table, dataset, label, setting, mean, std):
    figure = TABLES[table].paper_figure(dataset, label, setting)
    assert set(figure) == {"mean", "std"}
    assert mean is None or figure["mean"] == mean
    assert std is None or figure["std"] == std


def test_every_cell_of_the_papers_tables_has_its_figure_and_ours_have_none():
    for table in TABLES.values():
        for cell in table.cells():
            figure = table.paper_figure(cell.dataset, cell.row.label, cell.setting)
            assert (figure is not None) == bool(table.published), (table.name, cell)


def test_no_figure_of_the_paper_is_left_out():
    for key, content in published().items():
        if key == "table3-gradient-variance":
            continue
        tables = [table for table in TABLES.values() if table.published == key]
        reported = {
            (dataset, label, setting)
            for dataset in DATASETS
            for label, figures in content.get(dataset, {}).items()
            for setting in figures
        }
        shown = {(cell.dataset, cell.row.label, cell.setting) for table in tables for cell in table.cells()}
        assert reported == shown, key


def test_table_2_has_the_deviations_that_the_paper_prints_there_not_those_of_table_6():
    deviations = [
        find_table(name).paper_figure(dataset, "serving-rate", "80-15-5")["std"]
        for name in ("table2", "table6")
        for dataset in DATASETS
    ]
    assert deviations == [2.6, 0.2, 2.7, 1.0]


def test_the_papers_gradient_variance_is_highest_at_the_first_exit():
    for dataset in DATASETS:
        first, second, third = published_gradient_variance(dataset)
        assert first > second > third


def test_a_wrong_name_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="there is no table 'tabel1'; did you mean 'table1'"):
        find_table("tabel1")
    with pytest.raises(ConfigError, match="known are: all, blended, departures,"):
        find_table("x")


def test_settings_are_the_papers():
    assert len(PAPER_SETTINGS) == len(TABLES["table1"].settings) == 7
