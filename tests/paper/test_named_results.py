"""Results are what their names say, and all of one scale."""

import shutil

import pytest

from exitflow.errors import RunError
from paper.named_results import check_systems
from paper.results import Results
from paper.tables import TABLES, distinct_trainings
from tests.paper.command import call
from tests.paper.synthetic import write_gradient_variance, write_results

ONE = "cifar10_7-nodes_equal_equal-weight_33-33-33_seed-9"
OTHER = "cifar10_7-nodes_equal_flops-prop_33-33-33_seed-9"


@pytest.fixture
def folder(tmp_path):
    return write_results(tmp_path / "results", [TABLES["table1"]], (9, 42), ["cifar10"])


def test_results_of_one_scale_are_accepted_whatever_the_scale(folder):
    check_systems(Results(folder))
    check_systems(Results(folder), "small")
    with pytest.raises(RunError, match="is of another system than tiny"):
        check_systems(Results(folder), "tiny")


def test_results_of_two_scales_are_refused_by_all_that_would_mix_them(folder, tmp_path):
    (job,) = (each for each in distinct_trainings([TABLES["table1"]], (9,), "tiny") if each.name == OTHER)
    (folder / OTHER / "spec.toml").write_text(job.system.to_toml())
    document = tmp_path / "results.md"
    document.write_text("<!-- results:table1 cifar10 -->\n<!-- end -->\n")
    for options in ((), ("--update", document), ("--check", document)):
        result = call("report", folder, *options, code=2)
        assert (
            f"{folder / OTHER}: is of another system than small {OTHER} is now; choose another folder" in result.stderr
        )


def test_a_result_under_the_name_of_another_is_refused(folder):
    shutil.rmtree(folder / OTHER)
    shutil.copytree(folder / ONE, folder / OTHER)
    with pytest.raises(RunError, match=f"{OTHER}: is of another system"):
        check_systems(Results(folder))


def test_a_name_that_no_table_has_is_nobodys_business(folder):
    (folder / ONE).rename(folder / "mine_seed-9")
    check_systems(Results(folder))


def test_gradient_variances_of_another_scale_are_not_mixed_in(folder):
    write_gradient_variance(folder, "cifar10", 9)
    check_systems(Results(folder))
    path = folder / "gradient-variance_cifar10_seed-9.json"
    path.write_text(path.read_text().replace('"small"', '"tiny"'))
    with pytest.raises(RunError, match=r"seed-9\.json: is of the scale tiny, not small; choose another folder"):
        check_systems(Results(folder))
    for result in Results(folder).all():
        shutil.rmtree(result.folder)
    check_systems(Results(folder))
    write_gradient_variance(folder, "cifar100", 9)
    with pytest.raises(RunError, match="is of the scale"):
        check_systems(Results(folder))
