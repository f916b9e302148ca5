"""What a data set is: three splits of inputs and labels, and how inputs become tensors that a network takes.

Inputs stay as they were read (bytes, for images); `Preparation` turns a batch of them into normalised floats at the
moment it is used, in a few vectorised steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from exitflow.config import require
from exitflow.errors import DataError

LARGEST_FLOAT = torch.finfo(torch.float32).max  # networks compute with 32-bit floats
MAX_CLASSES = 1_000_000
EXAMPLES = 16  # inputs that are looked at, where it would take time to look at all
SMALLEST_FLOAT = torch.finfo(torch.float32).tiny  # above 0, with all its digits


class MapStyle(Protocol):
    """A `torch.utils.data.Dataset` whose samples have numbers: (input, label)."""

    def __len__(self) -> int:
        """How many samples there are."""

    def __getitem__(self, index: int, /) -> Any:
        """(input, label)."""


class LazyInputs:
    """Stands where a tensor of all inputs stands: indexed by rows, it reads these rows and gives a tensor of them."""

    def __init__(self, samples: MapStyle) -> None:
        self._samples = samples
        first = torch.as_tensor(samples[0][0])
        self.shape = torch.Size((len(samples), *first.shape))
        self.dtype, self.ndim = first.dtype, first.ndim + 1

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, rows: Tensor | slice) -> Tensor:
        wanted = range(len(self))[rows] if isinstance(rows, slice) else rows.tolist()
        return torch.stack([torch.as_tensor(self._samples[row][0]) for row in wanted])


@dataclass(frozen=True)
class Split:
    """Inputs with their labels: one of training, validation and test data."""

    inputs: Tensor | LazyInputs  # (N, C, H, W) uint8, or any (N, ...) of numbers
    labels: Tensor  # (N,) int64

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def tensor(self) -> Tensor:
        """All inputs, which are read now where that was left for later."""
        return self.inputs if isinstance(self.inputs, Tensor) else self.inputs[:]

    def __getitem__(self, index: Tensor | slice) -> Split:
        return Split(self.inputs[index], self.labels[index])


@dataclass(frozen=True)
class Preparation:
    """From raw inputs to what the network takes; `mean` and `std` are in the raw unit, per channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_padding: int = 0  # augmentation: shift by up to this many pixels ...
    flip: bool = False  # ... and mirror every second image, on average
    size: int | None = None  # pixels to which images are resized, so that they are square; None: they stay as they are

    def __post_init__(self) -> None:
        finite = all(abs(each) <= LARGEST_FLOAT for each in self.mean)
        require(finite, "mean", f"each must be a finite 32-bit float, got {list(self.mean)}")
        positive = bool(self.std) and all(SMALLEST_FLOAT <= each <= LARGEST_FLOAT for each in self.std)
        require(positive, "std", f"each must be a finite 32-bit float above 0, got {list(self.std)}")
        same = len(self.mean) == len(self.std)
        require(same, "mean", f"needs one for each of the {len(self.std)} channels, got {len(self.mean)}")
        require(self.crop_padding >= 0, "crop_padding", f"must be 0 or more, got {self.crop_padding}")

    def __call__(self, inputs: Tensor, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
        """The inputs as the network takes them, normalised and without augmentation."""
        shape = (1, -1) + (1,) * (inputs.ndim - 2)
        mean = torch.tensor(self.mean, dtype=dtype, device=device).view(shape)
        std = torch.tensor(self.std, dtype=dtype, device=device).view(shape)
        raw = inputs.to(device)
        prepared = ((raw if raw.dtype == torch.uint8 else raw.to(dtype)) - mean) / std
        if self.size is None or raw.ndim != 4 or raw.shape[2:] == (self.size, self.size):
            return prepared
        return F.interpolate(prepared, (self.size, self.size), mode="bilinear", align_corners=False)

    def augment(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        """(B, C, H, W) raw images, each padded with black, cropped back at random, and perhaps mirrored."""
        if not self.crop_padding and not self.flip:
            return inputs
        batch, _, height, width = inputs.shape
        padded = F.pad(inputs, (self.crop_padding,) * 4)
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # (B, C, shifts, shifts, H, W), a view
        down, right = torch.randint(2 * self.crop_padding + 1, (2, batch), generator=generator)
        cropped = windows[torch.arange(batch), :, down, right]
        if self.flip:
            mirrored = torch.randint(2, (batch,), generator=generator).nonzero()[:, 0]
            cropped[mirrored] = cropped[mirrored].flip(3)
        return cropped


@dataclass(frozen=True)
class Dataset:
    """Training, validation and test data; validation is never trained on."""

    name: str
    train: Split
    validation: Split
    test: Split
    num_classes: int
    preparation: Preparation
    partial: bool = False  # a machine of a federation may have only some of the parts; the others are empty

    def __post_init__(self) -> None:
        check_classes(self.num_classes)
        for part in ("train", "validation", "test"):
            split: Split = getattr(self, part)
            where = f"data set {self.name!r}, {part}"
            _check_types(where, split)
            if not len(split) and self.partial:
                continue
            if not len(split) or len(split.inputs) != len(split):
                raise DataError(f"{where}: needs as many inputs as labels, got {len(split.inputs)} and {len(split)}")
            low, high = int(split.labels.min()), int(split.labels.max())
            if low < 0 or high >= self.num_classes:
                raise DataError(f"{where}: labels must be from 0 to {self.num_classes - 1}, got {low} to {high}")
            check_augmentation(where, split.inputs.shape, self.preparation)
            _check_inputs(where, split.inputs, self.preparation)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input: (C, H, W) for images."""
        return tuple(self.train.inputs.shape[1:])

    @property
    def prepared_shape(self) -> tuple[int, ...]:
        """The shape of one input as the network takes it."""
        size = self.preparation.size
        return (self.input_shape[0], size, size) if size else self.input_shape

    @property
    def held_out(self) -> Split:
        """What thresholds are calibrated on: validation data, or training data where there are none."""
        return self.validation if len(self.validation) > 1 else self.train

    def require(self, part: Literal["validation", "test"], why: str) -> Split:
        """These data, or one sentence."""
        split: Split = getattr(self, part)
        if not len(split):
            advice = f"data of your own need the file {part}.npz"
            raise DataError(f"data set {self.name!r}: {why} needs {part} data, and there are none; {advice}")
        return split


def check_classes(count: Any) -> None:
    """Two classes or more, and no absurd number of them."""
    possible = type(count) is int and 2 <= count <= MAX_CLASSES
    require(possible, "num_classes", f"must be from 2 to {MAX_CLASSES:,}, got {count!r}")


def check_augmentation(where: str, shape: Sequence[int], preparation: Preparation) -> None:
    """Refuse to shift or mirror what is no image, and to shift images by more than they are wide or high."""
    padding = preparation.crop_padding
    if len(shape) != 4 and (padding or preparation.flip):
        raise DataError(f"{where}: only images can be shifted or mirrored, inputs have the shape {tuple(shape)}")
    if padding > min(shape[2:], default=0):
        raise DataError(f"{where}: images of {tuple(shape[2:])} cannot be shifted by crop_padding = {padding} pixels")


def _check_types(where: str, split: Any) -> None:
    """Refuse what is no tensor, such as arrays of NumPy, and labels that are no whole numbers."""
    known = isinstance(split, Split) and isinstance(split.inputs, Tensor | LazyInputs)
    if not known or not isinstance(split.labels, Tensor):
        raise DataError(f"{where}: expected a Split of two tensors; torch.as_tensor makes them of arrays")
    if split.labels.ndim != 1 or split.labels.dtype != torch.int64:
        problem = f"got {split.labels.dtype} of shape {tuple(split.labels.shape)}"
        raise DataError(f"{where}: labels must be one row of whole numbers (torch.int64), {problem}")


def _check_inputs(where: str, inputs: Tensor | LazyInputs, preparation: Preparation) -> None:
    """Refuse inputs that are no numbers, or none any more once they are prepared; the extremes tell.

    Of inputs that are read when they are asked for, a few speak for all.
    """
    if not isinstance(inputs, Tensor):
        inputs = inputs[:EXAMPLES]
    channels, means = inputs.shape[1] if inputs.ndim > 1 else 0, len(preparation.mean)
    if means not in (1, channels):
        raise DataError(f"{where}: inputs have {channels} channels, and their preparation has {means} means")
    if inputs.dtype == torch.uint8:
        extremes = torch.tensor([0, 255], dtype=torch.uint8)
    else:
        extremes = torch.stack((inputs if inputs.is_floating_point() else inputs.float()).aminmax())
    if not extremes.isfinite().all():
        raise DataError(f"{where}: inputs hold NaN or infinity")
    if not preparation(extremes.view(2, 1).expand(2, means)).isfinite().all():
        low, high = (f"{extreme:g}" for extreme in extremes.tolist())
        scale = f"with mean {list(preparation.mean)} and std {list(preparation.std)}"
        raise DataError(f"{where}: inputs from {low} to {high} become infinite as 32-bit floats, {scale}")


def split_off_validation(train: Split, count: int) -> tuple[Split, Split]:
    """(the rest, `count` samples): the same for every seed of a run, so that seeds compare on the same data."""
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
    return train[order[count:]], train[order[:count]]
