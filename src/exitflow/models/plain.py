"""Networks that hold no smaller ones, under the same contract: the ends between which nesting lies.

common: every node trains and answers with one and the same network, as federated learning usually has it.
separate: every exit has a network of its own, which shares nothing with the others.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

from torch import Tensor, nn

from exitflow.models.nested import Coverage, NestedModel


class PlainNetworks(NestedModel):
    """Exit e is the network `owners[e]`, whole; exits of one owner are the same."""

    def __init__(self, networks: Mapping[int, nn.Module], owners: Mapping[int, int]) -> None:
        super().__init__()
        self.num_exits = max(owners)
        self.owners = dict(owners)
        self.networks = nn.ModuleDict({str(owner): network for owner, network in networks.items()})

    def advance(self, carry: Tensor, start: int, stop: int) -> Tensor:
        """The input stays the input."""
        return carry

    def classify(self, carry: Tensor, exit: int) -> Tensor:
        """The network of this exit, from the input on."""
        logits: tuple[Tensor, ...] = self.networks[str(self.owners[exit])](carry)
        return logits[0]

    def forward(self, inputs: Tensor, *exits: int) -> tuple[Tensor, ...]:
        """(B, C) logits of each of `exits`, or of all; exits of one owner are computed once."""
        wanted = exits or tuple(self.owners)
        logits = {owner: self.networks[str(owner)](inputs)[0] for owner in {self.owners[exit] for exit in wanted}}
        return tuple(logits[self.owners[exit]] for exit in wanted)

    def coverage(self, *exits: int) -> Coverage:
        """The whole networks that these exits belong to."""
        covered = tuple(f"networks.{self.owners[exit]}." for exit in exits)
        return {name: () for name in self.state_dict() if name.startswith(covered)}

    def submodel(self, *exits: int) -> nn.Module:
        """Their networks; shares no tensor with this model."""
        owners = {exit: self.owners[exit] for exit in exits}
        networks = {owner: self.networks[str(owner)] for owner in sorted(set(owners.values()))}
        return copy.deepcopy(PlainNetworks(networks, owners))
