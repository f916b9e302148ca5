"""Arrays from .npz files, whose headers are read and found to fit before anything is unpacked.

An .npz file is a zip archive of .npy members: a short header with the shape and the type of an array, then its bytes.
What a header promises must be what the archive holds, so that a few bytes cannot ask for more memory than there is.
"""

from __future__ import annotations

import math
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, BinaryIO

import numpy as np
import numpy.typing as npt

MAX_BYTES = 8 * 2**30  # of one array
MAX_EXPANSION = 200  # times the size in the file, beyond ...
FREE_EXPANSION = 64 * 2**20  # ... so many bytes, which anything may unpack to
CHUNK = 2**20  # bytes

_READ_HEADER = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


@dataclass(frozen=True)
class Header:
    """What an array in the file is."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran_order: bool

    @property
    def num_bytes(self) -> int:
        """The size of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


class Npz:
    """The arrays of an open .npz file. Every problem with them is a ValueError of one sentence."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive

    def __contains__(self, name: str) -> bool:
        return f"{name}.npy" in self._archive.namelist()

    def header(self, name: str) -> Header:
        """The shape and the type of the array `name`, which are found to fit the size of what the file holds."""
        with self._open(name) as member:
            return self._checked_header(name, member)

    def read(self, name: str) -> npt.NDArray[Any]:
        """Read the array `name` from the file."""
        with self._open(name) as member:
            header = self._checked_header(name, member)
            array = np.empty(math.prod(header.shape), header.dtype)
            _fill(array.view(np.uint8), member)
        if header.fortran_order:
            return array.reshape(header.shape[::-1]).T
        return array.reshape(header.shape)

    def _open(self, name: str) -> IO[bytes]:
        info = self._info(name)
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or info.flag_bits & 1:
            raise ValueError(f"{name!r} is packed in a way that numpy.savez does not use")
        if info.file_size > max(FREE_EXPANSION, MAX_EXPANSION * info.compress_size):
            raise ValueError(f"{name!r} would unpack from {info.compress_size:,} to {info.file_size:,} bytes")
        return self._archive.open(info)

    def _checked_header(self, name: str, member: IO[bytes]) -> Header:
        header = _read_header(name, member)
        held = self._info(name).file_size - member.tell()
        if header.dtype.hasobject or not header.dtype.itemsize:
            raise ValueError(f"{name!r} is no array of numbers")
        if not all(0 <= size <= MAX_BYTES for size in header.shape) or header.num_bytes > MAX_BYTES:
            raise ValueError(f"{name!r} has the shape {header.shape}, and arrays have at most {MAX_BYTES:,} bytes")
        if header.num_bytes != held:
            raise ValueError(f"{name!r} should have {header.num_bytes:,} bytes for its shape, and has {held:,}")
        return header

    def _info(self, name: str) -> zipfile.ZipInfo:
        try:
            return self._archive.getinfo(f"{name}.npy")
        except KeyError:
            held = ", ".join(repr(other.removesuffix(".npy")) for other in self._archive.namelist()[:5])
            raise ValueError(f"it holds no {name!r}, but {held or 'nothing'}") from None


@contextmanager
def open_npz(file: BinaryIO) -> Iterator[Npz]:
    """The .npz file that was opened as `file`; a ValueError of one sentence for whatever is wrong with it."""
    try:
        with zipfile.ZipFile(file) as archive:
            yield Npz(archive)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise ValueError(f"it is damaged, or no .npz file: {error}") from None


def _read_header(name: str, member: IO[bytes]) -> Header:
    """Numpy's parser of headers fails in many ways at damaged ones, and says so of old ones on stderr."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            version = np.lib.format.read_magic(member)
            return Header(*_reordered(_READ_HEADER[version](member)))
    except (zipfile.BadZipFile, zlib.error, EOFError):
        raise
    except Exception:
        raise ValueError(f"{name!r} has a damaged header") from None


def _reordered(header: tuple[tuple[int, ...], bool, np.dtype[Any]]) -> tuple[tuple[int, ...], np.dtype[Any], bool]:
    shape, fortran_order, dtype = header
    return tuple(map(int, shape)), dtype, fortran_order


def _fill(target: npt.NDArray[np.uint8], member: IO[bytes]) -> None:
    """Read so much, and the end behind it, where the checksum is compared."""
    for start in range(0, len(target), CHUNK):
        part = target[start : start + CHUNK]
        if len(data := member.read(len(part))) < len(part):
            raise EOFError("it ends early")
        part[:] = np.frombuffer(data, np.uint8)
    member.read(1)
