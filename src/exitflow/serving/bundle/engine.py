"""The network's segments in ONNX Runtime."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from exitflow.errors import BundleError
from exitflow.evaluation.blending import Blend

Array = npt.NDArray[Any]


class Engine:
    """Runs segments 1..exit; samples may enter behind any of them."""

    def __init__(self, segments: Sequence[bytes], *, blends: Sequence[Blend] = (), threads: int = 1) -> None:
        """`blends`: how each exit makes its answer; () where each answers by itself."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            self._sessions = [
                onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"]) for data in segments
            ]
        except Exception as error:  # ONNX Runtime raises types of its own, all bare
            raise BundleError(f"a segment of the bundle is no ONNX model that can be run: {error}") from None
        self._blends = blends
        self._outputs = [[output.name for output in session.get_outputs()] for session in self._sessions]

    @property
    def exit(self) -> int:
        """Where the features come out."""
        return len(self._sessions)

    def run(
        self, parts: Mapping[int, Array], before: Mapping[int, Array] = MappingProxyType({})
    ) -> tuple[Array | None, npt.NDArray[np.float32]]:
        """(features, logits) at the last exit, from carries by the exit behind which they stand (0: inputs).

        Where answers are blended, `before` holds those of the exits behind which the carries stand.
        The rows come out in the order of `parts` by falling exit; the deepest exit of a network gives no features.
        """
        carry: Array | None = None
        logits: Any = None
        for start, session in enumerate(self._sessions):
            if start in parts:
                carry = _above(parts[start], carry)
                if start and self._blends:
                    logits = _above(before[start], logits)
            if carry is not None:
                *features, own = session.run(self._outputs[start], {"carry": carry})
                logits = self._blends[start].answer(logits, own) if start and self._blends else own
                carry = features[0] if features else None
        return carry, logits

    def trace(self, inputs: Array) -> list[tuple[Array | None, Array]]:
        """(features, own logits) behind every segment."""
        found: list[tuple[Array | None, Array]] = []
        carry: Array | None = inputs
        for session, names in zip(self._sessions, self._outputs, strict=True):
            *features, logits = session.run(names, {"carry": carry})
            carry = features[0] if features else None
            found.append((carry, logits))
        return found

    def seconds_per_batch(self, inputs: Array, repeats: int = 5) -> float:
        """The least of some runs from the input on; they also warm the engine up."""
        best = float("inf")
        for _ in range(repeats):
            started = time.perf_counter()
            self.run({0: inputs})
            best = min(best, time.perf_counter() - started)
        return best


def _above(new: Array, rows: Array | None) -> Array:
    return new if rows is None else np.concatenate((new, rows))


def give_back_memory() -> None:
    """What reading and optimising a network needed: several MB that the allocator would keep."""
    with suppress(AttributeError):  # of another libc than glibc
        ctypes.CDLL(None).malloc_trim(0)
