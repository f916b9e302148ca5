"""Results with invented figures, made once."""

import pytest

from paper.tables import TABLES
from tests.paper.synthetic import write_gradient_variance, write_results


@pytest.fixture(scope="session")
def results_file(tmp_path_factory):
    """Part of Table 1 and of ours on CIFAR-10, with two seeds; some trainings are missing."""
    path = tmp_path_factory.mktemp("report") / "results.jsonl"
    write_results(path, [TABLES["table1"], TABLES["ours"]], (9, 42), ["cifar10"], keep=0.7)
    write_gradient_variance(path, "cifar10", 9)
    return path
