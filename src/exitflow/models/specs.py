"""The [model] table of each family. Needs no PyTorch, so that planning does not either."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from exitflow.config import decode, require, require_table
from exitflow.errors import suggestion

HeadKind = Literal["gap", "grid"]

MAX_BLOCKS, MAX_CHANNELS, MAX_STRIDE = 1_000, 65_536, 64  # far beyond any network that trains; no slip gets past them


@dataclass(frozen=True)
class EarlyExitResNet:
    """A residual network with exits behind some of its blocks (`exitflow.models.early_exit_resnet`)."""

    family: Literal["early-exit-resnet"] = "early-exit-resnet"
    width: int = 16  # channels of the first stage; the paper's is 64
    stem_stride: int = 1  # of the first convolution; 2 quarters the cost of all that follows
    blocks: tuple[int, ...] = (2, 2, 2, 2)  # basic blocks in each stage
    strides: tuple[int, ...] = (1, 2, 2, 2)  # of the first block in each stage
    exit_blocks: tuple[int, ...] = ()  # the residual block behind which each exit stands; (): spread evenly
    heads: HeadKind | tuple[HeadKind, ...] = ()  # of all exits, or of each; (): grid, and gap at the deepest

    def __post_init__(self) -> None:
        require(self.width >= 1, "width", f"must be at least 1, got {self.width}")
        problem = f"must be from 1 to {MAX_STRIDE}, got {self.stem_stride}"
        require(1 <= self.stem_stride <= MAX_STRIDE, "stem_stride", problem)
        valid = bool(self.blocks) and min(self.blocks) >= 1 and self.num_blocks <= MAX_BLOCKS
        problem = f"each must be at least 1, and {MAX_BLOCKS:,} at most in all, got {list(self.blocks)}"
        require(valid, "blocks", problem)
        channels = self.width * 2 ** (len(self.blocks) - 1)
        problem = f"{self.width} gives the last stage {channels:,} channels, {MAX_CHANNELS:,} at most are allowed"
        require(channels <= MAX_CHANNELS, "width", problem)
        valid = len(self.strides) == len(self.blocks) and min(self.strides) >= 1 and max(self.strides) <= MAX_STRIDE
        problem = f"one from 1 to {MAX_STRIDE} for each of the {len(self.blocks)} stages, got {list(self.strides)}"
        require(valid, "strides", problem)
        exits = self.exit_blocks
        if exits:
            rising = list(exits) == sorted(set(exits)) and exits[0] >= 1 and exits[-1] == self.num_blocks
            problem = f"must rise, from 1 or more to the last block, {self.num_blocks}; got {list(exits)}"
            require(rising, "exit_blocks", problem)

    @property
    def num_blocks(self) -> int:
        """Residual blocks in all stages."""
        return sum(self.blocks)

    def resolve(self, num_exits: int) -> EarlyExitResNet:
        """The same with nothing left open, for a system of `num_exits` exits."""
        exit_blocks = self.exit_blocks or self._spread_exits(num_exits)
        problem = f"the model has {len(exit_blocks)} exits, but no node stands at exit {len(exit_blocks)}"
        require(len(exit_blocks) <= num_exits, "exit_blocks", problem)
        problem = f"the deepest node stands at exit {num_exits}, but the model has only {len(exit_blocks)} exits"
        require(len(exit_blocks) >= num_exits, "exit_blocks", problem)
        grid: HeadKind = "grid"
        heads = (
            (self.heads,) * num_exits
            if isinstance(self.heads, str)
            else self.heads or (*(grid,) * (num_exits - 1), "gap")
        )
        require(len(heads) == num_exits, "heads", f"one for each of the {num_exits} exits, got {list(heads)}")
        return replace(self, exit_blocks=exit_blocks, heads=heads)

    def _spread_exits(self, num_exits: int) -> tuple[int, ...]:
        """Behind the first block, behind the last, and evenly between: 1, 4, 8 for three exits in eight blocks."""
        problem = f"{num_exits} exits do not fit into {self.num_blocks} residual blocks"
        require(num_exits <= self.num_blocks, "blocks", problem)
        if num_exits == 1:
            return (self.num_blocks,)
        return tuple(1 + (self.num_blocks - 1) * step // (num_exits - 1) for step in range(num_exits))


ModelSpec = EarlyExitResNet
FAMILIES: dict[str, type[ModelSpec]] = {"early-exit-resnet": EarlyExitResNet}


def decode_model(table: Any) -> ModelSpec:
    """The [model] table, by its family."""
    family = require_table(table).get("family", "early-exit-resnet")
    known = isinstance(family, str) and family in FAMILIES
    require(known, "family", f"there is no model family {family!r}{suggestion(str(family), FAMILIES)}")
    return decode(FAMILIES[family], table)
