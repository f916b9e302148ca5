"""Train across machines that keep their data: read options, call the package, print."""

from __future__ import annotations

from pathlib import Path

import click

from exitflow.cli.options import set_option
from exitflow.cli.program import Group


@click.group(cls=Group, short_help="Train across machines that keep their data.")
def federation() -> None:
    """Train across machines that keep their data: see docs/federation.md.

    \b
    Example:
      exitflow federation init campus.toml --superlink 10.0.0.1:9092
      exitflow federation server federation
      exitflow federation node federation/nodes/device-0 --data-dir /data
      exitflow train campus.toml --backend flower --superlink 10.0.0.1:9092 --out runs/campus
    """


@federation.command()
@click.argument("system")
@click.option("--out", metavar="DIR", default="federation", show_default=True, help="The new folder.")
@click.option(
    "--superlink",
    metavar="HOST:PORT",
    default="127.0.0.1:9092",
    show_default=True,
    help="Where the nodes will meet: the server as they reach it.",
)
@set_option
def init(system: str, out: str, superlink: str, overrides: tuple[str, ...]) -> None:
    """Write what each machine of SYSTEM needs: certificates, a key for every node, start scripts, systemd units.

    \b
    Example:
      exitflow federation init campus.toml --superlink 10.0.0.1:9092
    """
    from exitflow.flower.deployment import init_federation
    from exitflow.system.system import load_system

    loaded = load_system(system, list(overrides))
    init_federation(loaded, Path(out), superlink=superlink)
    click.echo(f"{out}/server: for the machine at {superlink}; start it with {out}/server/start.sh")
    click.echo(
        f"{out}/nodes/NAME: for each of the {len(loaded.topology.nodes)} nodes; hand out each to its own machine"
    )
    click.echo(f"Then: exitflow train {system} --backend flower --superlink {superlink} --out RUN")


@federation.command()
@click.argument("folder")
@click.option("--host", metavar="ADDRESS", help="Listen here; at the host that `init` was told if not given.")
@click.option("--flwr-run", is_flag=True, help="Run here what `flwr run` submits, instead of `exitflow train`.")
def server(folder: str, host: str | None, flwr_run: bool) -> None:
    """The meeting point: run Flower's SuperLink from FOLDER, until it is ended.

    \b
    Example:
      exitflow federation server federation
      exitflow federation server federation/server --host 0.0.0.0
    """
    from exitflow.flower.deployment import read_address, run_server, server_folder

    found = server_folder(folder)
    ready = f"The federation meets at {read_address(found)}."
    run_server(found, host=host, flwr_run=flwr_run, ready=lambda: click.echo(ready))


_node_data = click.option(
    "--data-dir",
    metavar="DIR",
    help="All training samples there are this node's; its part of the system's partition if not given.",
)


@federation.command()
@click.argument("folder")
@_node_data
def node(folder: str, data_dir: str | None) -> None:
    """A node: train on its own data whenever the server asks, until it is ended.

    \b
    Example:
      exitflow federation node federation/nodes/device-0 --data-dir /data
    """
    from exitflow.flower.node_program import run_node

    run_node(Path(folder), data_dir=data_dir, tell=lambda text: click.echo(f"exitflow: {text}", err=True))


@federation.command()
@click.argument("name")
@click.option(
    "--socket", "path", metavar="PATH", required=True, help="Where to listen, for the Flower app of the node."
)
@click.option("--states", metavar="DIR", default="states", show_default=True, help="Where the node keeps its states.")
@_node_data
def worker(name: str, path: str, states: str, data_dir: str | None) -> None:
    """Only the worker of node NAME, for a Flower SuperNode that runs already.

    \b
    Example:
      exitflow federation worker device-0 --socket /run/exitflow/device-0 --data-dir /data
      flower-supernode ... --node-config 'worker="/run/exitflow/device-0"'
    """
    from exitflow.flower.node_program import run_worker

    run_worker(name, Path(path), states=Path(states), data_dir=data_dir)
