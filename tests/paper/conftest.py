"""Results with invented figures, made once."""

import pytest

from paper.tables import TABLES
from tests.paper.synthetic import write_gradient_variance, write_results


@pytest.fixture(scope="session")
def results_folder(tmp_path_factory):
    """Part of Table 1 and of ours on CIFAR-10, with two seeds; some trainings are missing."""
    folder = tmp_path_factory.mktemp("report") / "results"
    write_results(folder, [TABLES["table1"], TABLES["ours"]], (9, 42), ["cifar10"], keep=0.7)
    write_gradient_variance(folder, "cifar10", 9)
    return folder
