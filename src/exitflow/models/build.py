"""From a specification to a network."""

from __future__ import annotations

import torch

from exitflow.models import early_exit_resnet
from exitflow.models.nested import NestedModel
from exitflow.models.specs import ModelSpec

_BUILDERS = {"early-exit-resnet": early_exit_resnet.build}


def build_model(spec: ModelSpec, input_shape: tuple[int, ...], num_classes: int, *, seed: int) -> NestedModel:
    """The network that `spec` describes, its initial weights determined by `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _BUILDERS[spec.family](spec, input_shape, num_classes)
