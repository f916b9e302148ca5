"""What a system can be expected to do, before or after it is trained: plan and whatif."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from exitflow.cli.completion import FILE, FOLDER, SYSTEM
from exitflow.cli.options import data_dir_option, dataset_for, json_option, print_json, set_option
from exitflow.cli.program import Command
from exitflow.config import require
from exitflow.report.terminal import amount, milliseconds, percent, print_table, progress_bar, rate

if TYPE_CHECKING:
    from exitflow.evaluation.outputs import ExitOutputs
    from exitflow.planning.classes import NodeClasses
    from exitflow.planning.prospects import Prospect
    from exitflow.planning.timing import Timing
    from exitflow.planning.whatif import WhatIf
    from exitflow.runs.runs import Run
    from exitflow.system.system import System
    from exitflow.topology.graph import Node

MOST_PROBLEMS = 5  # that are printed
_RUN = "Send up only what gains by it, as the exits of this run answer."
_run = click.option("--run", type=FOLDER, metavar="RUN", help=_RUN)


@click.command(cls=Command, short_help="The rates at every node and exit of SYSTEM.")
@click.argument("system", type=SYSTEM)
@_run
@click.option(
    "--price",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="SHARE",
    help="With --run: right answers that each request sent up must gain, such as 0.02.",
)
@click.option(
    "--slo", "slos", multiple=True, metavar="MEASURE=BOUND", help="Keep p99=50ms, accuracy=93% or cost=20; repeatable."
)
@click.option("--html", type=FILE, metavar="FILE", help="Draw the plan as a page.")
@data_dir_option
@set_option
@json_option
def plan(
    system: str,
    run: str | None,
    price: float,
    slos: tuple[str, ...],
    html: str | None,
    data_dir: str | None,
    overrides: dict[str, Any],
    as_json: bool,
) -> None:
    """The rates that will flow through every node and exit of SYSTEM.

    Every node sends up as much as its links allow, because deeper exits answer better. With --run that is measured:
    from what the exits of a trained run say to validation data, a request goes up only where it gains by it. With --slo
    it is the plan with the best rest that keeps these bounds: of p50, p90 and p99, of accuracy, or of what a million
    requests cost.

    \b
    Example:
      exitflow plan paper-7:60-30-10
      exitflow plan campus.toml --json
      exitflow plan campus.toml --run runs/campus --price 0.01
      exitflow plan campus.toml --slo p99=50ms --html plan.html
    """
    from exitflow.planning.measured import measured_plan
    from exitflow.planning.prospects import best_kept, parse_objective, prospect
    from exitflow.system.system import load_system

    loaded = load_system(system, overrides)
    objectives = [parse_objective(text) for text in slos]
    outputs = _outputs(run, loaded, data_dir)
    require(run is not None or price == 0, "--price", "is for plans from measured answers: add --run RUN")
    measured = None if outputs is None else measured_plan(outputs, loaded.topology, price=price)
    if objectives:
        found = best_kept(loaded.topology, objectives, outputs, price=price)
    else:
        found = prospect(measured.topology if measured else loaded.topology, outputs)
        _check_stable(found)
    if html:
        from exitflow.report.planning_page import write_plan_page

        write_plan_page(loaded.name, found, Path(html))
    if as_json:
        parts = {"measured": measured and measured.to_json(), "time": found.timing and found.timing.to_json()}
        known = {name: value for name, value in parts.items() if value}
        print_json({"name": loaded.name, **found.plan.to_json(), **known})
        return
    _print_plan(loaded.name, found)
    if measured and found.accuracy is not None:
        click.echo(f"On the validation data of {run} {percent(found.accuracy)} % are answered right,")
        click.echo(f"and {percent(measured.p2_accuracy)} % where every node sends up all that its links allow.")
    for objective in objectives:
        click.echo(f"{objective.text} is kept: {objective.reached(found)}.")
    if html:
        click.echo(f"{html}: written.")


def _outputs(run: str | None, system: System, data_dir: str | None) -> ExitOutputs | None:
    """What the exits of `run` say to validation data, where there is one."""
    if run is None:
        return None
    from exitflow.runs.runs import Run

    opened = Run(run)
    _check_exits(opened, system)
    return opened.validation_outputs(dataset_for(opened, data_dir))


def _check_exits(run: Run, system: System) -> None:
    there, needed = run.system.topology.num_exits, system.topology.num_exits
    problem = f"the system has {needed} exits, the run {run.path} was trained with {there}"
    require(there == needed, "--run", problem)


def _check_stable(found: Prospect) -> None:
    if found.timing and found.timing.latency is None:
        where, busy = found.timing.bottleneck
        problem = f"{where} would have to work {percent(busy)} % of the time, so its queue grows without end"
        require(False, "plan", f"{problem}; give it less, or more of what it lacks")


def _print_plan(name: str, found: Prospect) -> None:
    from exitflow.planning.classes import node_classes

    classes = node_classes(found.topology)
    plans = ((node, found.plan.nodes[node.name]) for node in _by_first(classes))
    rows = [
        [_label(classes, node.name), str(rates.exit)]
        + [rate(value) for value in (rates.arrival_rate, rates.received_rate, rates.serve_rate, rates.transfer_rate)]
        + [percent(rates.serve_fraction), ", ".join(f"{parent} {rate(sent)}" for parent, sent in rates.parents.items())]
        for node, rates in plans
    ]
    columns = ["node", "exit", "arriving", "received", "served", "sent up", "served %", "to"]
    print_table(f"{name}: requests/s at every node", columns, rows)
    if len(rows) < len(found.topology.nodes):
        click.echo("Nodes that are alike stand in one row, each with these rates; --json has all.\n")
    exits = enumerate(zip(found.plan.exit_serve_rate, found.plan.exit_share, strict=True), start=1)
    exit_rows = [[str(exit), rate(served), percent(share)] for exit, (served, share) in exits]
    print_table("Served by every exit", ["exit", "requests/s", "share %"], exit_rows)
    if found.timing:
        _print_timing(found.timing, classes)


def _by_first(classes: NodeClasses) -> list[Node]:
    """One node of each class, in the order of the system file."""
    return [node for node in classes.topology.nodes if classes.class_of[node.name] == node.name]


def _label(classes: NodeClasses, name: str) -> str:
    number = classes.size[name]
    return name if number == 1 else f"{name} x{number:,}"


def _print_timing(found: Timing, classes: NodeClasses) -> None:
    rows = [
        [name, *(milliseconds(value) for value in ((each.p50, each.p90, each.p99) if each else (None,) * 3))]
        for name, each in [
            *((f"exit {exit}", each) for exit, each in enumerate(found.exit_latency, start=1)),
            ("all requests", found.latency),
        ]
    ]
    print_table("Until an answer is back: milliseconds", ["", "p50", "p90", "p99"], rows)
    nodes = _by_first(classes)
    busy = [[_label(classes, node.name), percent(found.utilisation[node.name]), "-"] for node in nodes]
    links = [(node.name, link.name) for node in nodes for link in node.parents]
    busy += [
        [f"{child} -> {parent}", percent(use.utilisation), amount(use.bytes_per_second)]
        for child, parent in links
        for use in [found.links[child, parent]]
    ]
    print_table("How busy nodes and links are", ["", "busy %", "bytes/s"], busy)
    where, share = found.bottleneck
    click.echo(f"The bottleneck is {where}, busy {percent(share)} % of the time.")
    if found.cost_per_million:
        click.echo(f"A million requests cost {found.cost_per_million:,.2f}.")


@click.command(cls=Command, short_help="Plans of SYSTEM for many values of its keys.")
@click.argument("system", type=SYSTEM)
@click.option(
    "--vary",
    "varied",
    multiple=True,
    required=True,
    metavar="KEY=VALUES",
    help="Such as tiers.edge.count=1,2,4 or tiers.device.max_transfer_rate=1..20; repeatable.",
)
@_run
@click.option("--html", type=FILE, metavar="FILE", help="The trade-off as a page, on which each point shows its plan.")
@data_dir_option
@set_option
@json_option
def whatif(
    system: str,
    varied: tuple[str, ...],
    run: str | None,
    html: str | None,
    data_dir: str | None,
    overrides: dict[str, Any],
    as_json: bool,
) -> None:
    """The plans of SYSTEM for all combinations of some values, and which of them are worth a look.

    A combination is on the front (*) if no other is better in one of accuracy, p99 and cost, and as good in the rest.

    \b
    Example:
      exitflow whatif campus.toml --vary tiers.device.max_transfer_rate=1..20 --vary tiers.edge.count=1,2,4
      exitflow whatif campus.toml --vary nodes.edge-0.cores=1,2,4 --run runs/campus --html whatif.html
    """
    from exitflow.planning.whatif import parse_vary, what_if

    varies = [parse_vary(text) for text in varied]
    opened = None
    if run is not None:
        from exitflow.runs.runs import Run

        opened = Run(run)
    outputs = None if opened is None else opened.validation_outputs(dataset_for(opened, data_dir))

    def outputs_for(changed: System) -> ExitOutputs | None:
        if opened is not None:
            _check_exits(opened, changed)
        return outputs

    with progress_bar(1, unit="plans") as show:
        explored = what_if(
            system, varies, overrides=overrides, outputs_for=outputs_for, progress=lambda share: show(system, share)
        )
    if html:
        from exitflow.report.planning_page import write_whatif_page

        write_whatif_page(explored, Path(html))
    if as_json:
        print_json(explored.to_json())
        return
    _print_explored(explored)
    if html:
        click.echo(f"{html}: written.")


def _print_explored(explored: WhatIf) -> None:
    known = {
        "accuracy": ("right %", percent),
        "p50": ("p50 ms", milliseconds),
        "p99": ("p99 ms", milliseconds),
        "cost": ("cost", lambda value: "-" if value is None else f"{value:,.2f}"),
    }
    prospects = [point.prospect for point in explored.points if point.prospect]
    shown = [measure for measure in known if any(found.value(measure) is not None for found in prospects)]
    num_exits = max(len(found.plan.exit_share) for found in prospects)
    rows, problems = [], []
    for number, point in enumerate(explored.points, start=1):
        values = [f"{value:g}" if isinstance(value, float) else str(value) for value in point.values]
        if point.prospect is None:
            problems.append(f"Point {number} cannot be: {point.problem}.")
            figures = ["-"] * (len(shown) + num_exits)
        else:
            shares = [percent(share) for share in point.prospect.plan.exit_share]
            shares += ["-"] * (num_exits - len(shares))
            figures = [known[measure][1](point.prospect.value(measure)) for measure in shown] + shares
        rows.append([f"{number}{' *' if point.on_front else ''}", *values, *figures])
    columns = ["point", *(key.rpartition(".")[2][:14] for key in explored.keys)]
    columns += [known[measure][0] for measure in shown] + [f"exit {exit} %" for exit in range(1, num_exits + 1)]
    print_table(f"{explored.name}: {', '.join(explored.keys)}", columns, rows)
    click.echo("* on the front: no other is better in one thing and as good in all others.")
    for problem in problems[:MOST_PROBLEMS]:
        click.echo(problem)
    if len(problems) > MOST_PROBLEMS:
        click.echo(f"{len(problems) - MOST_PROBLEMS} more cannot be: see --json.")
