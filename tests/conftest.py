"""Shared by all tests: one thread (the models are tiny), hypothesis without deadlines (machines are noisy), and the
commands of this environment on the path, as when it is activated."""

import os
import random
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest
import torch
from hypothesis import settings

settings.register_profile("exitflow", deadline=None, derandomize=True, max_examples=100)
settings.load_profile("exitflow")
torch.set_num_threads(1)
os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))


LONGEST = ("test_matrix", "test_federation", "test_training", "test_real_faults", "test_reproduction", "test_readme")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--alone", action="store_true", help="fail tests that start processes or open ports")
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run files, and the tests of each, in a random order")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files that take longest first, so that none of them is left for one process at the end."""
    items.sort(key=lambda item: item.path.stem not in LONGEST)
    if (seed := config.getoption("--shuffle")) is not None:
        shuffle = random.Random(seed).shuffle
        files = [list(tests) for _, tests in groupby(items, key=lambda item: item.path)]
        shuffle(files)
        for tests in files:
            shuffle(tests)
        items[:] = [test for tests in files for test in tests]


class Alone:
    """Watches that nothing starts a process or opens a port while a test runs."""

    ASIDE = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "socket.bind", "socket.connect")

    def __init__(self) -> None:
        self.found: str | None = None
        self.process = os.getpid()
        sys.addaudithook(self.see)

    def see(self, event: str, args: tuple[object, ...]) -> None:
        beside = event in self.ASIDE and os.getpid() == self.process
        if beside and not (event.startswith("socket") and isinstance(args[1], str)):  # a socket that is a file
            self.found = event


@pytest.fixture(scope="session")
def _watch(pytestconfig: pytest.Config) -> Alone | None:
    return Alone() if pytestconfig.getoption("--alone") else None


@pytest.fixture(autouse=True)
def _alone(_watch: Alone | None) -> Iterator[None]:
    """With --alone, a test that is not alone in its process says so."""
    if _watch:
        _watch.found = None
    yield
    if _watch and _watch.found:
        pytest.fail(f"this test is not fast ({_watch.found}): mark it with pytest.mark.heavy")


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
