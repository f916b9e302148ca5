"""A run as a small table, which a notebook shows where a run is the last thing in a cell."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from exitflow.runs.runs import Run


def run_html(run: Run) -> str:
    """Where the run lies, what it trains, how far it is, and how accurate it was when it was validated last."""
    training, records = run.system.training, run.records
    rounds = records[-1].round if records else 0
    rows = {
        "system": run.system.name,
        "weighting": training.weighting_name,
        "rounds": f"{rounds:,} of {training.rounds:,}{'' if run.finished else ', not finished'}",
    }
    validated = [(record.round, validation) for record in records if (validation := record.validation)]
    if validated:
        last, validation = validated[-1]
        rows["accuracy as served"] = f"{validation.accuracy:.1%}"
        for exit, accuracy in enumerate(validation.exit_accuracy, start=1):
            rows[f"accuracy of exit {exit}"] = f"{accuracy or 0:.1%}"
        rows["on validation data"] = f"after round {last:,}"
    cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows.items())
    return f"<table><caption>{escape(str(run.path))}</caption>{cells}</table>"
