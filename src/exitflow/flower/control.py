"""Flower's own command line: several commands in one process, and the settings with which we run all of Flower."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import tomli_w

CONNECTION = "exitflow"  # the name of our SuperLink in Flower's configuration

QUIET = {  # nothing of Flower's or Ray's may call out
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def write_connection(home: Path, address: str, certificates: Path) -> None:
    """Tell Flower's command line where our SuperLink is."""
    home.mkdir(parents=True, exist_ok=True)
    connection = {"address": address, "root-certificates": str(certificates.resolve())}
    table = {"superlink": {"default": CONNECTION, CONNECTION: connection}}
    (home / "config.toml").write_text(tomli_w.dumps(table))


def environment(home: Path) -> dict[str, str]:
    """For every process of Flower's that we start."""
    programs = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", os.defpath)
    return {
        **os.environ,
        **QUIET,
        "FLWR_HOME": str(home),
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25",
        "PATH": f"{programs}{os.pathsep}{path}",
    }


def main() -> None:
    """Run the commands that the first argument lists, as JSON; the first that fails ends it with what it said."""
    import click
    from flwr.cli.app import app

    request = json.loads(sys.argv[1])
    for command in request["commands"]:
        try:
            app(command, standalone_mode=False)
        except click.ClickException as error:
            problem = " ".join(error.format_message().split())
            if not request["tolerate"] or request["tolerate"] not in problem:
                sys.exit(problem)
