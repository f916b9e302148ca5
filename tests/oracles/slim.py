"""A narrow residual network written out with PyTorch's own layers, holding slices of a wide one's weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def channels(share: float, count: int) -> int:
    return math.ceil(round(share * count, 9))


class PlainBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, project: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.projection = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if project else None
        self.projection_norm = nn.BatchNorm2d(outputs) if project else None

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(out + (self.projection_norm(self.projection(x)) if self.projection is not None else x))


class PlainResNet(nn.Module):
    """`share` of the channels of every layer, the first `num_blocks` blocks, pooled to cells x cells."""

    def __init__(self, spec, share: float, num_blocks: int, inputs: int, num_classes: int, cells: int = 1) -> None:
        super().__init__()
        self.cells = cells
        width = channels(share, spec.width)
        self.conv = nn.Conv2d(inputs, width, 3, spec.stem_stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.blocks = nn.ModuleList()
        before, full_before = width, spec.width
        for stage, (count, stage_stride) in enumerate(zip(spec.blocks, spec.strides, strict=True)):
            for index in range(count):
                stride, full = (stage_stride if index == 0 else 1), spec.width * 2**stage
                after = channels(share, full)
                self.blocks.append(PlainBlock(before, after, stride, stride != 1 or full_before != full))
                before, full_before = after, full
        self.blocks = self.blocks[:num_blocks]
        last = self.blocks[-1].conv2.out_channels
        self.linear = nn.Linear(last * cells**2, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x)))
        for block in self.blocks:
            x = block(x)
        return self.linear(F.adaptive_avg_pool2d(x, self.cells).flatten(1))


@torch.no_grad()
def load_slices(plain: PlainResNet, slim, exit: int) -> None:
    """Fill the narrow network from the wide one: the first channels of everything, this exit's statistics."""
    stages = [slim.stages[str(stage)] for stage in range(1, slim.depths[exit] + 1)]
    parts = [module for stage in stages for module in stage]  # the stem, then the blocks
    _convolution(plain.conv, parts[0].conv)
    _norm(plain.norm, parts[0].norm, exit)
    for mine, theirs in zip(plain.blocks, parts[1:], strict=True):
        for name in ("conv1", "conv2", "projection"):
            if getattr(mine, name) is not None:
                _convolution(getattr(mine, name), getattr(theirs, name))
        for name in ("norm1", "norm2", "projection_norm"):
            if getattr(mine, name) is not None:
                _norm(getattr(mine, name), getattr(theirs, name), exit)
    head = slim.heads[str(slim.depths[exit])]
    for label in range(len(head.bias)):
        for feature in range(plain.linear.in_features):
            plain.linear.weight[label, feature] = head.weight[label, feature]
        plain.linear.bias[label] = head.bias[label]


def _convolution(mine: nn.Conv2d, theirs) -> None:
    for output in range(mine.out_channels):
        for given in range(mine.in_channels):
            mine.weight[output, given] = theirs.weight[output, given]


def _norm(mine: nn.BatchNorm2d, theirs, exit: int) -> None:
    for channel in range(mine.num_features):
        mine.weight[channel] = theirs.weight[channel]
        mine.bias[channel] = theirs.bias[channel]
        mine.running_mean[channel] = theirs.statistics[str(exit)].mean[channel]
        mine.running_var[channel] = theirs.statistics[str(exit)].variance[channel]
