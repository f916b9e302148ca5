"""The [model] tables of networks that other packages have. Needs none of them, and no PyTorch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from exitflow.config import check_fields, require
from exitflow.files import LARGE_FILE, read_file

ExitBlocks = tuple[int, ...] | Literal["auto"]
BackboneHead = Literal["auto", "gap", "grid", "token"]  # auto: grid for images, gap for tokens

MAX_SIZE = 4096  # pixels


@dataclass(frozen=True)
class TimmNetwork:
    """A timm classifier whose blocks stand in one sequence (`exitflow.models.timm_networks`)."""

    family: Literal["timm"] = "timm"
    name: str = ""  # timm's name of it, such as tf_efficientnet_lite0
    weights: str | None = None  # a file that `exitflow weights` wrote, or a torch state dict; absent: from scratch
    weights_sha256: str | None = None  # of that file; filled in where it is there, and checked wherever it is read
    exit_blocks: ExitBlocks = "auto"  # the block behind which each exit stands, counted from 1 over all stages
    heads: BackboneHead | tuple[BackboneHead, ...] = "auto"  # of all exits but the deepest, which has timm's own
    image_size: int | None = None  # pixels to which images are resized; absent: as the data have them
    mean: tuple[float, ...] = ()  # of pixels from 0 to 1, per channel; (): what the weights were trained with
    std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        require(bool(self.name), "name", "is missing: timm's name of a network; `exitflow models` lists them")
        valid = self.image_size is None or 8 <= self.image_size <= MAX_SIZE
        require(valid, "image_size", f"must be from 8 to {MAX_SIZE:,} pixels, got {self.image_size}")
        require(len(self.mean) == len(self.std), "std", "goes with mean; give both, of equal lengths, or none")
        require(min(self.std, default=1) > 0, "std", f"must be above 0, got {list(self.std)}")
        check_exit_blocks(self.exit_blocks)

    def resolve(self, num_exits: int) -> TimmNetwork:
        """The same with the digest of its weights, where they are there; where its exits stand, it says when built."""
        check_num_exits(self.exit_blocks, num_exits)
        heads = early_heads(self.heads, num_exits)
        return replace(self, heads=heads, weights_sha256=self.weights_sha256 or digest_of(self.weights))


@dataclass(frozen=True)
class TransformersNetwork:
    """An encoder of transformers on token ids, such as BERT (`exitflow.models.transformer_networks`)."""

    family: Literal["transformers"] = "transformers"
    name: str = "bert"  # transformers' name of the kind: bert, distilbert, roberta, electra, ...
    settings: dict[str, int] = field(default_factory=dict)  # whole numbers of its config.json: vocab_size, ...
    weights: str | None = None  # a file of safetensors or a torch state dict; absent: from scratch
    weights_sha256: str | None = None
    exit_blocks: ExitBlocks = "auto"  # the layer behind which each exit stands, counted from 1
    head: Literal["gap", "token"] = "gap"  # of every exit: on the mean of all tokens, or on the first
    num_exits: int | None = None  # filled in: of the system

    def __post_init__(self) -> None:
        check_fields(self)
        check_exit_blocks(self.exit_blocks)

    def resolve(self, num_exits: int) -> TransformersNetwork:
        """The same with its number of exits, and the digest of its weights where they are there."""
        check_num_exits(self.exit_blocks, num_exits)
        return replace(self, num_exits=num_exits, weights_sha256=self.weights_sha256 or digest_of(self.weights))


def check_exit_blocks(blocks: ExitBlocks) -> None:
    """They rise from 1 on."""
    rising = blocks == "auto" or (bool(blocks) and list(blocks) == sorted(set(blocks)) and blocks[0] >= 1)
    require(rising, "exit_blocks", f'must be "auto", or rise from 1 or more; got {blocks}')


def check_num_exits(blocks: ExitBlocks, num_exits: int) -> None:
    """One for each exit of the system."""
    if blocks != "auto":
        problem = f"one for each of the {num_exits} exits, got {list(blocks)}"
        require(len(blocks) == num_exits, "exit_blocks", problem)


def early_heads(given: BackboneHead | tuple[BackboneHead, ...], num_exits: int) -> tuple[BackboneHead, ...]:
    """The heads of all exits before the deepest."""
    heads = (given,) * (num_exits - 1) if isinstance(given, str) else given
    problem = f"one for each of the {num_exits - 1} exits before the deepest, got {list(heads)}"
    require(len(heads) == num_exits - 1, "heads", problem)
    return heads


def digest_of(weights: str | None) -> str | None:
    """The sha256 of a file; None where there is none."""
    if weights is None or not Path(weights).is_file():
        return None
    return hashlib.sha256(read_file(Path(weights), LARGE_FILE)).hexdigest()
