"""What of a network is trained. That, and nothing else, is the state of a training, and travels.

A parameter is trained unless it asks for no gradient. Parts of which no parameter is trained are frozen as a whole:
they stay in evaluation mode, so that batch norm keeps its statistics and dropout lets everything pass, and their
buffers are no part of the state either.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

from torch import Tensor, nn

from exitflow.config import require
from exitflow.errors import MissingExtraError
from exitflow.models.nested import EarlyExitNetwork, NestedModel
from exitflow.models.torchvision_operators import with_operators


def tune(network: NestedModel, how: str) -> None:
    """Freeze what is not to be trained, by `training.tune`; for "lora:N" adapters of rank N are put into the stages."""
    if how == "full":
        return
    problem = f"{how!r} is for networks that are cut into stages; {type(network).__name__} is trained in full"
    require(isinstance(network, EarlyExitNetwork), "training.tune", problem)
    assert isinstance(network, EarlyExitNetwork)
    kind, _, number = how.partition(":")
    if kind == "from":
        problem = f"the network has {len(network.blocks)} blocks, got {how!r}"
        require(int(number) <= len(network.blocks), "training.tune", problem)
        trained = {id(param) for block in network.blocks[int(number) - 1 :] for param in block.parameters()}
        for param in takewhile(lambda param: id(param) not in trained, network.stages.parameters()):
            param.requires_grad_(False)
        return
    network.stages.requires_grad_(False)
    if kind == "lora":
        _add_adapters(network.stages, int(number))


def _add_adapters(stages: nn.Module, rank: int) -> None:
    """Into every linear layer, and every convolution that mixes all its channels."""
    with_operators()
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise MissingExtraError("peft", "networks") from None
    targets = [name for name, module in stages.named_modules() if _takes_adapter(module)]
    require(bool(targets), "training.tune", "no layer of this network can take an adapter")
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=rank, target_modules=targets), stages)


def _takes_adapter(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1)


def merged(network: NestedModel) -> NestedModel:
    """A copy whose adapters are part of the layers that they were put into."""
    network = copy.deepcopy(network)
    adapted: list[tuple[str, Any]] = [item for item in network.named_modules() if hasattr(item[1], "get_base_layer")]
    for name, layer in adapted:
        layer.merge()
        network.set_submodule(name, layer.get_base_layer())
    return network


def trained_parameters(network: nn.Module) -> dict[str, nn.Parameter]:
    """Those that ask for gradients."""
    return {name: param for name, param in network.named_parameters() if param.requires_grad}


def trained_buffers(network: nn.Module) -> dict[str, Tensor]:
    """Those that are saved with the network, but for the ones of frozen parts."""
    frozen = tuple(f"{name}." for name, _ in frozen_parts(network))
    return {name: buffer for name, buffer in saved_tensors(network)[1].items() if not name.startswith(frozen)}


def saved_tensors(network: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(parameters, buffers), trained or not: all that is saved with a network."""
    params, saved = dict[str, Tensor](network.named_parameters()), network.state_dict()
    return params, {name: buffer for name, buffer in network.named_buffers() if name in saved}


def trained_tensors(network: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers that are trained, in one dictionary."""
    return {**trained_parameters(network), **trained_buffers(network)}


def frozen_parts(network: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that have parameters, none of which is trained."""
    for name, module in network.named_modules():
        params = list(module.parameters())
        if params and not any(param.requires_grad for param in params):
            yield name, module


def frozen_exits(network: nn.Module) -> int:
    """How many stages, from the first on, are frozen as a whole, so that their features never change."""
    if not isinstance(network, EarlyExitNetwork):
        return 0
    stages = (network.stages[str(exit)] for exit in range(1, network.num_exits + 1))
    return sum(1 for _ in takewhile(lambda stage: not any(p.requires_grad for p in stage.parameters()), stages))


def training_mode(network: nn.Module) -> None:
    """Switch everything to training that is not frozen, and what is frozen to evaluation."""
    network.train()
    for _, module in frozen_parts(network):
        module.eval()
