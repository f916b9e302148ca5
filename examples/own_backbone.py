"""A network of your own with exits: any nn.Module cut into stages, and a classifier behind each of them.

Name the function in a system file, or on the command line, and everything works as with the networks that ship:

    PYTHONPATH=examples exitflow train examples/campus.toml --out runs/own \
        --set 'model={family="custom", factory="own_backbone:build"}'
"""

from __future__ import annotations

from torch import nn

from exitflow import EarlyExitNetwork


def build(input_shape: tuple[int, ...], num_classes: int) -> EarlyExitNetwork:
    """A small MobileNet (Howard et al., 2017) for images of (C, H, W), with an exit behind each of its three stages."""
    backbone = nn.Sequential(
        nn.Sequential(separable(input_shape[0], 16), separable(16, 16)),
        nn.Sequential(separable(16, 32, stride=2), separable(32, 32)),
        nn.Sequential(separable(32, 64, stride=2), separable(64, 64)),
    )
    heads = [nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * n, num_classes)) for n in (16, 32, 64)]
    return EarlyExitNetwork(list(backbone), heads)


def separable(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
    """Each channel on its own, then all of them together."""
    return nn.Sequential(
        nn.Conv2d(inputs, inputs, 3, stride, padding=1, groups=inputs, bias=False),
        nn.Conv2d(inputs, outputs, 1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )
