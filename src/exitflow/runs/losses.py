"""Updates that did not count: whose, in how many rounds, why, and how much of each exit's weight went with them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from exitflow.federated.round_report import NOT_FINITE
from exitflow.runs.records import Record

if TYPE_CHECKING:
    from exitflow.federated.round_report import RoundReport

SHOWN = 5  # nodes that a summary names

log = logging.getLogger("exitflow.runs")


@dataclass(frozen=True)
class TrainingLosses:
    """What a training went without, over all of its rounds."""

    num_rounds: int
    rounds: Mapping[str, int]  # node -> in how many rounds its update did not count
    reasons: Mapping[str, str]  # node -> why, the last time
    forgetful: tuple[str, ...]  # nodes that lost their momentum or residuals, and began anew
    weight: tuple[float, ...]  # of each exit, the share of its weight that was lost, mean over the rounds; () if none

    @staticmethod
    def of(records: Sequence[Record]) -> TrainingLosses:
        """From the records of the rounds."""
        rounds: Counter[str] = Counter()
        reasons: dict[str, str] = {}
        for record in records:
            lost = _lost(record)
            rounds.update(lost.keys())
            reasons |= lost
        shares = [record.lost_weight for record in records if record.lost_weight]
        weight = tuple(sum(column) / len(records) for column in zip(*shares, strict=True))
        forgetful = sorted({node for record in records for node in record.state_lost})
        return TrainingLosses(len(records), dict(rounds.most_common()), reasons, tuple(forgetful), weight)

    def sentences(self) -> list[str]:
        """For people; none where every update counted."""
        nodes = list(self.rounds)
        said = [
            f"Node {node!r} was lost in {self.rounds[node]:,} of {self.num_rounds:,} rounds: {self.reasons[node]}."
            for node in nodes[:SHOWN]
        ]
        if len(nodes) > SHOWN:
            said.append(f"{len(nodes) - SHOWN} more nodes were lost in some rounds; see rounds.jsonl.")
        if any(self.weight):
            shares = (f"{100 * share:.1f} % of exit {exit}" for exit, share in enumerate(self.weight, 1) if share)
            said.append(f"With them went, of the weight of all rounds, {', '.join(shares)}.")
        if self.forgetful:
            said.append(f"Lost the momentum or residuals that they had kept, and began anew: {_names(self.forgetful)}.")
        return said

    def to_json(self) -> dict[str, Any]:
        """What was lost as values that JSON can hold."""
        lost = {node: {"rounds": count, "reason": self.reasons[node]} for node, count in self.rounds.items()}
        return {"lost": lost, "lost_weight": list(self.weight), "state_lost": list(self.forgetful)}


def _lost(record: Record) -> dict[str, str]:
    return {**dict.fromkeys(record.dropped, NOT_FINITE), **record.missing, **record.refused}


def _names(nodes: Sequence[str]) -> str:
    more = f" and {len(nodes) - SHOWN} more" if len(nodes) > SHOWN else ""
    return ", ".join(nodes[:SHOWN]) + more


@dataclass
class LossWatch:
    """Tells the log, round by round, which nodes are lost and which are back."""

    since: dict[str, int] = field(default_factory=dict)  # node that is lost -> the first round without it

    def see(self, report: RoundReport) -> None:
        """Say what has changed since the round before."""
        for task in report.tasks:
            node, reason = task.node, report.lost.get(task.node)
            if reason and node not in self.since:
                self.since[node] = report.round
                log.warning("round %d: node %r is lost: %s", report.round, node, reason)
            elif not reason and node in self.since:
                log.warning("round %d: node %r is back; lost since round %d", report.round, node, self.since.pop(node))
        for node in report.state_lost:
            log.warning("round %d: node %r has lost what it had kept, and begins anew", report.round, node)
