"""`exitflow time`: reads options, calls the package, prints."""

from __future__ import annotations

from dataclasses import asdict

import click

from exitflow.cli.completion import FOLDER
from exitflow.cli.options import json_option, print_json
from exitflow.cli.program import Command
from exitflow.report.terminal import milliseconds, print_table


@click.command(cls=Command, short_help="How long every exit of BUNDLE takes on this machine.")
@click.argument("bundle", type=FOLDER)
@click.option(
    "--threads", type=click.IntRange(1, 1024), default=1, show_default=True, metavar="N", help="Of the engine."
)
@click.option(
    "--repeats", type=click.IntRange(10, 100_000), default=200, show_default=True, metavar="N", help="Runs of each."
)
@json_option
def time(bundle: str, threads: int, repeats: int, as_json: bool) -> None:
    """Measure the service time of every exit of BUNDLE here: what a system file calls service_ms.

    A device computes everything from the input on; an edge server or a cloud that gets features computes what its own
    exit adds. Run it on each kind of machine, and write what it prints into the system file for plan and simulate.

    \b
    Example:
      exitflow time bundles/campus
      exitflow time bundles/campus --threads 4 --json
    """
    from exitflow.serving.bundle.bundle import load_bundle
    from exitflow.serving.bundle.service_times import service_times

    loaded = load_bundle(bundle)
    found = service_times(loaded, threads=threads, repeats=repeats)
    if as_json:
        print_json({"bundle": loaded.version, "threads": threads, "exits": [asdict(each) for each in found]})
        return
    rows = [
        [
            f"exit {each.exit}",
            *map(milliseconds, each.from_input),
            *map(milliseconds, each.from_features or (None, None)),
        ]
        for each in found
    ]
    columns = ["", "from the input", "p99", "from features", "p99"]
    print_table(f"{loaded.manifest.name}: milliseconds of one request", columns, rows)
    click.echo("Next: service_ms of every node in the system file, then exitflow plan.")
