"""Where the authors' published code departs from their Algorithm 1, as server steps: each alone, and all together.

1. `frozen_heads`: the heads of all exits but the deepest are never aggregated. They stay at their random start, are
   sent out again every round, and the layers below learn to suit them.
2. `times_p`: an update is multiplied by p_{i,e}, where line 12 divides by it.
3. `root_step`: the global model and the root's are one object, so that what only the deepest exit covers takes the
   root's whole step, not the weighted one.

They are here to find out why the paper's figures differ from ours, and nowhere else: name one as
training.server_step = "paper.departures:all_departures".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

from exitflow.federated.aggregation import Aggregation, aggregate
from exitflow.federated.types import ServerState, Update
from exitflow.models.nested import Coverage


@dataclass(frozen=True)
class DepartedAggregation(Aggregation):
    """Line 12 of Algorithm 1, but for what departs from it. Exits must be nested in depth: they cover whole tensors."""

    freezes_heads: bool = False
    multiplies_by_p: bool = False
    takes_root_step: bool = False

    def weight(self, update: Update, exit: int) -> float:
        """Lambda-tilde_e |S_i| / |S_{e,p}|, divided or multiplied by p_{i,e}."""
        p = update.task.probability
        return super().weight(update, exit) * (p * p if self.multiplies_by_p else 1.0)

    def shares(self, update: Update) -> Iterator[tuple[float, Coverage]]:
        """With what weight an update counts, and where."""
        for exit in update.task.exits:
            covered, weight = self.coverage(exit), self.weight(update, exit)
            if self.freezes_heads and exit < self._deepest:
                covered = _without(covered, self._head(exit))
            if self.takes_root_step and exit == self._deepest:
                own = _without(covered, self.coverage(exit - 1))
                yield 1.0, own
                covered = _without(covered, own)
            yield weight, covered

    @property
    def _deepest(self) -> int:
        return len(self.exit_weights)

    def _head(self, exit: int) -> Coverage:
        """What no deeper exit computes with."""
        return _without(self.coverage(exit), self.coverage(exit + 1))


def _without(covered: Coverage, others: Coverage) -> Coverage:
    return {name: part for name, part in covered.items() if name not in others}


def _departed(state: ServerState, updates: Iterable[Update], rule: Aggregation, **departures: Any) -> ServerState:
    known = {field.name: getattr(rule, field.name) for field in fields(Aggregation)} | {"step": "paper"}
    return aggregate(state, updates, DepartedAggregation(**known, **departures))


def frozen_heads(state: ServerState, updates: Iterable[Update], rule: Aggregation) -> ServerState:
    """The heads of all exits but the deepest stay at their random start."""
    return _departed(state, updates, rule, freezes_heads=True)


def times_p(state: ServerState, updates: Iterable[Update], rule: Aggregation) -> ServerState:
    """Updates are multiplied by the probability with which they were asked for."""
    return _departed(state, updates, rule, multiplies_by_p=True)


def root_step(state: ServerState, updates: Iterable[Update], rule: Aggregation) -> ServerState:
    """What only the deepest exit covers takes the root's whole step."""
    return _departed(state, updates, rule, takes_root_step=True)


def all_departures(state: ServerState, updates: Iterable[Update], rule: Aggregation) -> ServerState:
    """All three, as the published code has them."""
    return _departed(state, updates, rule, freezes_heads=True, multiplies_by_p=True, takes_root_step=True)
