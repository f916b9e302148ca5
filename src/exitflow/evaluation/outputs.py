"""The logits of every exit for a data set, computed once; everything else follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from exitflow.routing.confidence import confidence

if TYPE_CHECKING:  # the outputs themselves need no PyTorch; computing them does
    from exitflow.data.dataset import Preparation, Split
    from exitflow.models.nested import NestedModel

BATCH_SIZE = 500


@dataclass(frozen=True)
class ExitOutputs:
    """What each exit says to each sample."""

    logits: npt.NDArray[np.float32]  # (E, N, C)
    labels: npt.NDArray[np.int64]  # (N,)
    gains: tuple[tuple[float, ...], ...] = ()  # E of weights, to rank by "gain"; see evaluation.gains

    def ranks(self, kind: str) -> list[npt.NDArray[np.float64]]:
        """E of (N,): how sure each exit is of each sample, by a kind of confidence or by expected gain."""
        gains = self.gains or ((),) * len(self.logits)
        return [confidence(logits, kind, gain) for logits, gain in zip(self.logits, gains, strict=True)]

    @property
    def correct(self) -> npt.NDArray[np.bool_]:
        """(E, N) whether each exit is right; what is not finite is no answer."""
        answered = np.isfinite(self.logits).all(axis=2)
        result: npt.NDArray[np.bool_] = answered & (self.logits.argmax(axis=2) == self.labels)
        return result

    @property
    def exit_accuracy(self) -> npt.NDArray[np.float64]:
        """(E,) of each exit on all samples."""
        result: npt.NDArray[np.float64] = self.correct.mean(axis=1)
        return result


def exit_outputs(model: NestedModel, split: Split, preparation: Preparation, *, device: str = "cpu") -> ExitOutputs:
    """One pass over `split`, on `device`; `model` stays where it is."""
    import torch

    home = next(model.parameters()).device
    model.to(device).eval()
    dtype = next(model.parameters()).dtype
    batches = []
    with torch.inference_mode():
        for start in range(0, len(split), BATCH_SIZE):
            carry = preparation(split.inputs[start : start + BATCH_SIZE], dtype=dtype, device=device)
            logits = []
            for exit in range(1, model.num_exits + 1):
                carry = model.advance(carry, exit - 1, exit)
                logits.append(model.classify(carry, exit).float().cpu())
            batches.append(torch.stack(logits))
    model.to(home)
    return ExitOutputs(torch.cat(batches, dim=1).numpy(), split.labels.numpy())
