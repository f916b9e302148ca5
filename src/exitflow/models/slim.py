"""Networks nested in width: exit e computes with the first channels of every layer (ordered dropout).

A slim layer knows how many channels each exit has, and cuts its tensors to the exit that it is asked for. The scale
and shift of a batch norm are cut like all weights, but its running statistics are not: the channels of a narrow
network see fewer inputs, so their mean and variance are others. Every exit has statistics of its own, as FjORD's and
HeteroFL's networks do (the "static" batch norm of the latter keeps them out of training and measures them for each
width). They are small, and no two exits share them.

What goes up the hierarchy is the input: the features of a narrow network are no use to a wider one.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from exitflow.models.nested import Coverage, NestedModel

Channels = Mapping[int, int]  # exit -> channels; only of the exits that come by


class SlimLayer(nn.Module, ABC):
    """A layer that some exits compute with, each with a part of it."""

    channels: Channels

    @abstractmethod
    def part(self, *exits: int) -> Coverage:
        """The parts of its own tensors with which these exits compute."""

    @torch.no_grad()
    def narrow(self, *exits: int) -> None:
        """Let go of what none of these exits computes with."""
        part = self.part(*exits)
        for name, parameter in list(self.named_parameters(recurse=False)):
            setattr(self, name, nn.Parameter(parameter[part[name]].clone()))
        self.channels = {exit: count for exit, count in self.channels.items() if exit in exits}

    def _widest(self, exits: Sequence[int]) -> slice:
        return slice(0, max(self.channels[exit] for exit in exits))


class SlimConv(SlimLayer):
    """A square convolution without bias. `rates` divide what an exit computes: HeteroFL's scaler."""

    def __init__(
        self,
        inputs: Channels,
        channels: Channels,
        kernel: int,
        stride: int = 1,
        *,
        rates: Mapping[int, float] | None = None,
    ) -> None:
        super().__init__()
        self.inputs, self.channels, self.stride, self.rates = inputs, channels, stride, rates or {}
        self.weight = nn.Parameter(torch.empty(max(channels.values()), max(inputs.values()), kernel, kernel))
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")

    def part(self, *exits: int) -> Coverage:
        """The first output and input channels."""
        return {"weight": (self._widest(exits), slice(0, max(self.inputs[exit] for exit in exits)))}

    def forward(self, features: Tensor, exit: int) -> Tensor:
        """(B, in, H, W) -> (B, out, H / stride, W / stride)."""
        weight = self.weight[: self.channels[exit], : self.inputs[exit]]
        features = F.conv2d(features, weight, stride=self.stride, padding=weight.shape[2] // 2)
        rate = self.rates.get(exit, 1.0)
        return features if rate == 1.0 else features / rate


class SlimNorm(SlimLayer):
    """Batch norm: scale and shift are cut, the running statistics are each exit's own."""

    def __init__(self, channels: Channels) -> None:
        super().__init__()
        self.channels = channels
        self.weight = nn.Parameter(torch.ones(max(channels.values())))
        self.bias = nn.Parameter(torch.zeros(max(channels.values())))
        self.statistics = nn.ModuleDict({str(exit): _Statistics(count) for exit, count in channels.items()})

    def part(self, *exits: int) -> Coverage:
        """The first channels, and the statistics of these exits."""
        widest = (self._widest(exits),)
        statistics = {f"statistics.{exit}.{name}": () for exit in exits for name in ("mean", "variance")}
        return {"weight": widest, "bias": widest, **statistics}

    def narrow(self, *exits: int) -> None:
        """The statistics of the others go too."""
        super().narrow(*exits)
        self.statistics = nn.ModuleDict({str(exit): self.statistics[str(exit)] for exit in exits})

    def forward(self, features: Tensor, exit: int) -> Tensor:
        """(B, C, H, W), normalised with the statistics of the batch, or of the exit."""
        own, count = cast("_Statistics", self.statistics[str(exit)]), self.channels[exit]
        weight, bias = self.weight[:count], self.bias[:count]
        return F.batch_norm(features, own.mean, own.variance, weight, bias, self.training)


class _Statistics(nn.Module):
    """The running mean and variance of some channels."""

    mean: Tensor
    variance: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("variance", torch.ones(channels))


class SlimHead(SlimLayer):
    """Pool to cells x cells, then linear: the first channels of all cells."""

    def __init__(self, channels: Channels, cells: int, num_classes: int) -> None:
        super().__init__()
        self.channels, self.cells = {exit: count * cells**2 for exit, count in channels.items()}, cells
        linear = nn.Linear(max(self.channels.values()), num_classes)
        self.weight, self.bias = linear.weight, linear.bias

    def part(self, *exits: int) -> Coverage:
        """The first inputs; every class."""
        return {"weight": (slice(None), self._widest(exits)), "bias": ()}

    def forward(self, features: Tensor, exit: int) -> Tensor:
        """(B, C, H, W) -> (B, classes)."""
        pooled = F.adaptive_avg_pool2d(features, self.cells).flatten(1)
        return F.linear(pooled, self.weight[:, : self.channels[exit]], self.bias)


class SlimNetwork(NestedModel):
    """Stages of slim layers with heads behind them; exit e passes the first `depths[e]` stages at its own width.

    All depths equal: nested in width. Rising depths: nested in depth and width.
    """

    def __init__(self, stages: Mapping[int, nn.Module], heads: Mapping[int, nn.Module], depths: Mapping[int, int]):
        super().__init__()
        self.num_exits = max(depths)
        self.depths = dict(depths)
        self.stages = nn.ModuleDict({str(stage): module for stage, module in stages.items()})
        self.heads = nn.ModuleDict({str(stage): module for stage, module in heads.items()})

    def advance(self, carry: Tensor, start: int, stop: int) -> Tensor:
        """The input stays the input."""
        return carry

    def classify(self, carry: Tensor, exit: int) -> Tensor:
        """The network of this exit, from the input on."""
        for stage in range(1, self.depths[exit] + 1):
            carry = self.stages[str(stage)](carry, exit)
        logits: Tensor = self.heads[str(self.depths[exit])](carry, exit)
        return logits

    def forward(self, inputs: Tensor, *exits: int) -> tuple[Tensor, ...]:
        """(B, C) logits of each of `exits`, or of all."""
        return tuple(self.classify(inputs, exit) for exit in exits or self.depths)

    def coverage(self, *exits: int) -> Coverage:
        """For each layer, the part that is widest among the exits that come by."""
        covered: dict[str, tuple[slice, ...]] = {}
        for name, layer in self._layers():
            if passing := [exit for exit in exits if exit in layer.channels]:
                covered |= {f"{name}.{tensor}": part for tensor, part in layer.part(*passing).items()}
        return covered

    def submodel(self, *exits: int) -> nn.Module:
        """The same network without the channels, stages, heads and statistics that no exit needs."""
        network = copy.deepcopy(self)
        network.depths = {exit: self.depths[exit] for exit in exits}
        deepest = max(network.depths.values())
        network.stages = nn.ModuleDict({str(stage): network.stages[str(stage)] for stage in range(1, deepest + 1)})
        used = sorted(set(network.depths.values()))
        network.heads = nn.ModuleDict({str(stage): network.heads[str(stage)] for stage in used})
        for _, layer in network._layers():
            layer.narrow(*(exit for exit in exits if exit in layer.channels))
        return network

    def _layers(self) -> list[tuple[str, SlimLayer]]:
        return [(name, module) for name, module in self.named_modules() if isinstance(module, SlimLayer)]
