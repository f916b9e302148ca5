"""The figures of a table, from results on disk."""

from dataclasses import asdict

import pytest

from paper.figures import Spread, TableFigures, gradient_variance_json
from paper.results import Results
from paper.tables import TABLES, Cell
from tests.paper.synthetic import COSTS, put, write_gradient_variance


@pytest.fixture
def path(tmp_path):
    return tmp_path / "small.jsonl"


def figures_of(path):
    return TableFigures(TABLES["table1"], Results(path), (9, 42))


def test_mean_and_deviation_over_the_seeds_that_have_a_result(path):
    cell = TABLES["table1"].cell("cifar10", "balanced-adj", "80-15-5")
    assert figures_of(path).accuracy("cifar10", "balanced-adj", "80-15-5") is None
    put(path, cell, 9, {"80-15-5": 0.5})
    assert figures_of(path).accuracy("cifar10", "balanced-adj", "80-15-5") == Spread(0.5, None)
    put(path, cell, 42, {"80-15-5": 0.7})
    put(path, cell, 67, {"80-15-5": 0.9})  # a seed that was not asked for
    found = figures_of(path).accuracy("cifar10", "balanced-adj", "80-15-5")
    assert found.mean == pytest.approx(0.6)
    assert found.std == pytest.approx(0.2 / 2**0.5)  # of a sample, not of a population


def test_one_training_answers_for_a_whole_row(path):
    table = TABLES["table1"]
    accuracy = {setting: index / 10 for index, setting in enumerate(table.settings)}
    put(path, Cell("cifar10", 7, "equal", table.row("equal-weight"), "80-15-5"), 9, accuracy)
    for setting, value in accuracy.items():
        assert figures_of(path).accuracy("cifar10", "equal-weight", setting).mean == value
    assert figures_of(path).accuracy("cifar10", "serving-rate", "33-33-33").mean == accuracy["33-33-33"]
    assert figures_of(path).accuracy("cifar10", "serving-rate", "80-15-5") is None


def test_json_has_every_cell_of_the_data_sets_asked_for(path):
    put(path, TABLES["table1"].cell("cifar10", "balanced-adj", "80-15-5"), 9, {"80-15-5": 0.5})
    found = figures_of(path).to_json(["cifar10"])
    assert len(found["cells"]) == 28
    by_place = {(cell["training"], cell["setting"]): cell for cell in found["cells"]}
    assert by_place["balanced-adj", "80-15-5"] == {
        "dataset": "cifar10",
        "training": "balanced-adj",
        "setting": "80-15-5",
        "accuracy": {"mean": 0.5, "std": None},
        "seeds": 1,
        "paper": {"mean": pytest.approx(0.534), "std": pytest.approx(0.022)},
        "costs": asdict(COSTS),
    }
    assert by_place["flops-prop", "80-15-5"]["accuracy"] is None


def test_gradient_variance_is_beside_the_papers(path):
    write_gradient_variance(path, "cifar10", 9, (3.0, 2.0, 1.0))
    found = gradient_variance_json(Results(path), ["cifar10"], [9, 42])
    assert found["variance"] == {"cifar10": {"9": (3.0, 2.0, 1.0), "42": None}}
    assert found["paper"] == {"cifar10": [0.00374, 0.00224, 0.00101]}
