"""Where data sets come from: digits are embedded, the others lie in files in their original formats."""

from __future__ import annotations

import gzip
import hashlib
import io
import math
import os
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import torch

from exitflow.config import require
from exitflow.data.dataset import Dataset, Preparation, Split, split_off_validation
from exitflow.data.own_files import DESCRIPTION, load_own
from exitflow.errors import DataError
from exitflow.files import read_file
from exitflow.parts import is_own, load_part

DATA_DIR_VARIABLE = "EXITFLOW_DATA_DIR"
MAX_FILE = 256 * 2**20  # bytes: the largest of these data sets' files has 154 million
VALIDATION_FRACTION = 10  # one in ten training samples: 45,000 / 5,000 of CIFAR's 50,000, as in the paper


@dataclass(frozen=True)
class DataFiles:
    """A folder of a data set, in which `verify` says whether published checksums are compared."""

    folder: Path
    verify: bool = True

    def read(self, name: str, md5: str | None = None) -> bytes:
        """The bytes of one file."""
        path = self.folder / name
        try:
            data = read_file(path, MAX_FILE)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from None
        if self.verify and md5 and (found := hashlib.md5(data).hexdigest()) != md5:
            problem = f"md5 is {found}, the published file has {md5}; get it again"
            raise DataError(f"{path}: {problem} (a system file may say data.verify=false)")
        return data


def load_dataset(name: str, *, data_dir: str | None = None, verify: bool = True) -> Dataset:
    """The data set of that name; `data_dir` or $EXITFLOW_DATA_DIR says where the files lie."""
    if name == "digits":
        return _digits()
    if is_own(name):
        return _own_function(name, data_dir)
    return _SOURCES[name].load(DataFiles(find_dataset(name, data_dir=data_dir), verify))


def _own_function(name: str, data_dir: str | None) -> Dataset:
    """What the user's own function gives, which is told where the files lie."""
    dataset = load_part(name, key="data.name")(data_dir or os.environ.get(DATA_DIR_VARIABLE))
    problem = f"{name!r} must give a Dataset, got {type(dataset).__name__}"
    require(isinstance(dataset, Dataset), "data.name", problem)
    return dataset  # type: ignore[no-any-return]


def find_dataset(name: str, *, data_dir: str | None = None) -> Path:
    """The folder of a data set's files, which are not read yet."""
    source = _SOURCES[name]
    root = data_dir or os.environ.get(DATA_DIR_VARIABLE)
    if not root:
        where = f"say where with --data-dir, data.dir or ${DATA_DIR_VARIABLE}"
        raise DataError(f"data set {name!r} lies in files of its own: {where} ({source.advice})")
    folders = [Path(root) / source.folder, Path(root)]
    for folder in folders:
        if any((folder / name).is_file() for name in source.marks):
            return folder
    looked = " and ".join(map(str, folders))
    raise DataError(f"data set {name!r} is not there: looked for {source.marks[0]} in {looked}; {source.advice}")


def _digits() -> Dataset:
    """1,797 handwritten digits of 8x8 pixels with values from 0 to 16.

    The test part of "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak, 1998; UCI, CC BY 4.0), in the
    order of scikit-learn's copy.
    """
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as file:
        images, labels = file["images"], file["labels"]
    everything = Split(torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels.astype(np.int64)))
    rest, test = split_off_validation(everything, 400)
    train, validation = split_off_validation(rest, 197)
    return Dataset("digits", train, validation, test, 10, Preparation((4.88,), (6.02,)))


def _from_train_and_test(name: str, train: Split, test: Split, num_classes: int, preparation: Preparation) -> Dataset:
    kept, validation = split_off_validation(train, len(train) // VALIDATION_FRACTION)
    return Dataset(name, kept, validation, test, num_classes, preparation)


def _bytes_preparation(mean: Iterable[float], std: Iterable[float], *, augment: bool) -> Preparation:
    """From the usual figures for pixels between 0 and 1."""
    mean, std = (tuple(255 * value for value in values) for values in (mean, std))
    return Preparation(mean, std, crop_padding=4 if augment else 0, flip=augment)


# CIFAR: label byte(s), then 3,072 bytes of red, green and blue; https://www.cs.toronto.edu/~kriz/cifar.html


def _cifar10(files: DataFiles) -> Dataset:
    batches = [_cifar_split(files, f"data_batch_{i}.bin", _CIFAR10_MD5[i - 1], label_bytes=1) for i in range(1, 6)]
    inputs = torch.cat([batch.tensor for batch in batches])
    train = Split(inputs, torch.cat([batch.labels for batch in batches]))
    test = _cifar_split(files, "test_batch.bin", _CIFAR10_MD5[5], label_bytes=1)
    preparation = _bytes_preparation((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010), augment=True)
    return _from_train_and_test("cifar10", train, test, 10, preparation)


def _cifar100(files: DataFiles) -> Dataset:
    train = _cifar_split(files, "train.bin", "6172c7755cfe09b2fe270c85cebc1b15", label_bytes=2)
    test = _cifar_split(files, "test.bin", "4499cfba6c016c1be1438163640a0898", label_bytes=2)
    preparation = _bytes_preparation((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761), augment=True)
    return _from_train_and_test("cifar100", train, test, 100, preparation)


_CIFAR10_MD5 = (
    "5dd7e06a14cb22eb9f671a540d1b7c25",
    "5ea93a67294ea407fff1d09f752e9692",
    "942cd6a4bcdd0dd3c604fbe906cb4421",
    "ae636b3ba5c66a11e91e8cb52e771fcb",
    "53f37980c15c3d472c316c40844f3f0d",
    "803d5f7f4d78ea53de84dbe85f74fb6d",
)


def _cifar_split(files: DataFiles, name: str, md5: str, *, label_bytes: int) -> Split:
    """The last label byte counts: CIFAR-100 puts the coarse label before the fine one."""
    data = np.frombuffer(files.read(name, md5), dtype=np.uint8)
    record = label_bytes + 3072
    if not len(data) or len(data) % record:
        raise DataError(f"{files.folder / name}: {len(data)} bytes are no whole number of {record}-byte records")
    records = data.reshape(-1, record)
    pixels = np.ascontiguousarray(records[:, label_bytes:]).reshape(-1, 3, 32, 32)
    return Split(torch.from_numpy(pixels), torch.from_numpy(records[:, label_bytes - 1].astype(np.int64)))


# MNIST and Fashion-MNIST: idx files, as published (.gz) or unpacked


def _mnist(files: DataFiles) -> Dataset:
    md5 = (
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "d53e105ee54ea40749a09fcbcd1e9432",
        "9fb629c4189551a2d022fa330f9573f3",
        "ec29112dd5afa0611ce80d1b7f02629c",
    )
    return _idx_dataset("mnist", files, md5, _bytes_preparation((0.1307,), (0.3081,), augment=False))


def _fashion_mnist(files: DataFiles) -> Dataset:
    md5 = (
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "25c81989df183df01b3e8a0aad5dffbe",
        "bef4ecab320f06d8554ea6380940ec79",
        "bb300cfdad3c16e7a12a480ee83cd310",
    )
    return _idx_dataset("fashion-mnist", files, md5, _bytes_preparation((0.2860,), (0.3530,), augment=False))


def _idx_dataset(name: str, files: DataFiles, md5: tuple[str, ...], preparation: Preparation) -> Dataset:
    train = _idx_split(files, "train", md5[:2])
    test = _idx_split(files, "t10k", md5[2:])
    return _from_train_and_test(name, train, test, 10, preparation)


def _idx_split(files: DataFiles, part: str, md5: tuple[str, ...]) -> Split:
    images = _idx_array(files, f"{part}-images-idx3-ubyte", md5[0], ndim=3)
    labels = _idx_array(files, f"{part}-labels-idx1-ubyte", md5[1], ndim=1)
    if len(images) != len(labels):
        raise DataError(f"{files.folder}: {part} has {len(images)} images but {len(labels)} labels")
    return Split(torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels.astype(np.int64)))


def _idx_array(files: DataFiles, name: str, md5: str, *, ndim: int) -> np.ndarray:
    """Magic number 0x0000080N, N sizes of four bytes, big end first, then the bytes."""
    if (files.folder / name).is_file():
        stream: BinaryIO = io.BytesIO(files.read(name))
    else:
        name += ".gz"
        stream = cast(BinaryIO, gzip.GzipFile(fileobj=io.BytesIO(files.read(name, md5))))
    try:
        return _read_idx(stream, ndim)
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise DataError(f"{files.folder / name}: is not a whole gzip file") from None
    except ValueError as error:
        raise DataError(f"{files.folder / name}: {error}") from None


def _read_idx(stream: BinaryIO, ndim: int) -> np.ndarray:
    """No more is unpacked than the header says, and no more than the largest of these files holds."""
    header = stream.read(4 + 4 * ndim)
    shape = [int.from_bytes(header[start : start + 4], "big") for start in range(4, len(header), 4)]
    size = math.prod(shape)
    fits = header[:4] == bytes((0, 0, 8, ndim)) and len(header) == 4 + 4 * ndim and size <= MAX_FILE
    data = stream.read(size + 1) if fits else b""
    if not fits or len(data) != size:
        raise ValueError(f"is not an idx file of bytes in {ndim} dimensions")
    return np.frombuffer(data, dtype=np.uint8).reshape(shape).copy()


@dataclass(frozen=True)
class _Source:
    folder: str  # the name of the folder in which the published archive unpacks
    marks: tuple[str, ...]  # files that tell that the data set is there
    advice: str
    load: Callable[[DataFiles], Dataset]


_IDX_MARKS = ("train-images-idx3-ubyte.gz", "train-images-idx3-ubyte")
_SOURCES = {
    "cifar10": _Source(
        "cifar-10-batches-bin",
        ("data_batch_1.bin",),
        "unpack cifar-10-binary.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html there",
        _cifar10,
    ),
    "cifar100": _Source(
        "cifar-100-binary",
        ("train.bin",),
        "unpack cifar-100-binary.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html there",
        _cifar100,
    ),
    "mnist": _Source(
        "mnist",
        _IDX_MARKS,
        "put the four idx files of MNIST there (https://yann.lecun.com/exdb/mnist/)",
        _mnist,
    ),
    "fashion-mnist": _Source(
        "fashion-mnist",
        _IDX_MARKS,
        "put the four idx files from https://github.com/zalandoresearch/fashion-mnist there",
        _fashion_mnist,
    ),
    "own": _Source(
        "own",
        (DESCRIPTION,),
        "docs/system-file.md tells how data of your own are laid out",
        lambda files: load_own(files.folder),
    ),
}
