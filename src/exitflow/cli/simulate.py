"""`exitflow simulate`: reads options, calls the package, prints."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from exitflow.cli.completion import FILE, FOLDER, SYSTEM
from exitflow.cli.options import data_dir_option, dataset_for, json_option, print_json
from exitflow.cli.program import Command
from exitflow.config import require
from exitflow.report.terminal import milliseconds, percent, print_table, progress_bar, rate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from exitflow.evaluation.calibration import NodeCalibration
    from exitflow.evaluation.outputs import ExitOutputs
    from exitflow.planning.fluid import FluidOutcome
    from exitflow.planning.simulation import Failure, NodeSettings
    from exitflow.planning.simulation_report import SimulationReport
    from exitflow.topology.graph import Topology

MOST_REQUESTS = 5_000_000  # that are followed one by one; more are a fluid
MOST_DEVICES = 10_000_000


@dataclass(frozen=True)
class _Served:
    """The tree that is simulated, and what its exits say to every sample."""

    name: str
    topology: Topology
    outputs: ExitOutputs
    calibrations: Mapping[str, NodeCalibration]
    confidence: str


@click.command(cls=Command, short_help="Requests through a RUN or BUNDLE, on a virtual clock.")
@click.argument("target", type=FOLDER, metavar="RUN|BUNDLE")
@click.option(
    "--system", type=SYSTEM, metavar="SYSTEM", help="Of a RUN: simulate its answers on this system instead of its own."
)
@click.option("--duration", type=float, default=600.0, show_default=True, metavar="S", help="Simulated seconds.")
@click.option(
    "--trace",
    type=FILE,
    metavar="FILE",
    help="CSV or Parquet with seconds and requests: how the rate goes up and down.",
)
@click.option("--drift", type=click.Choice(["difficulty", "traffic", "burst"]), help="What changes half-way; see load.")
@click.option("--fail", "fails", multiple=True, metavar="NODE@FROM..TO", help="A node is gone: edge-0@60s..90s.")
@click.option(
    "--devices",
    type=click.IntRange(1, MOST_DEVICES),
    metavar="N",
    help="With so many devices, and limits and cores above them in proportion.",
)
@click.option("--fluid", "as_fluid", is_flag=True, help="On the mean, as for more than 5 million requests.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N", help="Of arrivals.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Change how nodes serve, as in serve.")
@data_dir_option
@json_option
def simulate(
    target: str,
    system: str | None,
    duration: float,
    trace: str | None,
    drift: Any,
    fails: tuple[str, ...],
    devices: int | None,
    as_fluid: bool,
    seed: int,
    settings: tuple[str, ...],
    data_dir: str | None,
    as_json: bool,
) -> None:
    """Send requests through the nodes of RUN or BUNDLE, without starting one, and see who answers, right and when.

    Every request is followed, and routed by the very rules that serving nodes have; times come from the system file
    (service_ms, cores, round_trip_ms, bandwidth_mbps). More than 5 million requests are a fluid: rates and accuracy
    on the mean, no times.

    \b
    Example:
      exitflow simulate runs/campus --duration 3600
      exitflow simulate bundles/campus --fail edge-0@60s..90s --drift difficulty
      exitflow simulate runs/campus --system campus.toml --trace calls.csv --duration 86400 --devices 1000000
    """
    from exitflow.planning.arrivals import Workload, load_trace
    from exitflow.planning.simulation import parse_failure

    require(0 < duration <= 31 * 86400, "--duration", f"must be above 0 seconds and at most 31 days, got {duration:g}")
    failures = [parse_failure(text) for text in fails]
    served = _served(target, system, data_dir)
    ease = served.outputs.ranks(served.confidence)[0]
    copies = 1 if devices is None else _copies(served.topology, devices)
    workload = Workload(served.topology, ease, duration, seed, drift, load_trace(trace) if trace else None)
    expected = copies * duration * sum(node.arrival_rate for node in served.topology.nodes)
    if as_fluid or expected > MOST_REQUESTS:
        _fluid(served, workload, failures, copies, as_json=as_json)
        return
    served = _copied(served, copies)
    _exact(served, replace(workload, topology=served.topology), failures, _settings(settings), as_json=as_json)


def _served(target: str, system: str | None, data_dir: str | None) -> _Served:
    if (Path(target) / "manifest.json").is_file():
        from exitflow.serving.bundle.bundle import load_bundle

        require(system is None, "--system", "is for a RUN: a bundle has its system")
        bundle = load_bundle(target)
        manifest = bundle.manifest
        return _Served(manifest.name, bundle.topology, bundle.samples().outputs, manifest.nodes, manifest.confidence)
    from exitflow.evaluation.calibration import calibrate
    from exitflow.runs.runs import Run
    from exitflow.system.system import load_system

    run = Run(target)
    chosen = load_system(system) if system else run.system
    there, needed = run.system.topology.num_exits, chosen.topology.num_exits
    require(there == needed, "--system", f"has {needed} exits, the run {target} was trained with {there}")
    outputs = run.validation_outputs(dataset_for(run, data_dir))
    return _Served(chosen.name, chosen.topology, outputs, calibrate(outputs, chosen.topology), "entropy")


def _copies(topology: Topology, number: int) -> int:
    """How often every device is taken, so that there are so many in all."""
    devices = sum(node.arrival_rate > 0 for node in topology.nodes)
    copies, rest = divmod(number, devices)
    problem = f"must be a multiple of the {devices} devices that the system has, got {number:,}"
    require(copies > 0 and not rest, "--devices", problem)
    return copies


def _copied(served: _Served, copies: int) -> _Served:
    """Every device several times, and what stands above them larger in proportion."""
    from exitflow.planning.arrivals import enlarged
    from exitflow.topology.graph import Topology

    if copies == 1:
        return served
    nodes, calibrations = [], dict(served.calibrations)
    for node in served.topology.nodes:
        if not node.arrival_rate:
            nodes.append(enlarged(node, copies))
            continue
        names = [node.name, *(f"{node.name}.{copy}" for copy in range(2, copies + 1))]
        nodes += [replace(node, name=name) for name in names]
        calibrations |= dict.fromkeys(names, served.calibrations[node.name])
    return replace(served, topology=Topology(tuple(nodes)), calibrations=calibrations)


def _settings(texts: Sequence[str]) -> NodeSettings:
    from exitflow.serving.node.node_settings import serving_spec, simulated

    spec = serving_spec(texts)
    return simulated(spec, max_batch=spec.max_batch if any(text.startswith("max_batch") for text in texts) else 1)


def _exact(
    served: _Served, workload: Any, failures: Sequence[Failure], settings: NodeSettings, *, as_json: bool
) -> None:
    from exitflow.planning.simulation import simulate
    from exitflow.planning.simulation_report import report
    from exitflow.topology.rates import serving_plan

    with progress_bar(1, unit="of the time") as show:
        outcome = simulate(
            workload,
            served.outputs,
            served.calibrations,
            settings=settings,
            failures=failures,
            confidence_kind=served.confidence,
            progress=lambda share: show(served.name, share),
        )
    require(len(outcome.exits) > 0, "simulate", "no request was answered in this time: give it longer")
    found = report(outcome, served.topology, serving_plan(served.topology))
    if as_json:
        print_json({"name": served.name, **found.to_json()})
        return
    _print_exits(served.name, found)
    _print_nodes(found)
    _print_windows(found)
    if found.fallbacks:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(found.fallbacks.items()))
        click.echo(f"Own answers that were given instead of a parent's: {reasons}.")
    if found.failed:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(found.failed.items()))
        click.echo(f"Not answered: {reasons}.")


def _print_exits(name: str, found: SimulationReport) -> None:
    rows = []
    figures = zip(found.exit_share, found.planned_exit_share, found.exit_accuracy, found.exit_latency_ms, strict=True)
    for exit, (share, planned, accuracy, times) in enumerate(figures, start=1):
        latency = [milliseconds(value) for value in ((times.p50, times.p90, times.p99) if times else (None,) * 3)]
        rows.append([f"exit {exit}", percent(share), percent(planned), percent(accuracy), *latency])
    times = found.latency_ms
    latency = [milliseconds(value) for value in (times.p50, times.p90, times.p99)]
    rows.append(["all", "", "", percent(found.accuracy), *latency])
    title = f"{name}: {found.answered:,} requests, one by one"
    print_table(title, ["", "share %", "planned %", "right %", "p50 ms", "p90 ms", "p99 ms"], rows)


def _print_nodes(found: SimulationReport) -> None:
    rows = [
        [name, rate(node.received), rate(node.served), rate(node.planned_served), percent(node.busy)]
        for name, node in found.nodes.items()
    ]
    print_table("Requests/s at every node", ["node", "received", "served", "planned", "busy %"], rows)
    links = [
        [name, rate(carried), "-" if limit is None else rate(limit)] for name, (carried, limit) in found.links.items()
    ]
    if links:
        print_table("Requests/s over every link", ["link", "carried", "limit"], links)


def _print_windows(found: SimulationReport) -> None:
    num_exits = len(found.exit_share)
    rows = [
        [
            f"{window.begin:,.0f} to {window.end:,.0f} s",
            rate(window.rate),
            *(percent(share) for share in window.exit_share or (None,) * num_exits),
            percent(window.accuracy),
            milliseconds(window.p99),
        ]
        for window in found.windows
    ]
    exits = [f"exit {exit} %" for exit in range(1, num_exits + 1)]
    print_table("As time goes by", ["", "requests/s", *exits, "right %", "p99 ms"], rows)


def _fluid(served: _Served, workload: Any, failures: Sequence[Failure], copies: int, *, as_json: bool) -> None:
    from exitflow.planning.fluid import fluid
    from exitflow.topology.rates import serving_plan

    found = fluid(workload, served.outputs, failures=failures, copies=copies, confidence_kind=served.confidence)
    if as_json:
        print_json({"name": served.name, **found.to_json()})
        return
    _print_fluid(served.name, found, serving_plan(served.topology).exit_share.tolist())


def _print_fluid(name: str, found: FluidOutcome, planned: Sequence[float]) -> None:
    rows = [
        [f"exit {exit}", percent(share), percent(wanted)]
        for exit, (share, wanted) in enumerate(zip(found.exit_share.tolist(), planned, strict=True), start=1)
    ]
    print_table(f"{name}: {found.requests:,.0f} requests, as a fluid", ["", "share %", "planned %"], rows)
    click.echo(f"{percent(found.accuracy)} % are answered right.")
    click.echo("Of a fluid there are no times: simulate less of it to see them.")
