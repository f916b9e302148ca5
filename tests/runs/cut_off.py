"""Trainings that end before their last round, and how to tell two of them apart."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from exitflow.runs.runs import Run
from exitflow.runs.training import train
from tests.small import image_dataset, tiny_system

DATA = image_dataset(96)


class Stop(Exception):
    """What `stop_at` raises."""


def stop_at(moment: float) -> Callable[[float], None]:
    """An observer of a training that ends it after so many rounds, with fractions."""

    def stop(rounds: float) -> None:
        if rounds >= moment:
            raise Stop

    return stop


def unfinished(path: Path, *overrides: str) -> Run:
    """A run that was cut off in its second round."""
    with pytest.raises(Stop):
        train(tiny_system(*overrides), path, dataset=DATA, observer=stop_at(1.1))
    return Run(path)


def same_weights(one: Run, other: Run) -> bool:
    """To the bit."""
    mine, theirs = one.state().tensors, other.state().tensors
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
