"""Options that several commands share."""

from __future__ import annotations

import json
from typing import Any

import click

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
data_dir_option = click.option("--data-dir", metavar="DIR", help="Where the data set's files lie.")


def print_json(value: Any) -> None:
    """For other programs."""
    click.echo(json.dumps(value, indent=2, allow_nan=False))
