"""Train across machines that keep their data: read options, call the package, print."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from exitflow import logs
from exitflow.cli.completion import FILE, FOLDER, SYSTEM
from exitflow.cli.options import json_option, log_options, print_json, set_option
from exitflow.cli.program import Group
from exitflow.report.terminal import print_table

if TYPE_CHECKING:
    from exitflow.flower.federation_status import FederationStatus


@click.group(cls=Group, short_help="Train across machines that keep their data.")
def federation() -> None:
    """Train across machines that keep their data: see docs/federation.md.

    \b
    Example:
      exitflow federation init campus.toml --superlink 10.0.0.1:9092
      exitflow federation server federation
      exitflow federation node federation/nodes/device-0 --data-dir /data
      exitflow train campus.toml --backend flower --superlink 10.0.0.1:9092 --out runs/campus
      exitflow federation status federation
    """


@federation.command(short_help="Write what each machine of SYSTEM needs.")
@click.argument("system", type=SYSTEM)
@click.option("--out", type=FOLDER, metavar="DIR", default="federation", show_default=True, help="The new folder.")
@click.option(
    "--superlink",
    metavar="HOST:PORT",
    default="127.0.0.1:9092",
    show_default=True,
    help="Where the nodes will meet: the server as they reach it.",
)
@set_option
def init(system: str, out: str, superlink: str, overrides: dict[str, Any]) -> None:
    """Write what each machine of SYSTEM needs: certificates, a key for every node, start scripts, systemd units.

    \b
    Example:
      exitflow federation init campus.toml --superlink 10.0.0.1:9092
    """
    from exitflow.flower.folders import init_federation
    from exitflow.system.system import load_system

    loaded = load_system(system, overrides)
    init_federation(loaded, Path(out), superlink=superlink)
    click.echo(f"{out}/server: for the machine at {superlink}; start it with {out}/server/start.sh")
    click.echo(
        f"{out}/nodes/NAME: for each of the {len(loaded.topology.nodes)} nodes; hand out each to its own machine"
    )
    click.echo(f"{out}/authority: for whoever renews the server's certificate; nobody else may have it")
    click.echo(f"Then: exitflow train {system} --backend flower --superlink {superlink} --out RUN")


@federation.command(short_help="The meeting point of the nodes.")
@click.argument("folder", type=FOLDER)
@click.option("--host", metavar="ADDRESS", help="Listen here; at the host that `init` was told if not given.")
@click.option("--flwr-run", is_flag=True, help="Run here what `flwr run` submits, instead of `exitflow train`.")
@log_options
def server(folder: str, host: str | None, flwr_run: bool, log_level: str, log_format: str) -> None:
    """The meeting point: run Flower's SuperLink from FOLDER, until it is ended.

    \b
    Example:
      exitflow federation server federation
      exitflow federation server federation/server --host 0.0.0.0
    """
    logs.set_up(log_level, log_format, who="server")
    from exitflow.flower.folders import read_address, server_folder
    from exitflow.flower.superlink import run_server

    found = server_folder(folder)
    ready = f"The federation meets at {read_address(found)}."
    run_server(found, host=host, flwr_run=flwr_run, ready=lambda: click.echo(ready))


_node_data = click.option(
    "--data-dir",
    type=FOLDER,
    metavar="DIR",
    help="All training samples there are this node's; its part of the system's partition if not given.",
)


@federation.command(short_help="A node, which trains on its own data.")
@click.argument("folder", type=FOLDER)
@_node_data
@log_options
def node(folder: str, data_dir: str | None, log_level: str, log_format: str) -> None:
    """A node: train on its own data whenever the server asks, until it is ended.

    \b
    Example:
      exitflow federation node federation/nodes/device-0 --data-dir /data
    """
    from exitflow.flower.folders import node_of
    from exitflow.flower.supernode import run_node

    logs.set_up(log_level, log_format, who=node_of(Path(folder)))
    run_node(Path(folder), data_dir=data_dir)


@federation.command(short_help="Only the worker, for a SuperNode that runs already.")
@click.argument("name")
@click.option(
    "--socket",
    "path",
    type=FILE,
    metavar="PATH",
    required=True,
    help="Where to listen, for the Flower app of the node.",
)
@click.option(
    "--states", type=FOLDER, metavar="DIR", default="states", show_default=True, help="Where the node keeps its states."
)
@_node_data
@log_options
def worker(name: str, path: str, states: str, data_dir: str | None, log_level: str, log_format: str) -> None:
    """Only the worker of node NAME, for a Flower SuperNode that runs already.

    \b
    Example:
      exitflow federation worker device-0 --socket /run/exitflow/device-0 --data-dir /data
      flower-supernode ... --node-config 'worker="/run/exitflow/device-0"'
    """
    from exitflow.flower.supernode import run_worker

    logs.set_up(log_level, log_format, who=name)
    run_worker(name, Path(path), states=Path(states), data_dir=data_dir)


@federation.command(short_help="Who is connected, and how far the training is.")
@click.argument("folder", type=FOLDER, default="federation")
@json_option
@click.pass_context
def status(context: click.Context, folder: str, as_json: bool) -> None:
    """Who is connected, how far the training is, how long the certificate lasts; exit code 1 where nobody answers.

    \b
    Example:
      exitflow federation status federation
      exitflow federation status federation/server --json
    """
    from exitflow.flower.federation_status import federation_status
    from exitflow.flower.folders import read_address, server_folder

    found = server_folder(folder)
    federation = federation_status(found, read_address(found))
    if as_json:
        print_json(federation.to_json())
    else:
        _print_status(federation)
    if not federation.answers:
        context.exit(1)


def _print_status(federation: FederationStatus) -> None:
    rows = [
        [
            name,
            {True: "connected", False: "not connected", None: "unknown"}[node.connected],
            _time(node.since),
            *("-" if value is None else f"{value:,}" for value in (node.round, node.bytes)),
            *("-" if value is None else f"{value:.3g}" for value in (node.seconds, node.loss)),
        ]
        for name, node in federation.nodes.items()
    ]
    connected = sum(bool(node.connected) for node in federation.nodes.values())
    meets = f"{connected} of {len(rows)} nodes are connected" if federation.answers else "nobody answers"
    title = f"The federation at {federation.superlink}: {meets}"
    print_table(title, ["node", "is", "since", "sent in round", "bytes", "seconds", "loss"], rows)
    for name, node in federation.nodes.items():
        if node.problem:
            click.echo(f"The last update of {name} did not count: {node.problem}.")
    if training := federation.training:
        ended = f"ended: {training.problem or 'all rounds are done'}"
        since = f", since {_time(training.round_began)}" if training.round_began else ""
        where = f"round {training.round or 0} of {training.rounds}{since}"
        click.echo(f"Training {training.run}: {where}; it {'goes on' if training.going_on else ended}.")
    else:
        click.echo("There was no training yet.")
    days = f"{federation.certificate_days:.0f} days from now"
    click.echo(f"The server's certificate ends on {federation.certificate_until[:10]}, {days}.")


def _time(text: str | None) -> str:
    """In UTC, to the second."""
    return text[:19].replace("T", " ") if text else "-"


@federation.command(short_help="Give the server a new certificate.")
@click.argument("folder", type=FOLDER, default="federation")
@click.option("--authority", type=FOLDER, metavar="DIR", help="Where its key lies; FOLDER/authority if not given.")
@click.option("--days", type=click.IntRange(1, 3650), default=1825, show_default=True, help="How long it is valid.")
def renew(folder: str, authority: str | None, days: int) -> None:
    """Give the server a new certificate. A server that runs takes it up by itself, and no node needs anything.

    \b
    Example:
      exitflow federation renew federation
    """
    from exitflow.flower.folders import server_folder
    from exitflow.flower.keys import read_authority, renew_server_certificate

    server = server_folder(folder)
    signer = read_authority(Path(authority) if authority else Path(folder) / "authority")
    until = renew_server_certificate(server, signer, days=days)
    click.echo(f"{server}: a new certificate, which ends on {until.date()}.")
    click.echo(f"If the server is another machine, copy {server}/server.key and then server.crt there.")
