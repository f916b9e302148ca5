"""What a system will do, before anything is trained: plan and explain."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from exitflow.cli.options import (
    as_overrides,
    backend_option,
    data_dir_option,
    json_option,
    print_json,
    set_option,
    workers_option,
)
from exitflow.config import require
from exitflow.report.terminal import amount, milliseconds, percent, print_table, rate

if TYPE_CHECKING:
    from exitflow.planning.measured import MeasuredPlan
    from exitflow.planning.timing import Timing
    from exitflow.runs.explanation import Explanation
    from exitflow.system.system import System
    from exitflow.topology.graph import Topology
    from exitflow.topology.rates import ServingPlan


@click.command(short_help="The rates at every node and exit of SYSTEM.")
@click.argument("system")
@click.option("--run", metavar="RUN", help="Send up only what gains by it, as the exits of this run answer.")
@click.option(
    "--price",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="SHARE",
    help="With --run: right answers that each request sent up must gain, such as 0.02.",
)
@data_dir_option
@set_option
@json_option
def plan(
    system: str, run: str | None, price: float, data_dir: str | None, overrides: tuple[str, ...], as_json: bool
) -> None:
    """The rates that will flow through every node and exit of SYSTEM.

    Every node sends up as much as its links allow, because deeper exits answer better. With --run that is measured:
    from what the exits of a trained run say to validation data, a request goes up only where it gains by it.

    \b
    Example:
      exitflow plan paper-7:60-30-10
      exitflow plan campus.toml --json
      exitflow plan campus.toml --run runs/campus --price 0.01
    """
    from exitflow.system.system import load_system
    from exitflow.topology.rates import serving_plan

    loaded = load_system(system, overrides)
    found = None
    topology = loaded.topology
    if run is None:
        require(price == 0, "--price", "is for plans from measured answers: add --run RUN")
    else:
        found = _measured(loaded, run, price, data_dir)
        topology = found.topology
    rates = serving_plan(topology)
    timed = _timed(topology, rates)
    if as_json:
        measured = {"measured": found.to_json()} if found else {}
        print_json({"name": loaded.name, **rates.to_json(), **measured, **({"time": timed.to_json()} if timed else {})})
        return
    _print_plan(loaded.name, rates)
    if timed:
        _print_timing(timed)
    if found:
        click.echo(f"On the validation data of {run} {percent(found.accuracy)} % are answered right,")
        click.echo(f"and {percent(found.p2_accuracy)} % where every node sends up all that its links allow.")


def _measured(system: System, run: str, price: float, data_dir: str | None) -> MeasuredPlan:
    """The plan for `system` from what the exits of `run` say."""
    from exitflow.cli.options import dataset_for
    from exitflow.planning.measured import measured_plan
    from exitflow.runs.runs import Run

    opened = Run(run)
    there, needed = opened.system.topology.num_exits, system.topology.num_exits
    require(there == needed, "--run", f"the system has {needed} exits, the run {run} was trained with {there}")
    return measured_plan(opened.validation_outputs(dataset_for(opened, data_dir)), system.topology, price=price)


def _timed(topology: Topology, rates: ServingPlan) -> Timing | None:
    """What the plan means in time, bytes and money, where the system says anything of these."""
    from exitflow.planning.timing import is_timed, timing

    if not is_timed(topology):
        return None
    found = timing(topology, rates)
    where, busy = found.bottleneck
    problem = f"{where} would have to work {percent(busy)} % of the time, so its queue grows without end"
    require(found.latency is not None, "plan", f"{problem}; give it less, or more of what it lacks")
    return found


def _print_timing(found: Timing) -> None:
    rows = [
        [name, *(milliseconds(value) for value in ((each.p50, each.p90, each.p99) if each else (None,) * 3))]
        for name, each in [
            *((f"exit {exit}", each) for exit, each in enumerate(found.exit_latency, start=1)),
            ("all requests", found.latency),
        ]
    ]
    print_table("Until an answer is back: milliseconds", ["", "p50", "p90", "p99"], rows)
    busy = [[name, percent(value), "-"] for name, value in found.utilisation.items()]
    busy += [
        [f"{child} -> {parent}", percent(use.utilisation), amount(use.bytes_per_second)]
        for (child, parent), use in found.links.items()
    ]
    print_table("How busy nodes and links are", ["", "busy %", "bytes/s"], busy)
    where, share = found.bottleneck
    click.echo(f"The bottleneck is {where}, busy {percent(share)} % of the time.")
    if found.cost_per_million:
        click.echo(f"A million requests cost {found.cost_per_million:,.2f}.")


def _print_plan(name: str, rates: ServingPlan) -> None:
    rows = [
        [name, str(node.exit)]
        + [rate(value) for value in (node.arrival_rate, node.received_rate, node.serve_rate, node.transfer_rate)]
        + [percent(node.serve_fraction), ", ".join(f"{parent} {rate(sent)}" for parent, sent in node.parents.items())]
        for name, node in rates.nodes.items()
    ]
    columns = ["node", "exit", "arriving", "received", "served", "sent up", "served %", "to"]
    print_table(f"{name}: requests/s at every node", columns, rows)
    exits = enumerate(zip(rates.exit_serve_rate, rates.exit_share, strict=True), start=1)
    exit_rows = [[str(exit), rate(served), percent(share)] for exit, (served, share) in exits]
    print_table("Served by every exit", ["exit", "requests/s", "share %"], exit_rows)


@click.command(short_help="What each weighting costs, error by error.")
@click.argument("system")
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
    overrides: tuple[str, ...],
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
    from exitflow.runs import explanation
    from exitflow.system.system import load_system

    loaded = load_system(system, as_overrides(data_dir=data_dir, overrides=overrides))
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
    print_table(title, ["weighting", *exits, *errors], rows)
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
    if "adaptive" in result.weights:
        yield "adaptive begins with these weights, and follows the errors on validation data."


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
