"""Results are what their names say, and all of one scale."""

from dataclasses import replace

import pytest

from exitflow.errors import RunError
from paper.named_results import check_systems
from paper.results import Results
from paper.tables import TABLES
from tests.paper.command import call
from tests.paper.synthetic import edit, rewrite, write_gradient_variance, write_results

ONE = "cifar10_7-nodes_equal_equal-weight_33-33-33_seed-9"
OTHER = "cifar10_7-nodes_equal_flops-prop_33-33-33_seed-9"


@pytest.fixture
def path(tmp_path):
    return write_results(tmp_path / "results.jsonl", [TABLES["table1"]], (9, 42), ["cifar10"])


def test_results_of_one_scale_are_accepted_whatever_the_scale(path):
    check_systems(Results(path))
    check_systems(Results(path), "small")
    with pytest.raises(RunError, match="is of the scale small, not tiny"):
        check_systems(Results(path), "tiny")


def test_results_of_two_scales_are_refused_by_all_that_would_mix_them(path, tmp_path):
    rewrite(path, OTHER, scale="tiny")
    document = tmp_path / "results.md"
    document.write_text("<!-- results:table1 cifar10 -->\n<!-- end -->\n")
    for options in ((), ("--update", document), ("--check", document)):
        result = call("report", path, *options, code=2)
        assert f"{path}: {OTHER} is of the scale tiny, not small; choose another file" in result.stderr


def test_a_result_under_the_name_of_another_is_refused(path):
    (one,) = (result.line for result in Results(path).all() if result.name == ONE)
    rewrite(path, OTHER, system=one.system)
    with pytest.raises(RunError, match=f"{OTHER} is of another system than it stands for now at small"):
        check_systems(Results(path))


def test_a_training_that_no_table_has_is_nobodys_business(path):
    edit(path, lambda line: replace(line, system="0", training=replace(line.training, partition="mine")))
    check_systems(Results(path))


def test_gradient_variances_of_another_scale_or_system_are_not_mixed_in(path):
    write_gradient_variance(path, "cifar10", 9)
    check_systems(Results(path))
    write_gradient_variance(path, "cifar10", 9, scale="tiny")
    with pytest.raises(RunError, match=r"variance of cifar10, seed 9 is of the scale tiny, not small; choose another"):
        check_systems(Results(path))
    text = path.read_text()
    assert '"tiny"' in text
    path.write_text(text.replace('"tiny"', '"small"'))
    with pytest.raises(RunError, match="the gradient variance of cifar10, seed 9 is of another system"):
        check_systems(Results(path))
