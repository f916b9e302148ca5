"""Tensors by name as bytes, in the safetensors format: nothing in it can be run, and nothing depends on an order."""

from __future__ import annotations

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from exitflow.tensors import Tensors


def pack(tensors: Tensors) -> bytes:
    """All of them, dense."""
    return save({name: tensor.detach().contiguous() for name, tensor in tensors.items()})


def unpack(data: bytes) -> dict[str, Tensor]:
    """What was packed; ValueError where it is damaged."""
    try:
        return load(data)
    except (SafetensorError, ValueError, KeyError, RuntimeError, OverflowError) as error:
        raise ValueError(f"the tensors cannot be read: {error}") from None
