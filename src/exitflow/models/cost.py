"""What each exit costs, counted on the network itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from exitflow.models.nested import NestedModel


@dataclass(frozen=True, slots=True)
class ExitCost:
    """Of one exit: what a node that holds it computes for one input, and holds."""

    multiply_adds: int  # of convolutions and matrix products, for one input
    num_parameters: int


def exit_costs(model: NestedModel, input_shape: tuple[int, ...]) -> tuple[ExitCost, ...]:
    """The cost of each exit, the shallowest first, counted while it answers one input."""
    return tuple(joint_cost(model, (exit,), input_shape) for exit in range(1, model.num_exits + 1))


def joint_cost(model: NestedModel, exits: Sequence[int], input_shape: tuple[int, ...]) -> ExitCost:
    """Of several exits that are computed together; of one, its own."""
    submodel = model.submodel(*exits).eval()
    dtype = next(submodel.parameters()).dtype
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        submodel(torch.zeros(1, *input_shape, dtype=dtype))
    num_parameters = sum(parameter.numel() for parameter in submodel.parameters())
    return ExitCost(counter.get_total_flops() // 2, num_parameters)
