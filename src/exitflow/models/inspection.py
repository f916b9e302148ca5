"""What a network consists of, where exits can stand in it, and what each place costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from exitflow.models.cost import counted
from exitflow.models.nested import EarlyExitNetwork, NestedModel
from exitflow.models.tuning import trained_parameters

_REPEATS = 5  # of which the median counts


@dataclass(frozen=True)
class Place:
    """Behind a block, where an exit can stand. Everything is counted from the input up to here, heads left out."""

    block: int  # from 1
    exit: int | None  # that stands here
    num_parameters: int
    num_trained: int  # of the parameters
    multiply_adds: int  # for one input
    feature_bytes: int  # of one input, in fp32: what would be forwarded from here
    milliseconds: float  # for one input, in PyTorch, on one thread of this machine


@torch.no_grad()
def places(model: NestedModel, input_shape: tuple[int, ...]) -> list[Place]:
    """Behind every block; of networks that are not cut into stages, at every exit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model.eval()
        return list(_places(model, torch.zeros(1, *input_shape)))
    finally:
        torch.set_num_threads(threads)


def _places(model: NestedModel, carry: Tensor) -> Iterator[Place]:
    parameters = trained = spent = 0
    milliseconds = 0.0
    block = 0
    for exit, part, ends_block, ends_stage in _parts(model):
        multiply_adds, given = counted(part, carry)
        spent += multiply_adds
        milliseconds += _measured(part, carry)
        parameters += sum(param.numel() for param in part.parameters())
        trained += sum(param.numel() for param in trained_parameters(part).values())
        carry = given
        block += ends_block
        if ends_block or ends_stage:
            size = carry[0].numel() * carry.element_size()
            yield Place(block, exit if ends_stage else None, parameters, trained, spent, size, milliseconds)


def _parts(model: NestedModel) -> Iterator[tuple[int, nn.Module, bool, bool]]:
    """(exit of its stage, a part, whether a block ends with it, whether the stage does), in computing order."""
    if not isinstance(model, EarlyExitNetwork):
        yield from ((exit, _Advance(model, exit), True, True) for exit in range(1, model.num_exits + 1))
        return
    blocks = {id(block) for block in model.blocks}
    for exit in range(1, model.num_exits + 1):
        stage = model.stages[str(exit)]
        inside = isinstance(stage, nn.Sequential) and id(stage) not in blocks
        units: list[nn.Module] = list(stage.children()) if inside else [stage]
        last_block = max((index for index, unit in enumerate(units) if id(unit) in blocks), default=len(units) - 1)
        for unit in units[:last_block]:
            yield exit, unit, id(unit) in blocks, False
        yield exit, nn.Sequential(*units[last_block:]), True, True


class _Advance(nn.Module):
    """What a network that has no stages of its own computes between two exits."""

    def __init__(self, model: NestedModel, exit: int) -> None:
        super().__init__()
        self.advance: Callable[..., Tensor] = model.advance
        self.exit = exit

    def forward(self, carry: Tensor) -> Tensor:
        return self.advance(carry, self.exit - 1, self.exit)


def _measured(part: nn.Module, carry: Any) -> float:
    durations = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        part(carry)
        durations.append(time.perf_counter() - start)
    return 1000 * statistics.median(durations)
