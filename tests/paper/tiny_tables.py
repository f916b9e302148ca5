"""`python -m paper reproduce` on a table that takes seconds: the embedded digits in place of CIFAR, a tiny network.

As a program: python -m tests.paper.tiny_tables ROUNDS reproduce tiny --out DIR
"""

from __future__ import annotations

import signal
import sys
from dataclasses import replace

from exitflow.data.sources import load_dataset
from exitflow.system.system import System, load_system
from paper import tables
from paper.tables import Row, Table
from tests.small import TINY

ROWS = tuple(Row(name, name) for name in ("equal-weight", "flops-prop", "serving-rate"))
TABLE = Table("tiny", "A tiny table", ROWS, settings=("80-15-5", "33-33-33"), published="table1-equal-partition")
SHORT = (
    "training.optimiser.momentum_between_rounds=reset",
    "training.schedule.warmup_rounds=0",
    "training.learning_rate=0.1",
)
DISTINCT = 3  # of 6 cells: serving-rate at 33-33-33 is equal-weight, which does not depend on the setting


def tiny(rounds: int):
    """`load_system` for cells: the same tree and setting, but of digits."""

    def load(source: str, overrides=()) -> System:
        own = [each for each in overrides if not each.startswith("model.")]
        source = source.replace("-cifar100", "").replace("-cifar10", "")
        return load_system(source, [*own, *TINY, *SHORT, f"training.rounds={rounds}"])

    return load


def patch(setattr, rounds: int) -> None:
    """`setattr` is that of a monkeypatch, or the built-in one."""
    setattr(tables, "load_system", tiny(rounds))
    setattr(tables, "TABLES", {"tiny": TABLE, "only": replace(TABLE, name="only", datasets=("cifar10",))})
    from paper import reproduction

    setattr(reproduction, "load_dataset", lambda name, *, data_dir=None: load_dataset("digits"))


if __name__ == "__main__":
    from paper.__main__ import main

    signal.signal(signal.SIGINT, signal.default_int_handler)  # which background jobs ignore
    patch(setattr, int(sys.argv[1]))
    main(sys.argv[2:])
