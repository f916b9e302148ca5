"""Tensors by name: slices of them, one flat buffer for all of them, and safetensors files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from exitflow.errors import RunError
from exitflow.files import write_atomically

Tensors = Mapping[str, Tensor]
Slices = Mapping[str, tuple[slice, ...]]  # tensor name -> the part of it; (): all

ALIGNMENT = 64  # bytes
DESCRIPTION = "exitflow"  # the key of a file's metadata: a digest of its content, and what it is


def take(tensors: Tensors, slices: Slices) -> dict[str, Tensor]:
    """Views of the named parts; names that `tensors` does not have are passed over."""
    return {name: tensors[name][part] for name, part in slices.items() if name in tensors}


def num_bytes(tensors: Tensors) -> int:
    """How many bytes the elements of all tensors take together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


@dataclass(frozen=True)
class Layout:
    """Where each of some tensors lies in one flat buffer of bytes."""

    places: Mapping[str, tuple[int, torch.Size, torch.dtype]]  # name -> offset, shape, type
    num_bytes: int

    @staticmethod
    def of(tensors: Tensors) -> Layout:
        """Room for `tensors`, each aligned."""
        places, offset = {}, 0
        for name, tensor in tensors.items():
            places[name] = (offset, tensor.shape, tensor.dtype)
            offset += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        return Layout(places, offset)

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """The tensors inside `buffer`, (num_bytes or more,) uint8, without copying."""
        views = {}
        for name, (offset, shape, dtype) in self.places.items():
            stop = offset + shape.numel() * dtype.itemsize
            views[name] = buffer[offset:stop].view(dtype).view(shape)
        return views


def copy_into(targets: Tensors, sources: Tensors) -> None:
    """Overwrite each of `targets` by the source of its name."""
    if targets:
        torch._foreach_copy_(list(targets.values()), [sources[name] for name in targets])


def all_finite(tensors: Tensors) -> bool:
    """Whether there is no NaN and no infinity in any of them, nor in their sums, which only float64 can overflow."""
    if not tensors:
        return True
    sums = [tensor.sum(dtype=torch.float64) for tensor in tensors.values()]
    return bool(torch.stack(sums).isfinite().all())


def pack(tensors: Tensors) -> bytes:
    """Tensors by name as bytes in the safetensors format: nothing in it can be run, and nothing depends on an order."""
    return save({name: tensor.detach().contiguous() for name, tensor in tensors.items()})


def unpack(data: bytes) -> dict[str, Tensor]:
    """The tensors that were packed; ValueError where the bytes are damaged."""
    try:
        return load(data)
    except (SafetensorError, ValueError, KeyError, RuntimeError, OverflowError) as error:
        raise ValueError(f"the tensors cannot be read: {error}") from None


def save_tensors(path: Path, tensors: Tensors, description: str = "", *, lasting: bool = True) -> None:
    """A safetensors file with a description and a digest of all that it holds, written by `write_atomically`."""
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    described = f"{_digest(contiguous, description)} {description}"  # in one value: several would be in random order
    write_atomically(path, save(contiguous, {DESCRIPTION: described}), lasting=lasting)


def load_tensors(path: Path) -> tuple[dict[str, Tensor], str]:
    """(tensors, description) of a safetensors file; nothing is unpickled, and a digest that it has is compared."""
    with _opened(path) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        digest, description = _described(file)
        unknown = (file.metadata() or {}).keys() - {DESCRIPTION, "format"}  # a damaged name, perhaps
    if unknown or (digest and digest != _digest(tensors, description)):
        raise RunError(f"{path}: is damaged: its content does not have the digest that was written with it")
    return tensors, description


def read_description(path: Path) -> str:
    """What a safetensors file says that it is, without its tensors; "" where it says nothing."""
    with _opened(path) as file:
        return _described(file)[1]


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise RunError(f"{path}: cannot be read: {error}") from None


def _described(file: Any) -> tuple[str, str]:
    """(digest, description); files from before there were digests have a description in JSON alone."""
    text = (file.metadata() or {}).get(DESCRIPTION, "")
    digest, _, description = text.partition(" ")
    return ("", text) if text.startswith("{") else (digest, description)


def _digest(tensors: Tensors, description: str) -> str:
    digest = hashlib.blake2b(description.encode(), digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        flat: Any = tensor.reshape(-1).view(torch.uint8).numpy()
        digest.update(flat)
    return digest.hexdigest()
