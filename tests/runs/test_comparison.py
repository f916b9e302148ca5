import statistics
from dataclasses import replace

import pytest

from exitflow.errors import ConfigError, RunError
from exitflow.report.series import by_kind
from exitflow.runs.comparison import Spread, compare, default_folder
from exitflow.runs.runs import Run, evaluate
from exitflow.topology.graph import Link, Topology
from tests.small import image_dataset, tiny_system

DATA = image_dataset(96)


@pytest.mark.heavy
def test_every_weighting_is_trained_with_every_seed(tmp_path):
    result = compare(tiny_system(), ["equal-weight", "serving-rate"], [1, 2], out=tmp_path, dataset=DATA)
    assert {path.name for path in tmp_path.iterdir()} == {
        "equal-weight-seed-1",
        "equal-weight-seed-2",
        "serving-rate-seed-1",
        "serving-rate-seed-2",
    }
    alone = [evaluate(tmp_path / f"serving-rate-seed-{seed}", dataset=DATA) for seed in (1, 2)]
    accuracies = [evaluation.accuracy for evaluation in alone]
    assert result.accuracy("serving-rate") == Spread(statistics.fmean(accuracies), statistics.stdev(accuracies))
    third = [evaluation.exit_accuracy[2] for evaluation in alone]
    assert result.exit_accuracy("serving-rate")[2].mean == pytest.approx(statistics.fmean(third))


def test_weights_that_the_system_gives_are_compared_with_the_weightings(tmp_path):
    system, names = tiny_system("training.exit_weights=[1,1,8]"), ["exit_weights", "equal-weight", "serving-rate"]
    result = compare(system, names[1:], [1], out=tmp_path, dataset=DATA)
    assert list(result.evaluations) == names
    found = [Run(tmp_path / f"{name}-seed-1").records[0].exit_weights for name in names]
    weights = [[0.1, 0.1, 0.8], [1 / 3] * 3, [0.8, 0.15, 0.05]]
    assert found == [pytest.approx(each) for each in weights]
    assert compare(system, names, [1], out=tmp_path, dataset=DATA).to_json() == result.to_json()
    assert [each.label for each in by_kind([Run(path) for path in tmp_path.iterdir()])] == names


def test_only_a_system_that_gives_weights_has_some_to_compare(tmp_path):
    with pytest.raises(ConfigError, match="exit_weights: the system gives none to compare"):
        compare(tiny_system(), ["exit_weights"], [1], out=tmp_path, dataset=DATA)


def test_runs_that_are_there_are_used_again(tmp_path):
    first = compare(tiny_system(), ["equal-weight"], [1], out=tmp_path, dataset=DATA)
    model = tmp_path / "equal-weight-seed-1" / "model.safetensors"
    written = model.stat().st_mtime_ns
    again = compare(tiny_system(), ["equal-weight"], [1], out=tmp_path, dataset=DATA)
    assert model.stat().st_mtime_ns == written
    assert again.to_json() == first.to_json()


def test_runs_of_another_system_are_not_mixed_in(tmp_path):
    compare(tiny_system(), ["equal-weight"], [1], out=tmp_path, dataset=DATA)
    with pytest.raises(RunError, match="holds a run of another system"):
        compare(tiny_system("training.rounds=4"), ["equal-weight"], [1], out=tmp_path, dataset=DATA)


def test_a_single_seed_has_no_deviation():
    assert Spread.of([0.5]) == Spread(0.5, None)
    assert Spread.of([0.4, 0.6]).std == pytest.approx(0.02**0.5)


def test_a_changed_system_gets_a_folder_of_its_own():
    system = tiny_system()
    assert default_folder(system) == default_folder(replace(system, training=replace(system.training, seed=5)))
    assert default_folder(system) != default_folder(tiny_system("training.rounds=4"))
    assert ":" not in default_folder(system).name
    odd = replace(system, name="a/b ü" + "x" * 5000)
    assert default_folder(odd).name.startswith("a-b--x")
    assert len(default_folder(odd).name) < 120


def test_an_exit_without_nodes_has_no_figure_where_every_node_has_its_own_network(tmp_path):
    """Under `exitflow` the cloud trains exit 2 too."""
    system = tiny_system("training.weighting=auto")
    nodes = [node for node in system.topology.nodes if node.exit != 2]
    nodes = [replace(node, parents=(Link("cloud-0", 1.0),) if node.parents else ()) for node in nodes]
    result = compare(
        replace(system, topology=Topology(tuple(nodes))),
        [],
        [1],
        methods=["exitflow", "local-only"],
        out=tmp_path,
        dataset=DATA,
    )
    assert [spread is None for spread in result.exit_accuracy("local-only")] == [False, True, False]
    assert None not in result.exit_accuracy("exitflow")
    assert result.to_json()["methods"]["local-only"]["exit_accuracy"][1] is None
