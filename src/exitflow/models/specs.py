"""The [model] table of each family. Needs no PyTorch, so that planning does not either."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal, Protocol, Self

from exitflow.config import check_fields, decode, located, require, require_table
from exitflow.errors import suggestion
from exitflow.models.backbones import TimmNetwork, TransformersNetwork
from exitflow.parts import Part, is_own, part_name

HeadKind = Literal["gap", "grid"]

MAX_BLOCKS, MAX_CHANNELS, MAX_STRIDE = 1_000, 65_536, 64  # far beyond any network that trains; no slip gets past them
MAX_WEIGHTS = 10**10  # of the convolutions: 40 GB


class ModelSpec(Protocol):
    """The [model] table of one family of networks."""

    @property
    def family(self) -> str:
        """The name by which a system file asks for the family."""

    def resolve(self, num_exits: int) -> Self:
        """The same with nothing left open, for a system of `num_exits` exits; refuses what does not fit."""


class _ResidualTrunk:
    """What the residual families have in common: a 3x3 stem, then stages of basic blocks, each twice as wide."""

    width: int
    stem_stride: int
    blocks: tuple[int, ...]
    strides: tuple[int, ...]

    def check_trunk(self) -> None:
        """Refuse what is no network."""
        check_fields(self)
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
        shapes = [self.width, *(channels for channels, _ in self.block_shapes())]
        weights = sum(9 * (before + after) * after for before, after in pairwise(shapes))
        problem = f"{self.width} gives the blocks {weights:,} weights, {MAX_WEIGHTS:,} at most are allowed"
        require(weights <= MAX_WEIGHTS, "width", problem)

    @property
    def num_blocks(self) -> int:
        """Residual blocks in all stages."""
        return sum(self.blocks)

    def block_shapes(self) -> Iterator[tuple[int, int]]:
        """Output channels and stride of each block."""
        for stage, (count, stride) in enumerate(zip(self.blocks, self.strides, strict=True)):
            yield from ((self.width * 2**stage, stride if index == 0 else 1) for index in range(count))

    def check_exit_blocks(self, exits: tuple[int, ...]) -> None:
        """They rise to the last block."""
        rising = not exits or (list(exits) == sorted(set(exits)) and exits[0] >= 1 and exits[-1] == self.num_blocks)
        problem = f"must rise, from 1 or more to the last block, {self.num_blocks}; got {list(exits)}"
        require(rising, "exit_blocks", problem)

    def resolved_exit_blocks(self, given: tuple[int, ...], num_exits: int) -> tuple[int, ...]:
        """As given, or: behind the first block, behind the last, and evenly between (1, 4, 8 for three of eight)."""
        if given:
            _require_exits(len(given), num_exits, "exit_blocks")
            return given
        problem = f"{num_exits} exits do not fit into {self.num_blocks} residual blocks"
        require(num_exits <= self.num_blocks, "blocks", problem)
        if num_exits == 1:
            return (self.num_blocks,)
        return tuple(1 + (self.num_blocks - 1) * step // (num_exits - 1) for step in range(num_exits))


@dataclass(frozen=True)
class EarlyExitResNet(_ResidualTrunk):
    """A residual network with exits behind some of its blocks (`exitflow.models.early_exit_resnet`)."""

    family: Literal["early-exit-resnet"] = "early-exit-resnet"
    width: int = 16  # channels of the first stage; the paper's is 64
    stem_stride: int = 1  # of the first convolution; 2 quarters the cost of all that follows
    blocks: tuple[int, ...] = (2, 2, 2, 2)  # basic blocks in each stage
    strides: tuple[int, ...] = (1, 2, 2, 2)  # of the first block in each stage
    exit_blocks: tuple[int, ...] = ()  # the residual block behind which each exit stands; (): spread evenly
    heads: HeadKind | tuple[HeadKind, ...] = ()  # of all exits, or of each; (): grid, and gap at the deepest

    def __post_init__(self) -> None:
        self.check_trunk()
        self.check_exit_blocks(self.exit_blocks)

    def resolve(self, num_exits: int) -> EarlyExitResNet:
        """The same with nothing left open, for a system of `num_exits` exits."""
        exit_blocks = self.resolved_exit_blocks(self.exit_blocks, num_exits)
        return replace(self, exit_blocks=exit_blocks, heads=_resolved_heads(self.heads, num_exits))


@dataclass(frozen=True)
class SlimResNet(_ResidualTrunk):
    """A residual network of which each exit has the first channels of every layer (`exitflow.models.slim_resnet`)."""

    family: Literal["slim-resnet"] = "slim-resnet"
    width: int = 16  # channels of the first stage, of the deepest exit
    stem_stride: int = 1
    blocks: tuple[int, ...] = (2, 2, 2, 2)
    strides: tuple[int, ...] = (1, 2, 2, 2)
    widths: tuple[float, ...] = ()  # share of the channels that each exit has; (): 1/E, 2/E, ..., 1
    head: HeadKind = "gap"  # one for all exits
    scaler: bool = False  # divide what a convolution gives by the share (HeteroFL)

    def __post_init__(self) -> None:
        self.check_trunk()
        _check_widths(self.widths)

    def resolve(self, num_exits: int) -> SlimResNet:
        """The same with nothing left open, for a system of `num_exits` exits."""
        return replace(self, widths=_resolved_widths(self.widths, num_exits))


@dataclass(frozen=True)
class DepthWidthResNet(_ResidualTrunk):
    """A residual network whose exits are both shallower and narrower (`exitflow.models.slim_resnet`)."""

    family: Literal["depth-width"] = "depth-width"
    width: int = 16  # channels of the first stage, of the deepest exit
    stem_stride: int = 1
    blocks: tuple[int, ...] = (2, 2, 2, 2)
    strides: tuple[int, ...] = (1, 2, 2, 2)
    exit_blocks: tuple[int, ...] = ()
    widths: tuple[float, ...] = ()
    heads: HeadKind | tuple[HeadKind, ...] = ()
    scaler: bool = False

    def __post_init__(self) -> None:
        self.check_trunk()
        self.check_exit_blocks(self.exit_blocks)
        _check_widths(self.widths)

    def resolve(self, num_exits: int) -> DepthWidthResNet:
        """The same with nothing left open, for a system of `num_exits` exits."""
        return replace(
            self,
            exit_blocks=self.resolved_exit_blocks(self.exit_blocks, num_exits),
            widths=_resolved_widths(self.widths, num_exits),
            heads=_resolved_heads(self.heads, num_exits),
        )


@dataclass(frozen=True)
class CommonNetwork:
    """Every node has one and the same network: one exit of another family (`exitflow.models.plain`)."""

    family: Literal["common"] = "common"
    exit: int = 1  # the exit that it is: the first is what the smallest nodes can hold
    network: ModelSpec = field(default_factory=EarlyExitResNet)

    def resolve(self, num_exits: int) -> CommonNetwork:
        """The same with nothing left open, for a system of `num_exits` exits."""
        require(1 <= self.exit <= num_exits, "exit", f"must be from 1 to {num_exits}, got {self.exit}")
        return replace(self, network=located("network", self.network.resolve, num_exits))


@dataclass(frozen=True)
class SeparateNetworks:
    """Every exit has a network of its own, which shares nothing (`exitflow.models.plain`)."""

    family: Literal["separate"] = "separate"
    exits: tuple[int, ...] = ()  # the exit of `network` that each of them is; (): 1..E
    network: ModelSpec = field(default_factory=EarlyExitResNet)

    def resolve(self, num_exits: int) -> SeparateNetworks:
        """The same with nothing left open, for a system of `num_exits` exits."""
        exits = self.exits or tuple(range(1, num_exits + 1))
        _require_exits(len(exits), num_exits, "exits")
        require(min(exits) >= 1, "exits", f"must be 1 or more, got {list(exits)}")
        return replace(self, exits=exits, network=located("network", self.network.resolve, max(exits)))


@dataclass(frozen=True)
class CustomModel:
    """A network of the user's own: `factory` is called with (input_shape, num_classes) and gives a NestedModel."""

    family: Literal["custom"] = "custom"
    factory: Part = ""  # package.module:function, importable wherever the system is trained

    def __post_init__(self) -> None:
        object.__setattr__(self, "factory", part_name("factory", self.factory))
        require(is_own(self.factory), "factory", f"expected package.module:function, got {self.factory!r}")

    def resolve(self, num_exits: int) -> CustomModel:
        """Whether its exits fit is seen when it is built."""
        return self


FAMILIES: dict[str, type[ModelSpec]] = {
    "early-exit-resnet": EarlyExitResNet,
    "slim-resnet": SlimResNet,
    "depth-width": DepthWidthResNet,
    "common": CommonNetwork,
    "separate": SeparateNetworks,
    "custom": CustomModel,
    "timm": TimmNetwork,
    "transformers": TransformersNetwork,
}
_MADE_OF_ANOTHER = ("common", "separate")


def decode_model(table: Any) -> ModelSpec:
    """The [model] table, by its family."""
    table = dict(require_table(table))
    family = table.get("family", "early-exit-resnet")
    known = isinstance(family, str) and family in FAMILIES
    require(known, "family", f"there is no model family {family!r}{suggestion(str(family), FAMILIES)}")
    if family not in _MADE_OF_ANOTHER or "network" not in table:
        return decode(FAMILIES[family], table)
    network = located("network", decode_model, table.pop("network"))
    plain: Any = decode(FAMILIES[family], table)
    return replace(plain, network=network)  # type: ignore[no-any-return]


def factories(spec: ModelSpec) -> frozenset[str]:
    """The functions of the user's own that building this model would call."""
    if isinstance(spec, CustomModel):
        return frozenset({spec.factory})
    return factories(spec.network) if isinstance(spec, CommonNetwork | SeparateNetworks) else frozenset()


def without_weights(spec: ModelSpec) -> ModelSpec:
    """The same network, to be filled with weights that come from elsewhere."""
    if isinstance(spec, TimmNetwork | TransformersNetwork):
        return replace(spec, weights=None, weights_sha256=None)
    if isinstance(spec, CommonNetwork | SeparateNetworks):
        return replace(spec, network=without_weights(spec.network))
    return spec


def _require_exits(found: int, num_exits: int, key: str) -> None:
    problem = f"the model has {found} exits, but no node stands at exit {found}"
    require(found <= num_exits, key, problem)
    problem = f"the deepest node stands at exit {num_exits}, but the model has only {found} exits"
    require(found >= num_exits, key, problem)


def _resolved_heads(given: HeadKind | tuple[HeadKind, ...], num_exits: int) -> tuple[HeadKind, ...]:
    grid: HeadKind = "grid"
    heads = (given,) * num_exits if isinstance(given, str) else given or (*(grid,) * (num_exits - 1), "gap")
    require(len(heads) == num_exits, "heads", f"one for each of the {num_exits} exits, got {list(heads)}")
    return heads


def _check_widths(widths: tuple[float, ...]) -> None:
    rising = not widths or (list(widths) == sorted(set(widths)) and widths[0] > 0 and widths[-1] == 1)
    require(rising, "widths", f"must rise, from above 0 to 1; got {list(widths)}")


def _resolved_widths(given: tuple[float, ...], num_exits: int) -> tuple[float, ...]:
    widths = given or tuple(exit / num_exits for exit in range(1, num_exits + 1))
    _require_exits(len(widths), num_exits, "widths")
    return widths
