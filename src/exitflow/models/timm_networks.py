"""Classifiers of timm, cut into stages behind their blocks.

timm knows what in a network is a block (`group_matcher`), and computes every network in two steps, `forward_features`
and `forward_head`. What stands before the first block is the network itself with everything from the first block on
taken out; the head of the deepest exit is the network with everything before `forward_head` taken out. In between
stand the blocks, one after the other. Whether that is the same network is not believed but computed: where the cut
network answers otherwise than timm's own, or cannot be computed at all, its blocks stand in no one sequence.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from exitflow.errors import ConfigError, MissingExtraError, suggestion
from exitflow.models.backbones import TimmNetwork
from exitflow.models.cutting import exit_network, silent, stage_bounds
from exitflow.models.nested import EarlyExitNetwork
from exitflow.models.torchvision_operators import with_operators
from exitflow.models.weights import check_names, named_as, read_weights

_TOLERANCE = 1e-4  # of the largest logit, between timm's own answer and that of the cut network


def import_timm() -> Any:
    """The package timm, or one sentence on how to install it."""
    with_operators()
    try:
        import timm
    except ImportError:
        raise MissingExtraError("timm", "networks") from None
    return timm


def normalisation(spec: TimmNetwork) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of pixels from 0 to 1, as the weights expect them; none without weights."""
    if spec.mean or not spec.weights:
        return spec.mean, spec.std
    config = import_timm().get_pretrained_cfg(spec.name)
    return (tuple(config.mean), tuple(config.std)) if config else ((), ())


def build(spec: TimmNetwork, input_shape: tuple[int, ...], num_classes: int) -> EarlyExitNetwork:
    """The network with its weights, or from PyTorch's current random state, for images of (C, H, W)."""
    if len(input_shape) != 3:
        raise ValueError(f"timm's networks take (C, H, W) images, got {input_shape}")
    assert isinstance(spec.heads, tuple)  # as every resolved one is
    whole = _create(spec, input_shape, num_classes)
    example = torch.linspace(-1, 1, input_shape[0] * input_shape[1] * input_shape[2]).view(1, *input_shape)
    try:
        with torch.no_grad():
            units, blocks, head = _cut(whole, example)
            bounds = stage_bounds(units, blocks, spec.exit_blocks, len(spec.heads) + 1, example)
            network = exit_network(
                [units[start:stop] for start, stop in bounds],
                head,
                example,
                blocks=[units[index] for index in blocks],
                heads=spec.heads,
                num_classes=num_classes,
                num_prefix_tokens=getattr(whole, "num_prefix_tokens", 0),
                channels_last=getattr(whole, "output_fmt", "") == "NHWC",
            )
    except ConfigError:
        raise
    except Exception as error:
        raise _not_in_sequence(spec.name, f"{type(error).__name__}: {error}") from None
    _check_same(spec.name, whole, network, example)
    return network


def _create(spec: TimmNetwork, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    timm = import_timm()
    if spec.name not in timm.list_models():
        problem = f"timm has no network {spec.name!r}{suggestion(spec.name, timm.list_models())}"
        raise ConfigError(problem, key="model.name")
    config = timm.get_pretrained_cfg(spec.name)
    sized = {"img_size": input_shape[1:]} if config and config.fixed_input_size else {}
    options: dict[str, Any] = {"in_chans": input_shape[0], "num_classes": num_classes, **sized}
    try:
        if not spec.weights:
            return timm.create_model(spec.name, **options)  # type: ignore[no-any-return]
        return _with_weights(timm, spec, options)
    except (ValueError, RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"timm cannot make {spec.name!r} for {input_shape}: {reason}", key="model") from None


def _with_weights(timm: Any, spec: TimmNetwork, options: dict[str, Any]) -> nn.Module:
    """timm fits weights to another size or number of channels of images, where it knows how to."""
    assert spec.weights
    given = read_weights(Path(spec.weights), spec.weights_sha256)
    original = timm.create_model(spec.name)
    own = original.state_dict()
    given = named_as(own, given)
    classifier = original.pretrained_cfg.get("classifier") or "classifier"
    classifiers = (classifier,) if isinstance(classifier, str) else tuple(classifier)
    check_names(own, given, source=spec.weights, but=tuple(f"{name}." for name in classifiers))
    fitting = {name: given.get(name, tensor) for name, tensor in own.items()}
    fitting |= {name: own[name] for name, tensor in fitting.items() if tensor.shape != own[name].shape}
    overlay = {"state_dict": fitting, "num_classes": original.num_classes}
    network: nn.Module = timm.create_model(spec.name, pretrained=True, pretrained_cfg_overlay=overlay, **options)
    if options["num_classes"] != original.num_classes:
        for name in classifiers:
            if isinstance(layer := network.get_submodule(name), nn.Linear):
                silent(layer)
    return network


def _cut(whole: nn.Module, example: Tensor) -> tuple[list[nn.Module], list[int], nn.Module]:
    """(what is computed one after the other, which of it are blocks, what answers at the end)."""
    whole.eval()
    names = _block_names(whole)
    called = _called(whole, example)
    holding = [index for index, name in enumerate(called) if any(block.startswith(name + ".") for block in names)]
    if not holding:
        raise ValueError("it has no blocks that can be told apart")
    first, last = holding[0], holding[-1]
    opened = (_opened(name, whole.get_submodule(name), names) for name in called[first : last + 1])
    blocks = list(chain.from_iterable(opened))
    stem = _Features(_without(whole, [name for name, _ in whole.named_children() if name not in called[:first]]))
    tail = [whole.get_submodule(name) for name in called[last + 1 :]]
    head = _Head(_without(whole, called, parameters=True))
    units = [stem, *(module for _, module in blocks), *tail]
    return units, [index for index, (path, _) in enumerate(blocks, start=1) if path in names], head


def _block_names(network: Any) -> set[str]:
    """The modules that timm counts as blocks."""
    patterns = network.group_matcher(coarse=False)["blocks"]
    listed = [(patterns, None)] if isinstance(patterns, str) else patterns
    compiled = [re.compile(pattern) for pattern, fixed in listed if fixed is None]
    return {name for name, _ in network.named_modules() if any(each.fullmatch(name) for each in compiled)}


def _called(network: Any, example: Tensor) -> list[str]:
    """The children that `forward_features` calls, in that order."""
    called: list[str] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, __, name=name: called.append(name))
        for child, container in network.named_children()
        for name, module in [(child, container), *((child, each) for each in container.children())]
    ]
    network.forward_features(example)
    for hook in hooks:
        hook.remove()
    return list(dict.fromkeys(called))


def _opened(path: str, module: nn.Module, blocks: set[str]) -> list[tuple[str, nn.Module]]:
    """The module, or, where there are blocks inside of it, what it consists of."""
    if path in blocks or not any(block.startswith(path + ".") for block in blocks):
        return [(path, module)]
    return [unit for name, child in module.named_children() for unit in _opened(f"{path}.{name}", child, blocks)]


def _without(network: nn.Module, names: Sequence[str], *, parameters: bool = False) -> Any:
    """A copy in which these children do nothing, and, where asked for, which has no parameters of its own."""
    emptied = {name: network.get_submodule(name) for name in names}
    memo = {id(module): nn.Sequential() for module in emptied.values()}
    shell = copy.deepcopy(network, dict(memo))
    if parameters:
        shell._parameters.clear()
        shell._buffers.clear()
    return shell


class _Features(nn.Module):
    """What a network whose blocks were taken out does before them."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Tensor) -> Tensor:
        features: Tensor = self.network.forward_features(inputs)
        return features


class _Head(nn.Module):
    """What a network does behind its features."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.network.forward_head(features)
        return logits


def _check_same(name: str, whole: nn.Module, network: EarlyExitNetwork, example: Tensor) -> None:
    network.eval()
    with torch.no_grad():
        try:
            expected = whole.eval()(example)
            found = network.classify(network.advance(example, 0, network.num_exits), network.num_exits)
            tolerance = _TOLERANCE * float(expected.abs().max().clamp(min=1e-6))
            same = torch.allclose(found, expected, rtol=0, atol=tolerance)
        except Exception as error:
            raise _not_in_sequence(name, f"{type(error).__name__}: {error}") from None
    if not same:
        raise _not_in_sequence(name, "cut behind its blocks, it answers otherwise")


def _not_in_sequence(name: str, reason: str) -> ConfigError:
    problem = f"the blocks of {name!r} do not stand in one sequence, so no exit can stand between them"
    return ConfigError(f"{problem} ({reason.splitlines()[0]})", key="model.name")
