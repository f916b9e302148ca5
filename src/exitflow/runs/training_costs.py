"""What a training took, from its records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from exitflow.runs.records import Record


@dataclass(frozen=True)
class TrainingCosts:
    """What a training took: bytes, multiply-adds and seconds."""

    bytes_sent: int  # over all links, down and up, before any compression of updates
    multiply_adds: int | None  # of the nodes' forward passes; None where the records are older than that count

    @staticmethod
    def of(records: Sequence[Record]) -> TrainingCosts:
        """From the records of the rounds."""
        one_way = sum(sum(record.link_bytes.values()) for record in records)
        counts = [record.multiply_adds for record in records]
        return TrainingCosts(2 * one_way, None if None in counts else sum(count or 0 for count in counts))
