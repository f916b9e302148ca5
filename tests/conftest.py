"""Shared by all tests: one thread (the models are tiny), hypothesis without deadlines (machines are noisy), and the
commands of this environment on the path, as when it is activated."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

settings.register_profile("exitflow", deadline=None, derandomize=True, max_examples=100)
settings.load_profile("exitflow")
torch.set_num_threads(1)
os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))


LONGEST = ("test_matrix", "test_federation", "test_training", "test_real_faults", "test_reproduction", "test_readme")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take longest first, so that none of them is left for one process at the end."""
    items.sort(key=lambda item: item.path.stem not in LONGEST)


@pytest.fixture(autouse=True)
def _no_data_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EXITFLOW_DATA_DIR", raising=False)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One cluster of Ray for all tests: starting it takes seconds."""
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
