"""What of a network is trained. That, and nothing else, is the state of a training, and travels.

A parameter is trained unless it asks for no gradient. Parts of which no parameter is trained are frozen as a whole:
they stay in evaluation mode, so that batch norm keeps its statistics and dropout lets everything pass, and their
buffers are no part of the state either.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn


def trained_parameters(network: nn.Module) -> dict[str, nn.Parameter]:
    """Those that ask for gradients."""
    return {name: param for name, param in network.named_parameters() if param.requires_grad}


def trained_buffers(network: nn.Module) -> dict[str, Tensor]:
    """Those that are saved with the network, but for the ones of frozen parts."""
    frozen = tuple(f"{name}." for name, _ in frozen_parts(network))
    saved = network.state_dict().keys()
    return {name: buffer for name, buffer in network.named_buffers() if name in saved and not name.startswith(frozen)}


def trained_tensors(network: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers together."""
    return {**trained_parameters(network), **trained_buffers(network)}


def frozen_parts(network: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that have parameters, none of which is trained."""
    for name, module in network.named_modules():
        params = list(module.parameters())
        if params and not any(param.requires_grad for param in params):
            yield name, module


def training_mode(network: nn.Module) -> None:
    """Of all but what is frozen."""
    network.train()
    for _, module in frozen_parts(network):
        module.eval()
