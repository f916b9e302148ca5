"""Lines over rounds: of trainings that differ in their seed only."""

import json

import pytest

from exitflow.report.series import Series, by_kind
from exitflow.runs.records import Validation
from exitflow.runs.runs import Run
from exitflow.runs.spread import Spread
from tests.small import record_of, tiny_system


def training(folder, accuracies, weighting="serving-rate", seed=1, terms=None):
    folder.mkdir()
    (folder / "spec.toml").write_text(tiny_system(f"training.weighting={weighting}", f"training.seed={seed}").to_toml())
    (folder / "profile.json").write_text(json.dumps({"error_terms": terms}))
    lines = []
    for round, value in enumerate(accuracies, start=1):
        validation = Validation(value, (value, None, 1.0)) if value is not None else None
        lines.append(record_of(round, validation=validation))
    (folder / "rounds.jsonl").write_text("".join(line.to_json().decode() + "\n" for line in lines))
    return Run(folder)


def test_a_curve_has_the_rounds_that_all_seeds_have(tmp_path):
    one = training(tmp_path / "a", [None, 0.25, None, 0.5])
    two = training(tmp_path / "b", [None, 0.75])
    series = Series("serving-rate", "serving-rate", (one, two))
    assert series.exit_accuracy(1).rounds == (2,)
    assert series.exit_accuracy(1).values == (Spread(0.5, pytest.approx(0.5 / 2**0.5)),)
    assert series.accuracy() == series.exit_accuracy(1)
    assert series.exit_accuracy(2).rounds == ()
    assert series.exit_weight(3).rounds == (1, 2)
    alone = Series("serving-rate", "serving-rate", (one,))
    assert alone.accuracy().rounds == (2, 4)
    assert alone.accuracy().values[0] == Spread(0.25, None)
    assert Series("none", "auto", ()).accuracy().rounds == ()


def test_a_seed_that_has_only_begun_does_not_hide_the_others(tmp_path):
    done, begun = training(tmp_path / "a", [None, 0.25]), training(tmp_path / "b", [])
    assert Series("auto", "auto", (done, begun)).accuracy() == Series("auto", "auto", (done,)).accuracy()


def test_what_a_label_says_beyond_the_weighting():
    assert Series("serving-rate", "serving-rate", ()).variant == ""
    assert Series("serving-rate p=0.2", "serving-rate", ()).variant == "p=0.2"
    assert Series("flops-prop + grid + coverage", "flops-prop", ()).variant == "grid + coverage"


def test_error_terms_are_means_over_what_was_measured(tmp_path):
    some, more = (
        training(tmp_path / str(bias), [0.5], terms={"generalisation": 0, "bias": bias, "noise": 0, "sampling": 0})
        for bias in (1.0, 3.0)
    )
    none = training(tmp_path / "c", [0.5])
    assert Series("x", "x", (some, more, none)).error_terms["bias"].mean == 2.0
    assert Series("x", "x", (none,)).error_terms == {}


def test_runs_are_grouped_by_weighting_in_the_usual_order(tmp_path):
    runs = [
        training(tmp_path / str(index), [0.5], name) for index, name in enumerate(["flops-prop", "auto", "flops-prop"])
    ]
    found = by_kind(runs)
    assert [(series.label, len(series.trainings)) for series in found] == [("auto", 1), ("flops-prop", 2)]
