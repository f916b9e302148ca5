"""Residual networks nested in width, and in depth and width.

slim-resnet: the residual network of `early_exit_resnet`, of which exit e has the first `widths[e]` of the channels of
every layer, and one head for all (FjORD, Horvath et al., 2021; HeteroFL, Diao et al., 2021).

depth-width: exit e also ends behind an earlier block, with a head of its own (ScaleFL, Ilhan et al., 2023). Exit e
has the width of e all the way, also in the stages that deeper exits pass at theirs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from exitflow.models.early_exit_resnet import Subsample, check_images, head_cells
from exitflow.models.slim import Channels, SlimConv, SlimHead, SlimNetwork, SlimNorm
from exitflow.models.specs import DepthWidthResNet, SlimResNet


def build_slim(spec: SlimResNet, input_shape: tuple[int, ...], num_classes: int) -> SlimNetwork:
    """One trunk of all blocks and one head, for inputs of (C, H, W)."""
    num_exits = len(spec.widths)
    return _build(spec, (spec.num_blocks,) * num_exits, (spec.head,) * num_exits, input_shape, num_classes)


def build_depth_width(spec: DepthWidthResNet, input_shape: tuple[int, ...], num_classes: int) -> SlimNetwork:
    """A stage and a head for every exit, for inputs of (C, H, W)."""
    return _build(spec, spec.exit_blocks, tuple(spec.heads), input_shape, num_classes)


def _build(
    spec: SlimResNet | DepthWidthResNet,
    exit_blocks: Sequence[int],
    heads: Sequence[str],
    input_shape: tuple[int, ...],
    num_classes: int,
) -> SlimNetwork:
    check_images(spec.family, input_shape)
    ends = sorted(set(exit_blocks))  # the block behind which each stage of the network ends
    depths = {exit: ends.index(block) + 1 for exit, block in enumerate(exit_blocks, start=1)}
    rates = dict(enumerate(spec.widths, start=1)) if spec.scaler else {}

    def channels(count: int, block: int) -> Channels:
        """How many channels each exit that passes this block has there."""
        shares = enumerate(zip(spec.widths, exit_blocks, strict=True), start=1)
        return {exit: num_channels(share, count) for exit, (share, end) in shares if end >= block}

    stages: dict[int, nn.Module] = {}
    network_heads: dict[int, nn.Module] = {}
    stem = channels(spec.width, 1)
    pending: list[nn.Module] = [_Stem(dict.fromkeys(stem, input_shape[0]), stem, spec.stem_stride, rates)]
    size, before = -(-min(input_shape[1:]) // spec.stem_stride), spec.width
    for number, (count, stride) in enumerate(spec.block_shapes(), start=1):
        inputs, outputs = channels(before, number), channels(count, number)
        pending.append(_SlimBlock(inputs, outputs, stride, rates, project=stride != 1 or before != count))
        size, before = -(-size // stride), count
        if number in ends:
            stage = ends.index(number) + 1
            answering = {exit: outputs[exit] for exit, depth in depths.items() if depth == stage}
            kind = heads[min(answering) - 1]
            stages[stage] = _InTurn(pending)
            network_heads[stage] = SlimHead(answering, head_cells(kind, size), num_classes)
            pending = []
    return SlimNetwork(stages, network_heads, depths)


def num_channels(share: float, count: int) -> int:
    """`share` of `count`, rounded up, as FjORD and HeteroFL do."""
    return max(1, math.ceil(share * count - 1e-9))


class _InTurn(nn.Sequential):
    """One after the other, all at the width of the exit."""

    def forward(self, features: Tensor, exit: int) -> Tensor:  # type: ignore[override]
        for module in self:
            features = module(features, exit)
        return features

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__(*modules)


class _Stem(nn.Module):
    def __init__(self, inputs: Channels, channels: Channels, stride: int, rates: Mapping[int, float]) -> None:
        super().__init__()
        self.conv, self.norm = SlimConv(inputs, channels, 3, stride, rates=rates), SlimNorm(channels)

    def forward(self, features: Tensor, exit: int) -> Tensor:
        return F.relu(self.norm(self.conv(features, exit), exit), inplace=True)


class _SlimBlock(nn.Module):
    """Two 3x3 convolutions with batch norm around a shortcut."""

    def __init__(
        self, inputs: Channels, channels: Channels, stride: int, rates: Mapping[int, float], *, project: bool
    ) -> None:
        super().__init__()
        self.conv1, self.norm1 = SlimConv(inputs, channels, 3, stride, rates=rates), SlimNorm(channels)
        self.conv2, self.norm2 = SlimConv(channels, channels, 3, rates=rates), SlimNorm(channels)
        self.subsample = Subsample(stride)
        self.projection = SlimConv(inputs, channels, 1, rates=rates) if project else None
        self.projection_norm = SlimNorm(channels) if project else None

    def forward(self, features: Tensor, exit: int) -> Tensor:
        """(B, in, H, W) -> (B, out, H / stride, W / stride)."""
        out = F.relu(self.norm1(self.conv1(features, exit), exit), inplace=True)
        out = self.norm2(self.conv2(out, exit), exit)
        if self.projection is not None and self.projection_norm is not None:
            features = self.projection_norm(self.projection(self.subsample(features), exit), exit)
        return F.relu(out + features, inplace=True)
