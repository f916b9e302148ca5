"""Shared by all tests: one thread (the models are tiny), and hypothesis without deadlines (machines are noisy)."""

import pytest
import torch
from hypothesis import settings

settings.register_profile("exitflow", deadline=None, derandomize=True, max_examples=100)
settings.load_profile("exitflow")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_data_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EXITFLOW_DATA_DIR", raising=False)
