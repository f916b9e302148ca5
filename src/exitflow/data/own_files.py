"""Data of one's own: `dataset.toml`, and for each part that a machine has, `train.npz`, `validation.npz`, `test.npz`.

    num_classes = 10        # dataset.toml: the same on all machines of a federation
    mean = [0.1307]         # of each channel, in the unit of the inputs
    std = [0.3081]
    crop_padding = 2        # augmentation, if any
    flip = true

Each .npz holds `inputs`, (N, C, H, W) or (N, features), of bytes or any other numbers, which become floats, and
`labels`, (N,) from 0. Instead of a .npz file a part may be images in folders, or a table (`own_samples`), with

    size = 64               # images are resized to 64x64; they have as many channels as `mean`, 1 or 3
    classes = ["cat", ...]  # the order of the folders, default sorted
    tokenizer = "tokenizer.json"   # a table of texts, and ...
    length = 64             # ... to how many tokens each is cut or filled up
    input_column, label_column = ...   # default "image" or "text", and "label"

A node of a federation needs only the training part, the server only the other two.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from exitflow.config import decode, read_toml, require
from exitflow.data.dataset import LARGEST_FLOAT, Dataset, Preparation, Split, check_augmentation, check_classes
from exitflow.data.own_samples import images_of, read_folder, read_table, tokens_of
from exitflow.errors import ConfigError, DataError
from exitflow.files import open_regular
from exitflow.npz import MAX_BYTES, Header, open_npz

DESCRIPTION = "dataset.toml"
PARTS = ("train", "validation", "test")
MAX_SIZE = 8192  # pixels of an image's side, and tokens of a text


@dataclass(frozen=True)
class Description:
    """What the file dataset.toml says of a user's own data."""

    num_classes: int
    mean: tuple[float, ...] = ()  # may only be missing for texts
    std: tuple[float, ...] = ()
    crop_padding: int = 0
    flip: bool = False
    size: int = 64
    classes: tuple[str, ...] = ()
    tokenizer: str | None = None
    length: int = 64
    input_column: str | None = None
    label_column: str = "label"

    def __post_init__(self) -> None:
        check_classes(self.num_classes)
        for key in ("mean", "std"):
            require(bool(getattr(self, key)) or self.tokenizer is not None, key, "is missing")
        for key in ("size", "length"):
            value = getattr(self, key)
            require(1 <= value <= MAX_SIZE, key, f"must be from 1 to {MAX_SIZE:,}, got {value}")
        self.preparation()  # which refuses what is none

    def preparation(self) -> Preparation:
        """How inputs become what the network takes."""
        return Preparation(self.mean or (0.0,), self.std or (1.0,), self.crop_padding, self.flip)


def load_own(folder: Path) -> Dataset:
    """What lies in the folder; a part that is not there is empty."""
    try:
        description = decode(Description, read_toml(folder / DESCRIPTION))
    except ConfigError as error:
        raise error.within(source=str(folder / DESCRIPTION)) from None
    read = {part: _part(folder, part, description) for part in PARTS}
    found = {part: split for part, split in read.items() if split is not None}
    if not found:
        raise DataError(
            f"{folder}: holds none of {', '.join(f'{part}.npz' for part in PARTS)}, nor such folders or tables"
        )
    example = next(iter(found.values()))
    for part, split in found.items():
        if split.inputs.shape[1:] != example.inputs.shape[1:]:
            shapes = f"{list(split.inputs.shape[1:])}, {list(example.inputs.shape[1:])}"
            raise DataError(f"{folder / f'{part}.npz'}: its inputs have another shape than the other parts': {shapes}")
    empty = example[:0]
    train, validation, test = (found.get(part, empty) for part in PARTS)
    return Dataset(
        folder.name, train, validation, test, description.num_classes, description.preparation(), partial=True
    )


def _part(folder: Path, part: str, description: Description) -> Split | None:
    """In whatever form it is there."""
    if (folder / f"{part}.npz").exists():
        return _read(folder / f"{part}.npz", description)
    tables = [path for suffix in (".parquet", ".arrow") if (path := folder / f"{part}{suffix}").is_file()]
    if tables := tables[:1] or sorted((folder / part).glob("*.arrow")):
        return _read_tables(folder, tables, description)
    if (folder / part).is_dir():
        size, channels = description.size, _channels(folder / part, description)
        return read_folder(folder / part, description.classes, description.num_classes, size=size, channels=channels)
    return None


def _read_tables(folder: Path, paths: list[Path], description: Description) -> Split:
    column = description.input_column or ("text" if description.tokenizer else "image")
    values, labels = read_table(paths, column, description.label_column)
    if description.tokenizer:
        inputs = tokens_of(values, paths[0], folder / description.tokenizer, description.length)
    else:
        inputs = images_of(values, paths[0], size=description.size, channels=_channels(paths[0], description))
    if not 0 <= int(labels.min()) <= int(labels.max()) < description.num_classes:
        raise DataError(
            f"{paths[0]}: labels are from {labels.min()} to {labels.max()}, not 0 to {description.num_classes - 1}"
        )
    return Split(inputs, labels)


def _channels(path: Path, description: Description) -> int:
    if (channels := len(description.mean)) not in (1, 3):
        raise DataError(f"{path}: images have 1 or 3 channels, {DESCRIPTION} has {channels} means")
    return channels


def _read(path: Path, description: Description) -> Split:
    """One part, whose headers are checked before its arrays are read."""
    try:
        with open_regular(path, MAX_BYTES) as file, open_npz(file) as arrays:
            _check_headers(path, arrays.header("inputs"), arrays.header("labels"), description)
            inputs, labels = arrays.read("inputs"), arrays.read("labels")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"{path}: cannot be read as a .npz file with inputs and labels: {reason}") from None
    if inputs.dtype.kind == "f" and not (np.abs(inputs) <= np.float32(LARGEST_FLOAT)).all():
        problem = f"inputs hold NaN, infinity, or numbers beyond ±{LARGEST_FLOAT:.2g}, where 32-bit floats end"
        raise DataError(f"{path}: {problem}")
    if len(labels) and not 0 <= labels.min() <= labels.max() < description.num_classes:
        raise DataError(
            f"{path}: labels are from {labels.min()} to {labels.max()}, not 0 to {description.num_classes - 1}"
        )
    return Split(torch.from_numpy(inputs.astype(_kept_as(inputs.dtype))), torch.from_numpy(labels.astype(np.int64)))


def _check_headers(path: Path, inputs: Header, labels: Header, description: Description) -> None:
    if len(labels.shape) != 1 or len(inputs.shape) < 2 or inputs.shape[0] != labels.shape[0]:
        raise DataError(f"{path}: inputs of shape {inputs.shape} do not fit labels of shape {labels.shape}")
    if inputs.dtype.kind not in "uifb" or inputs.dtype.itemsize > 8 or labels.dtype.kind not in "ui":
        problem = f"got {inputs.dtype} and {labels.dtype}"
        raise DataError(f"{path}: inputs must be numbers of 64 bits at most and labels whole ones, {problem}")
    check_augmentation(str(path), inputs.shape, description.preparation())
    if inputs.shape[1] != len(description.mean):
        raise DataError(
            f"{path}: inputs have {inputs.shape[1]} channels, {DESCRIPTION} has {len(description.mean)} means"
        )


def _kept_as(dtype: np.dtype[Any]) -> Any:
    """Bytes as they are, and all else as floats, which is what it becomes: PyTorch does little with other numbers."""
    return np.uint8 if dtype == np.uint8 else np.float32
