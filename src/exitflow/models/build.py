"""From a specification to a network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from exitflow.errors import ConfigError
from exitflow.models import early_exit_resnet, slim_resnet, timm_networks, transformer_networks
from exitflow.models.backbones import TimmNetwork
from exitflow.models.dry_run import check_network
from exitflow.models.nested import NestedModel
from exitflow.models.plain import PlainNetworks
from exitflow.models.specs import CommonNetwork, CustomModel, ModelSpec, SeparateNetworks
from exitflow.models.tuning import tune
from exitflow.parts import load_part

Shape = tuple[int, ...]


def build_model(
    spec: ModelSpec, input_shape: Shape, num_classes: int, *, seed: int, tuned: str = "full"
) -> NestedModel:
    """The network that `spec` describes, its initial weights determined by `seed`, frozen but for what is `tuned`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = _build(spec, input_shape, num_classes)
        tune(network, tuned)
        return network


def _build(spec: ModelSpec, input_shape: Shape, num_classes: int) -> NestedModel:
    return _BUILDERS[spec.family](spec, input_shape, num_classes)


def _common(spec: CommonNetwork, input_shape: Shape, num_classes: int) -> NestedModel:
    nested = _with_exits(spec.network, input_shape, num_classes, spec.exit)
    return PlainNetworks({1: nested.submodel(spec.exit)}, dict.fromkeys(range(1, nested.num_exits + 1), 1))


def _separate(spec: SeparateNetworks, input_shape: Shape, num_classes: int) -> NestedModel:
    """All begin with the same weights, as the nodes of a federation do."""
    nested = _with_exits(spec.network, input_shape, num_classes, max(spec.exits))
    networks = {owner: nested.submodel(exit) for owner, exit in enumerate(spec.exits, start=1)}
    return PlainNetworks(networks, {owner: owner for owner in networks})


def _with_exits(spec: ModelSpec, input_shape: Shape, num_classes: int, deepest: int) -> NestedModel:
    nested = _build(spec, input_shape, num_classes)
    if nested.num_exits < deepest:
        raise ValueError(f"network has {nested.num_exits} exits, and exit {deepest} is asked for")
    return nested


def _custom(spec: CustomModel, input_shape: Shape, num_classes: int) -> NestedModel:
    factory = load_part(spec.factory, key="model.factory")
    try:
        model = factory(input_shape, num_classes)
    except (Exception, SystemExit) as error:
        raise _failed(f"calling {spec.factory!r} with ({input_shape}, {num_classes})", error) from None
    if not isinstance(model, NestedModel):
        problem = f"{spec.factory!r} must give a NestedModel, got {type(model).__name__}"
        raise ConfigError(problem, key="model.factory")
    try:
        check_network(model, input_shape, num_classes)
    except ValueError as error:
        raise ConfigError(f"what {spec.factory!r} gives does not fit: {error}", key="model.factory") from None
    return model


def _failed(what: str, error: BaseException) -> ConfigError:
    return ConfigError(f"{what} failed: {type(error).__name__}: {error}", key="model.factory")


def preparation_of(spec: ModelSpec) -> tuple[int | None, tuple[float, ...], tuple[float, ...]]:
    """(size of images, mean and standard deviation of pixels from 0 to 1) where the model says so; else None, ()."""
    if isinstance(spec, CommonNetwork | SeparateNetworks):
        return preparation_of(spec.network)
    return (spec.image_size, *timm_networks.normalisation(spec)) if isinstance(spec, TimmNetwork) else (None, (), ())


_BUILDERS: dict[str, Callable[[Any, Shape, int], NestedModel]] = {
    "early-exit-resnet": early_exit_resnet.build,
    "slim-resnet": slim_resnet.build_slim,
    "depth-width": slim_resnet.build_depth_width,
    "common": _common,
    "separate": _separate,
    "custom": _custom,
    "timm": timm_networks.build,
    "transformers": transformer_networks.build,
}
