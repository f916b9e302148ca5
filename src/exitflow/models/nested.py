"""The contract of a network that holds smaller ones, and early exits as its general case.

A nested model answers at exits 1..E. Exit e covers some slices of some tensors; a node that trains exit e holds,
computes and sends those and nothing else. What flows up the hierarchy at inference is the `carry`: the features at
an exit for networks nested in depth, the input itself for networks nested in width.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from torch import Tensor, nn

Coverage = Mapping[str, tuple[slice, ...]]  # tensor name -> the slices that an exit covers; (): all of it


class NestedModel(nn.Module, ABC):
    """What training, evaluation and serving know of a network."""

    num_exits: int

    @abstractmethod
    def advance(self, carry: Tensor, start: int, stop: int) -> Tensor:
        """From the carry at exit `start` (0: the input, (B, ...)) to the carry at exit `stop`."""

    @abstractmethod
    def classify(self, carry: Tensor, exit: int) -> Tensor:
        """(B, C) logits of `exit` from the carry at that exit."""

    @abstractmethod
    def coverage(self, *exits: int) -> Coverage:
        """Parameters and buffers that these exits compute with."""

    @abstractmethod
    def submodel(self, *exits: int) -> nn.Module:
        """A module of its own with just the covered slices, under their names.

        Called with inputs, it gives a tuple of (B, C) logits: of each of `exits`, which rise. Called with inputs and
        some of its exits, it computes and gives those alone.
        """


class EarlyExitNetwork(NestedModel):
    """Any network cut into stages, with a classifier behind each: exit e is stages 1..e and head e."""

    def __init__(
        self, stages: Sequence[nn.Module], heads: Sequence[nn.Module], blocks: Sequence[nn.Module] = ()
    ) -> None:
        """`blocks` are the parts of the stages that are counted, such as for `tune = "from:8"`; else the stages are."""
        super().__init__()
        self.blocks = list(blocks or stages)
        if not stages or len(stages) != len(heads):
            raise ValueError(f"every stage needs a head: got {len(stages)} stages and {len(heads)} heads")
        self.num_exits = len(stages)
        self.stages = _numbered(stages)
        self.heads = _numbered(heads)
        for module in self.modules():  # a step counter that nothing reads, and that would be sent every round
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.num_batches_tracked = None

    def advance(self, carry: Tensor, start: int, stop: int) -> Tensor:
        """Through stages start + 1 .. stop."""
        for exit in range(start + 1, stop + 1):
            carry = self.stages[str(exit)](carry)
        return carry

    def classify(self, carry: Tensor, exit: int) -> Tensor:
        """Head `exit` on its features."""
        logits: Tensor = self.heads[str(exit)](carry)
        return logits

    def coverage(self, *exits: int) -> Coverage:
        """Whole tensors: those of the stages up to the deepest of the exits, and of their heads."""
        heads, stages = (f"heads.{exit}." for exit in exits), (f"stages.{stage}." for stage in range(1, max(exits) + 1))
        covered = (*heads, *stages)
        return {name: () for name in self.state_dict() if name.startswith(covered)}

    def submodel(self, *exits: int) -> nn.Module:
        """The prefix up to the deepest of the exits; shares no tensor with this model."""
        return copy.deepcopy(_Prefix(self, exits))


class _Prefix(nn.Module):
    """Stages up to the deepest of some exits, and their heads, under the names that they have in the whole network."""

    def __init__(self, network: EarlyExitNetwork, exits: Sequence[int]) -> None:
        super().__init__()
        self.stages = nn.ModuleDict({str(stage): network.stages[str(stage)] for stage in range(1, max(exits) + 1)})
        self.heads = nn.ModuleDict({str(exit): network.heads[str(exit)] for exit in exits})

    def forward(
        self, features: Tensor, *exits: int, known: Mapping[int, Tensor] = MappingProxyType({})
    ) -> tuple[Tensor, ...]:
        """The logits of `exits`; what is known of the carry at some exits is not computed again."""
        wanted = [str(exit) for exit in exits] or list(self.heads)
        logits = []
        for stage in range(1, int(wanted[-1]) + 1):
            if stage in known:
                features = known[stage]
            elif stage > max(known, default=0):
                features = self.stages[str(stage)](features)
            if str(stage) in wanted:
                logits.append(self.heads[str(stage)](features))
        return tuple(logits)


def _numbered(modules: Sequence[nn.Module]) -> nn.ModuleDict:
    return nn.ModuleDict({str(number): module for number, module in enumerate(modules, start=1)})
