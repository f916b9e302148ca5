"""Smaller updates: what a node sends is rounded first, and what the rounding lost is added to its next update.

A kind of compression is two things. `rounded` maps an update to one near to it that can be written in fewer bytes:
that happens in the node's training, so every backend computes with the same figures, whether bytes are sent or not.
`encoded` writes such an update in those bytes, and `decoded` reads it back, both without any further loss.

    fp16   half the bits of each element
    int8   8 bits of each element, and for each tensor a scale that is a power of two
    top-k  of each tensor the largest elements, and where they stand
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from exitflow.federated.options.federation_spec import CompressionKind, FederationSpec
from exitflow.tensors import Tensors

_LARGEST_HALF = 65504.0
_SCALE, _PLACES = "\x1fscale", "\x1fplaces"  # suffixes that no tensor's name has


@dataclass(frozen=True)
class Compression:
    """One way to make updates smaller."""

    kind: CompressionKind
    top_k_fraction: float

    @staticmethod
    def of(spec: FederationSpec) -> Compression | None:
        """The compression that a [federation] table asks for; None where it asks for none."""
        return None if spec.compression == "none" else Compression(spec.compression, spec.top_k_fraction)

    @property
    def remembers(self) -> bool:
        """Whether what was lost is added to the next update (error feedback)."""
        return self.kind != "fp16"

    def rounded(self, delta: Tensors) -> dict[str, Tensor]:
        """The nearest update that can be sent."""
        round_one: Callable[[Tensor], Tensor] = {"fp16": _half, "int8": _eight_bits, "top-k": self._largest}[self.kind]
        return {name: round_one(tensor) for name, tensor in delta.items()}

    def encoded(self, delta: Tensors) -> dict[str, Tensor]:
        """A rounded update in few bytes."""
        if self.kind == "fp16":
            return {name: tensor.half() for name, tensor in delta.items()}
        parts: dict[str, Tensor] = {}
        for name, tensor in delta.items():
            if self.kind == "int8":
                scale = _scale(tensor)
                whole = (tensor / scale).nan_to_num()  # NaN stands in the scale
                parts |= {name: whole.to(torch.int8), name + _SCALE: scale}
            else:
                flat = tensor.reshape(-1)
                places = flat.nonzero()[:, 0]
                parts |= {name: flat[places], name + _PLACES: places.to(torch.int32)}
        return parts

    def decoded(self, parts: Tensors, like: Tensors) -> dict[str, Tensor]:
        """The rounded update that was encoded; `like` has its shapes and types. ValueError where it does not fit."""
        own = {name for name in parts if not name.endswith((_SCALE, _PLACES))}
        if own != like.keys():
            raise ValueError(f"the tensors are not those asked for: {', '.join(sorted(own ^ like.keys()))}")
        try:
            return {name: self._decoded_one(parts, name, like[name]) for name in like}
        except (KeyError, RuntimeError, IndexError) as error:
            raise ValueError(f"the compressed update cannot be read: {error}") from None

    def _decoded_one(self, parts: Tensors, name: str, like: Tensor) -> Tensor:
        part = parts[name]
        expected = {"fp16": torch.float16, "int8": torch.int8, "top-k": like.dtype}[self.kind]
        if part.dtype != expected:
            raise ValueError(f"tensor {name!r} is {part.dtype} instead of {expected}")
        if self.kind == "top-k":
            places = parts[name + _PLACES].long()
            if part.shape != places.shape or (len(places) and not 0 <= places.min() <= places.max() < like.numel()):
                raise ValueError(f"tensor {name!r} has elements outside of its shape {list(like.shape)}")
            return torch.zeros_like(like).reshape(-1).index_put((places,), part).view(like.shape)
        if part.shape != like.shape:
            raise ValueError(f"tensor {name!r} has shape {list(part.shape)} instead of {list(like.shape)}")
        if self.kind == "fp16":
            return part.to(like.dtype)
        scale = parts[name + _SCALE]
        if scale.ndim or scale.dtype != like.dtype:  # before anything is computed: it might be huge
            raise ValueError(f"tensor {name!r} has a scale of shape {list(scale.shape)} and type {scale.dtype}")
        return part.to(like.dtype) * scale

    def _largest(self, tensor: Tensor) -> Tensor:
        flat = tensor.reshape(-1)
        kept = flat.abs().topk(max(1, math.ceil(self.top_k_fraction * flat.numel()))).indices
        return torch.zeros_like(flat).index_put((kept,), flat[kept]).view(tensor.shape)


def _half(tensor: Tensor) -> Tensor:
    return tensor.clamp(-_LARGEST_HALF, _LARGEST_HALF).half().to(tensor.dtype)


def _eight_bits(tensor: Tensor) -> Tensor:
    scale = _scale(tensor)
    return (tensor / scale).round().clamp(-127, 127) * scale


def _scale(tensor: Tensor) -> Tensor:
    """The least power of two with which the tensor fits into 8 bits: the same before rounding and after.

    NaN for a tensor that is not finite, so that what is read back is not either.
    """
    largest = tensor.abs().amax().double() if tensor.numel() else torch.zeros((), dtype=torch.float64)
    if not largest.isfinite():
        return torch.full((), math.nan, dtype=tensor.dtype)
    usable = torch.where(largest > 0, largest / 127.49, 1.0)
    return torch.exp2(usable.log2().ceil()).to(tensor.dtype).clamp(min=torch.finfo(tensor.dtype).tiny)
