"""Shared by all tests: one thread (the models are tiny), and hypothesis without deadlines (machines are noisy)."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

settings.register_profile("exitflow", deadline=None, derandomize=True, max_examples=100)
settings.load_profile("exitflow")
torch.set_num_threads(1)


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
