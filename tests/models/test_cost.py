"""What an exit costs, against PyTorch's own counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from exitflow.models.build import build_model
from exitflow.models.cost import joint_cost
from exitflow.models.specs import DepthWidthResNet, EarlyExitResNet, SlimResNet

TRUNK = {"width": 4, "blocks": (1, 1, 1), "strides": (1, 2, 1)}
SPECS = [EarlyExitResNet(**TRUNK, heads="grid"), SlimResNet(**TRUNK), DepthWidthResNet(**TRUNK)]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("exits", [(1,), (3,), (1, 2, 3)])
def test_multiply_adds_are_half_the_flops_that_pytorch_counts(spec, exits):
    model = build_model(spec.resolve(3), (3, 8, 8), 5, seed=0)
    submodel = model.submodel(*exits).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        submodel(torch.zeros(1, 3, 8, 8))
    cost = joint_cost(model, exits, (3, 8, 8))
    assert cost.multiply_adds == counter.get_total_flops() // 2 > 0
    assert cost.num_parameters == sum(parameter.numel() for parameter in submodel.parameters())
