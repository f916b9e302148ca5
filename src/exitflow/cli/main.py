"""The `exitflow` command. Thin: it reads options, calls the package, and prints."""

from __future__ import annotations

import click

from exitflow import __version__
from exitflow.cli.program import Program

COMMANDS = {  # name -> the module of exitflow.cli, which is loaded when it is needed
    "init": "init",
    "plan": "planning",
    "whatif": "planning",
    "models": "networks",
    "weights": "networks",
    "inspect": "networks",
    "explain": "explain",
    "train": "training",
    "evaluate": "training",
    "compare": "training",
    "report": "report",
    "simulate": "simulate",
    "federation": "federation",
    "export": "serving",
    "cascade": "serving",
    "time": "time",
    "up": "serving",
    "serve": "serving",
    "load": "serving",
    "observe": "serving",
    "reload": "serving",
    "certs": "serving",
}


@click.group(
    "exitflow",
    cls=Program,
    modules={name: f"exitflow.cli.{module}" for name, module in COMMANDS.items()},
    resumed_by={"train": "train --resume", "compare": "compare"},
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, prog_name="exitflow")
def main() -> None:
    """Train one early-exit network across devices, edge servers and cloud for the traffic each will serve.

    SYSTEM is a TOML file, such as `exitflow init` writes, or a preset such as paper-7:80-15-5.

    \b
    Example:
      exitflow init first.toml
      exitflow plan first.toml
      exitflow train first.toml --out runs/first
      exitflow evaluate runs/first
    """
