"""What the site adds to the pages: the help of every command, the list of decisions, and names of the project's files.

Pages are read in the repository too, where links such as `../examples/campus.toml` lead to the file. The site has no
such files, and names them instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from exitflow.cli.main import main

DECISIONS = Path(__file__).parent / "decisions"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by MkDocs for every page."""
    if page.file.src_uri == "decisions/index.md":
        markdown += "\n" + "\n".join(f"- [{title(path)}]({path.name})" for path in sorted(DECISIONS.glob("0*.md")))
    if page.file.src_uri == "commands.md":
        markdown += "\n" + "\n".join(helps(main, click.Context(main, info_name="exitflow")))
    upward = r"\.\./" * (page.file.src_uri.count("/") + 1)
    outside = rf"\[([^\]]+)\]\({upward}([^)]+)\)"
    return re.sub(outside, lambda link: f"{link[1]} (`{link[2].partition('#')[0]}` in the repository)", markdown)


def title(path: Path) -> str:
    """The first heading of a page."""
    return path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")


def helps(command: click.Command, context: click.Context) -> Iterator[str]:
    """The help of a command and of all commands below it, each under a heading."""
    yield f"## {context.command_path}\n\n```text\n{command.get_help(context)}\n```\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below and not below.hidden:
                yield from helps(below, click.Context(below, info_name=name, parent=context))
