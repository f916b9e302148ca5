"""The [federation] table. Needs no PyTorch, so that planning does not either."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from exitflow.config import check_fields, require

CompressionKind = Literal["none", "fp16", "int8", "top-k"]


@dataclass(frozen=True)
class FederationSpec:
    """How to deal with nodes that may fail, links that are slow, and data that are private."""

    deadline: float = 600.0  # seconds that a round waits for its nodes
    on_missing: Literal["strict", "skip", "reweight"] = "strict"  # when a node does not answer in time
    norm_limit: float = 20.0  # an update whose elements are so many times as large as is usual is refused
    compression: CompressionKind = "none"  # of updates
    top_k_fraction: float = 0.05  # of each tensor's elements that `top-k` sends
    clip_norm: float | None = None  # C: the longest that an update may be, before it is weighted
    noise_multiplier: float | None = None  # z: noise of z C (times the largest weight) on every sum of updates
    delta: float = 1e-5  # for which the privacy loss epsilon is reported

    def __post_init__(self) -> None:
        check_fields(self)
        require(0 < self.deadline <= 1e6, "deadline", f"must be above 0, up to 1e6 seconds, got {self.deadline}")
        require(self.norm_limit > 1, "norm_limit", f"must be above 1, got {self.norm_limit}")
        fraction = self.top_k_fraction
        require(0 < fraction <= 1, "top_k_fraction", f"must be above 0, up to 1, got {fraction}")
        for key in ("clip_norm", "noise_multiplier"):
            value = getattr(self, key)
            require(value is None or 0 < value <= 1e6, key, f"must be above 0, up to 1e6, got {value}")
        require(0 < self.delta < 1, "delta", f"must be between 0 and 1, got {self.delta}")
        alone = self.noise_multiplier is not None and self.clip_norm is None
        require(not alone, "noise_multiplier", "needs clip_norm: noise protects only what is bounded")
