"""`exitflow report`: reads options, calls the package, prints."""

from __future__ import annotations

import click

from exitflow.cli.completion import FOLDER
from exitflow.cli.options import json_option, print_json
from exitflow.cli.program import Command


@click.command(cls=Command, short_help="A page with tables and figures of RUNS.")
@click.argument("runs", type=FOLDER)
@click.option("--out", type=FOLDER, metavar="DIR", help="Where the page is written; RUNS/report if not given.")
@json_option
def report(runs: str, out: str | None, as_json: bool) -> None:
    """A page with the tables and figures of RUNS, which needs no network; the figures also as PNG files.

    RUNS is the directory of one run, or the folder of a `compare`.

    \b
    Example:
      exitflow report runs/campus
      exitflow report runs/demo --out report
    """
    from exitflow.report.writing import build_report

    page, figures = build_report(runs, out)
    if as_json:
        print_json({"page": str(page), "figures": figures})
        return
    click.echo(f"{page}: written, and {figures} {'figure' if figures == 1 else 'figures'} beside it.")
