"""Data sets of PyTorch as data of exitflow: read when they are asked for, so that they may be larger than memory.

Such a data set may have transforms of its own. What they draw from PyTorch's generator follows from the seed of the
training, as everything does: `NodeData` seeds it before it reads a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from exitflow.data.dataset import Dataset, LazyInputs, MapStyle, Preparation, Split
from exitflow.errors import DataError


def from_torch(
    name: str,
    *,
    train: MapStyle,
    validation: MapStyle,
    test: MapStyle,
    num_classes: int,
    preparation: Preparation | None = None,
) -> Dataset:
    """A data set of which each part is a map-style data set of PyTorch, giving (input, label).

    Inputs are taken as they come, unless `preparation` says how to normalise and augment them. Labels are those of the
    attribute `targets`, which torchvision's have; where there is none, every sample is read once.
    """
    return Dataset(
        name,
        _split(train, f"data set {name!r}, train"),
        _split(validation, f"data set {name!r}, validation"),
        _split(test, f"data set {name!r}, test"),
        num_classes,
        preparation or Preparation((0.0,), (1.0,)),
    )


def _split(samples: MapStyle, where: str) -> Split:
    if not len(samples):
        raise DataError(f"{where}: has no samples")
    labels: Sequence[Any] | Tensor | None = getattr(samples, "targets", None)
    if labels is None:
        labels = [int(samples[row][1]) for row in range(len(samples))]
    return Split(LazyInputs(samples), torch.as_tensor(labels, dtype=torch.int64))
