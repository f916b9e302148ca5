"""`exitflow init`: a system file to begin with."""

from __future__ import annotations

from pathlib import Path

import click

from exitflow.cli.completion import FILE
from exitflow.cli.options import say_next
from exitflow.cli.program import Command
from exitflow.errors import ConfigError
from exitflow.files import write_atomically
from exitflow.system import template


@click.command(cls=Command, short_help="Write a commented system file to begin with.")
@click.argument("file", type=FILE, default="system.toml")
def init(file: str) -> None:
    """Write FILE, system.toml if not given: a small system with comments, to change until it is yours.

    \b
    Example:
      exitflow init campus.toml
      exitflow plan campus.toml
    """
    path = Path(file)
    if path.exists():
        raise ConfigError("is already there; choose another name", source=file)
    write_atomically(path, template())
    click.echo(f"{file}: seven nodes in three tiers, which train on embedded data; change it until it is yours.")
    say_next("plan", file)
