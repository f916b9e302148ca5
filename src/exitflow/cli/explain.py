"""Why a system trains as it does: explain."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from exitflow.cli.completion import SYSTEM
from exitflow.cli.options import (
    as_overrides,
    backend_option,
    data_dir_option,
    json_option,
    print_json,
    set_option,
    workers_option,
)
from exitflow.cli.program import Command
from exitflow.report.terminal import percent, print_table, waiting

if TYPE_CHECKING:
    from exitflow.runs.explanation import Explanation

_FOLDED = {"generalisation": "general-\nisation"}  # or a table with three exits would not fit 80 columns


@click.command(cls=Command, short_help="What each weighting costs, error by error.")
@click.argument("system", type=SYSTEM)
@backend_option
@workers_option
@data_dir_option
@set_option
@json_option
def explain(
    system: str,
    backend: str,
    workers: int | None,
    data_dir: str | None,
    overrides: dict[str, Any],
    as_json: bool,
) -> None:
    """Why one weighting and not another: weights in the last round of SYSTEM, and their cost by the error bound.

    Measures the gradients at the initial model, and fills the paper's error bound with them. The errors are in units
    of the loss; docs/theory.md says what is measured and what is estimated.

    \b
    Example:
      exitflow explain campus.toml
      exitflow explain paper-7:5-15-80 --set training.rounds=5 --json
    """
    from exitflow.system.system import load_system

    loaded = load_system(system, as_overrides(data_dir=data_dir, overrides=overrides))
    with waiting(f"Measuring the gradients of {len(loaded.topology.nodes):,} nodes, before any training"):
        from exitflow.runs import explanation

        result = explanation.explain(loaded, backend=backend, workers=workers)
    if as_json:
        print_json(result.to_json())
        return
    exits = [f"exit {exit}" for exit in range(1, loaded.topology.num_exits + 1)]
    errors = ("generalisation", "bias", "noise", "sampling", "total")
    rows = [
        [
            f"{name} *" if name == result.weighting else name,
            *(percent(weight) for weight in weights),
            *(f"{terms.to_json()[error]:.3f}" for error in errors),
        ]
        for (name, weights), terms in zip(result.weights.items(), result.terms.values(), strict=True)
    ]
    most = max(inputs.loss_bound for inputs in result.inputs.values())
    title = f"{loaded.name}: weights in %, and what they cost by the error bound, {most:.2f} each at most"
    print_table(title, ["weighting", *exits, *(_FOLDED.get(error, error) for error in errors)], rows)
    if len(result.weights) > 1:
        click.echo(f"Least in total: {result.cheapest}. {_why(result)}")
    for note in _notes(result):
        click.echo(note)


def _notes(result: Explanation) -> Iterator[str]:
    from exitflow.federated.weighting import WEIGHTINGS

    yield "* what this system trains with."
    if result.weighting == "auto" != result.cheapest:
        yield "The bound is not why auto is the default: accuracy as served in trainings is (docs/results.md)."
    if left_out := [name for name in WEIGHTINGS if name not in result.weights]:
        reason = f": {result.why_left_out}" if result.why_left_out else ""
        yield f"Left out, because this system cannot be trained under them: {', '.join(left_out)}{reason}."


def _why(result: Explanation) -> str:
    """What the other weightings pay for."""
    best = result.terms[result.cheapest].to_json()
    worst = {
        error: max(terms.to_json()[error] for terms in result.terms.values()) - best[error]
        for error in ("generalisation", "bias", "noise", "sampling")
    }
    error = max(worst, key=worst.__getitem__)
    if worst[error] < 1e-3:
        return "The errors hardly tell the weightings apart."
    return f"What tells the others apart most is {error}: up to {worst[error]:.3f} more."
