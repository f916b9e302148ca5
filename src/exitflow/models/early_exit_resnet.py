"""The paper's family: a residual network with classifiers behind some of its blocks (BranchyNet on He et al., 2016).

A 3x3 stem, then stages of basic blocks, each stage twice as wide as the one before. ResNet-18 has blocks
(2, 2, 2, 2). The strides of the stages are (1, 2, 2, 2) in the usual network for small images and (1, 1, 2, 2) in
the paper's. Exits stand behind residual blocks, counted from 1 over all stages; the last is behind the last block.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from exitflow.models.nested import EarlyExitNetwork
from exitflow.models.specs import EarlyExitResNet

GRID = 4  # the `grid` head pools to GRID x GRID


def build(spec: EarlyExitResNet, input_shape: tuple[int, ...], num_classes: int) -> EarlyExitNetwork:
    """The network, from PyTorch's current random state, for inputs of (C, H, W)."""
    check_images(spec.family, input_shape)
    stages: list[nn.Module] = []
    heads: list[nn.Module] = []
    pending: list[nn.Module] = [_stem(input_shape[0], spec.width, spec.stem_stride)]
    size = -(-min(input_shape[1:]) // spec.stem_stride)
    before = spec.width
    for number, (channels, stride) in enumerate(spec.block_shapes(), start=1):
        pending.append(BasicBlock(before, channels, stride))
        before = channels
        size = -(-size // stride)
        if number in spec.exit_blocks:
            stages.append(nn.Sequential(*pending))
            heads.append(_head(spec.heads[len(heads)], channels, size, num_classes))
            pending = []
    blocks = [module for stage in stages for module in stage.modules() if isinstance(module, BasicBlock)]
    network = EarlyExitNetwork(stages, heads, blocks)
    _initialise(network)
    return network


def check_images(family: str, input_shape: tuple[int, ...]) -> None:
    """Refuse what is no image, or too small for the strides."""
    if len(input_shape) != 3 or min(input_shape[1:]) < 8:
        raise ValueError(f"{family} takes (C, H, W) images from 8x8 up, got {input_shape}")


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch norm around a shortcut."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            projection = nn.Conv2d(in_channels, out_channels, 1, bias=False)
            self.shortcut = nn.Sequential(Subsample(stride), projection, nn.BatchNorm2d(out_channels))

    def forward(self, features: Tensor) -> Tensor:
        """(B, in, H, W) -> (B, out, H / stride, W / stride)."""
        out = F.relu(self.norm1(self.conv1(features)), inplace=True)
        out = self.norm2(self.conv2(out)) + self.shortcut(features)
        return F.relu(out, inplace=True)


class Subsample(nn.Module):
    """Every `stride`-th pixel. Before a 1x1 convolution it is the same as a stride, and safe in every layout."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, features: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H / stride, W / stride)."""
        return features[:, :, :: self.stride, :: self.stride]


def _stem(in_channels: int, width: int, stride: int) -> nn.Module:
    convolution = nn.Conv2d(in_channels, width, 3, stride, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(width), nn.ReLU(inplace=True))


def head_cells(kind: str, size: int) -> int:
    """`gap`: global average pooling, to one cell. `grid`: pool to 4x4, less where the features are smaller."""
    return 1 if kind == "gap" else min(GRID, size)


def _head(kind: str, channels: int, size: int, num_classes: int) -> nn.Module:
    cells = head_cells(kind, size)
    return nn.Sequential(nn.AdaptiveAvgPool2d(cells), nn.Flatten(), nn.Linear(channels * cells**2, num_classes))


def _initialise(network: nn.Module) -> None:
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
