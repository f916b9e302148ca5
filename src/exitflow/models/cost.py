"""What each exit costs, counted on the network itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from exitflow.models.nested import NestedModel


@dataclass(frozen=True, slots=True)
class ExitCost:
    """What a node that holds an exit computes for one input, and how many parameters it holds."""

    multiply_adds: int  # of convolutions and matrix products, for one input
    num_parameters: int


def exit_costs(model: NestedModel, input_shape: tuple[int, ...]) -> tuple[ExitCost, ...]:
    """The cost of each exit, the shallowest first, counted while it answers one input."""
    return tuple(joint_cost(model, (exit,), input_shape) for exit in range(1, model.num_exits + 1))


def joint_cost(model: NestedModel, exits: Sequence[int], input_shape: tuple[int, ...]) -> ExitCost:
    """The cost of several exits that are computed together; of one, its own."""
    submodel = model.submodel(*exits).eval()
    dtype = next(submodel.parameters()).dtype
    multiply_adds, _ = counted(submodel, torch.zeros(1, *input_shape, dtype=dtype))
    num_parameters = sum(parameter.numel() for parameter in submodel.parameters())
    return ExitCost(multiply_adds, num_parameters)


def counted(module: nn.Module, inputs: Tensor) -> tuple[int, Any]:
    """(multiply-adds of convolutions and matrix products, what the module gives)."""
    with _FlopCounter() as counter, torch.no_grad():
        given = module(inputs)
    return counter.total // 2, given


class _FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The total of PyTorch's own FlopCounterMode, which would take seconds to load PyTorch's compiler."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=result)
        return result

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
