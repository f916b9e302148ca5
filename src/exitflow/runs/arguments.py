"""What is given to the functions of the Python API, checked before anything is done with it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from exitflow.config import require
from exitflow.data.dataset import Dataset
from exitflow.system.system import System


def check_system(system: Any) -> None:
    """A System is needed, and neither a file nor a name."""
    problem = f"expected a System, such as load_system('campus.toml') gives, got {system!r}"
    require(isinstance(system, System), "system", problem)


def check_dataset(dataset: Any) -> None:
    """A data set, or None for the one that the system names."""
    known = dataset is None or isinstance(dataset, Dataset)
    require(known, "dataset", f"expected a Dataset, or None for the one that the system names, got {dataset!r}")


def checked_path(path: Any) -> Path:
    """The path of a run, if it is one."""
    possible = isinstance(path, str | os.PathLike) and "\0" not in os.fspath(path)
    require(possible, "run", f"expected the path of a run directory, got {path!r}")
    return Path(path)


def check_callable(function: Any, key: str) -> None:
    """What is called on the way, if anything."""
    require(function is None or callable(function), key, f"expected a function, got {function!r}")


def check_seeds(seeds: Any) -> None:
    """One or more whole numbers."""
    valid = isinstance(seeds, Sequence) and all(type(seed) is int and seed >= 0 for seed in seeds) and bool(seeds)
    require(valid, "seeds", f"expected whole numbers from 0 on, such as [9, 42], got {seeds!r}")


def check_device(device: Any) -> None:
    """A device on which PyTorch can compute here."""
    try:
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        require(False, "device", f"PyTorch cannot compute on {device!r} here, unlike on 'cpu': {reason}")
