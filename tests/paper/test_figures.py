"""The figures of a table, from results on disk."""

import json

import pytest

from paper.figures import Spread, TableFigures, gradient_variance_json
from paper.results import Results
from paper.tables import TABLES, Cell

COSTS = {"bytes_sent": 12, "multiply_adds": 34}


def put(folder, cell, seed, accuracy):
    path = folder / cell.training_name(seed)
    path.mkdir(parents=True)
    (path / "result.json").write_text(json.dumps({"exit_accuracy": [0.1], "accuracy": accuracy, "costs": COSTS}))


@pytest.fixture
def figures(tmp_path):
    return TableFigures(TABLES["table1"], Results(tmp_path), (9, 42))


def test_mean_and_deviation_over_the_seeds_that_have_a_result(figures, tmp_path):
    cell = figures.table.cell("cifar10", "balanced-adj", "80-15-5")
    assert figures.accuracy("cifar10", "balanced-adj", "80-15-5") is None
    put(tmp_path, cell, 9, {"80-15-5": 0.5})
    assert figures.accuracy("cifar10", "balanced-adj", "80-15-5") == Spread(0.5, None)
    put(tmp_path, cell, 42, {"80-15-5": 0.7})
    put(tmp_path, cell, 67, {"80-15-5": 0.9})  # a seed that was not asked for
    found = figures.accuracy("cifar10", "balanced-adj", "80-15-5")
    assert found.mean == pytest.approx(0.6)
    assert found.std == pytest.approx(0.2 / 2**0.5)  # of a sample, not of a population


def test_one_training_answers_for_a_whole_row(figures, tmp_path):
    table = TABLES["table1"]
    accuracy = {setting: index / 10 for index, setting in enumerate(table.settings)}
    put(tmp_path, Cell("cifar10", 7, "equal", table.row("equal-weight"), "80-15-5"), 9, accuracy)
    for setting, value in accuracy.items():
        assert figures.accuracy("cifar10", "equal-weight", setting).mean == value
    assert figures.accuracy("cifar10", "serving-rate", "33-33-33").mean == accuracy["33-33-33"]
    assert figures.accuracy("cifar10", "serving-rate", "80-15-5") is None


def test_json_has_every_cell_of_the_data_sets_asked_for(figures, tmp_path):
    put(tmp_path, figures.table.cell("cifar10", "balanced-adj", "80-15-5"), 9, {"80-15-5": 0.5})
    found = figures.to_json(["cifar10"])
    assert len(found["cells"]) == 28
    by_place = {(cell["training"], cell["setting"]): cell for cell in found["cells"]}
    assert by_place["balanced-adj", "80-15-5"] == {
        "dataset": "cifar10",
        "training": "balanced-adj",
        "setting": "80-15-5",
        "accuracy": {"mean": 0.5, "std": None},
        "seeds": 1,
        "paper": {"mean": pytest.approx(0.534), "std": pytest.approx(0.022)},
        "costs": COSTS,
    }
    assert by_place["flops-prop", "80-15-5"]["accuracy"] is None


def test_gradient_variance_is_beside_the_papers(tmp_path):
    (tmp_path / "gradient-variance_cifar10_seed-9.json").write_text(json.dumps({"gradient_variance": [3.0, 2.0, 1.0]}))
    found = gradient_variance_json(Results(tmp_path), ["cifar10"], [9, 42])
    assert found["variance"] == {"cifar10": {"9": [3.0, 2.0, 1.0], "42": None}}
    assert found["paper"] == {"cifar10": [0.00374, 0.00224, 0.00101]}
