"""Features as bytes on a link: fp32, fp16, and 8 or 4 bits with a range for every sample; zlib on top, if asked."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
_COMPRESSION_LEVEL = 1  # the higher ones cost ten times the time for a few percent of the bytes


@dataclass(frozen=True)
class Codec:
    """(N, ...) float32 features to bytes and back."""

    encode: Callable[[Array], bytes]
    decode: Callable[[bytes, tuple[int, ...]], Array]
    sample_bytes: Callable[[int], int]  # from the number of values


def encode(features: Array, codec: str, *, compress: bool = False) -> bytes:
    """(N, ...) features as bytes."""
    data = CODECS[codec].encode(np.ascontiguousarray(features, dtype=np.float32))
    return zlib.compress(data, _COMPRESSION_LEVEL) if compress else data


def decode(data: bytes, shape: tuple[int, ...], codec: str, *, compress: bool = False) -> Array:
    """Features of `shape`, or a ValueError that says what does not fit."""
    if codec not in CODECS:
        raise ValueError(f"codec must be one of {', '.join(CODECS)}, got {codec!r}")
    expected = shape[0] * CODECS[codec].sample_bytes(math.prod(shape[1:]))
    if compress:
        data = _decompress(data, expected)
    if len(data) != expected:
        raise ValueError(f"{codec} features of shape {list(shape)} take {expected} bytes, got {len(data)}")
    return CODECS[codec].decode(data, shape)


def _decompress(data: bytes, expected: int) -> bytes:
    """At most one byte more than expected: a small message cannot fill the memory."""
    inflater = zlib.decompressobj()
    try:
        return inflater.decompress(data, expected + 1)
    except zlib.error as error:
        raise ValueError(f"compressed features cannot be read: {error}") from None


def _quantise(features: Array, levels: int) -> tuple[bytes, npt.NDArray[np.uint8]]:
    """(ranges, (N, values)): every sample from its own minimum in steps of its own size."""
    flat = features.reshape(len(features), -1)
    low = flat.min(axis=1, keepdims=True)
    step = (flat.max(axis=1, keepdims=True) - low) / levels
    codes = np.rint((flat - low) / np.where(step > 0, step, 1)).astype(np.uint8)
    return np.concatenate((low, step), axis=1).astype("<f4").tobytes(), codes


def _restore(ranges: bytes, codes: Array, shape: tuple[int, ...]) -> Array:
    low, step = np.frombuffer(ranges, dtype="<f4").reshape(-1, 2).T
    restored: Array = (codes * step[:, None] + low[:, None]).astype(np.float32).reshape(shape)
    return restored


def _encode_u8(features: Array) -> bytes:
    ranges, codes = _quantise(features, 255)
    return ranges + codes.tobytes()


def _decode_u8(data: bytes, shape: tuple[int, ...]) -> Array:
    split = 8 * shape[0]
    codes = np.frombuffer(data, dtype=np.uint8, offset=split).reshape(shape[0], -1)
    return _restore(data[:split], codes, shape)


def _encode_u4(features: Array) -> bytes:
    ranges, codes = _quantise(features, 15)
    if codes.shape[1] % 2:
        codes = np.pad(codes, ((0, 0), (0, 1)))
    return ranges + (codes[:, ::2] << 4 | codes[:, 1::2]).tobytes()


def _decode_u4(data: bytes, shape: tuple[int, ...]) -> Array:
    split = 8 * shape[0]
    pairs = np.frombuffer(data, dtype=np.uint8, offset=split).reshape(shape[0], -1)
    codes = np.stack((pairs >> 4, pairs & 15), axis=2).reshape(shape[0], -1)[:, : math.prod(shape[1:])]
    return _restore(data[:split], codes, shape)


CODECS: dict[str, Codec] = {
    "fp32": Codec(
        lambda features: features.astype("<f4", copy=False).tobytes(),
        lambda data, shape: np.frombuffer(data, dtype="<f4").reshape(shape),
        lambda values: 4 * values,
    ),
    "fp16": Codec(
        lambda features: np.clip(features, -65504, 65504).astype("<f2").tobytes(),
        lambda data, shape: np.frombuffer(data, dtype="<f2").reshape(shape).astype(np.float32),
        lambda values: 2 * values,
    ),
    "u8": Codec(_encode_u8, _decode_u8, lambda values: 8 + values),
    "u4": Codec(_encode_u4, _decode_u4, lambda values: 8 + (values + 1) // 2),
}
