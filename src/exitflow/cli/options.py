"""Options that several commands share, and what they say to the package."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from exitflow import logs
from exitflow.cli.completion import FOLDER
from exitflow.config import parse_changes
from exitflow.errors import ConfigError
from exitflow.runs.backends import BACKENDS

if TYPE_CHECKING:
    from exitflow.data.dataset import Dataset
    from exitflow.runs.runs import Run

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
set_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    callback=lambda ctx, param, texts: parse_changes(texts),
    help="Change a key of the system file; repeatable.",
)
data_dir_option = click.option("--data-dir", type=FOLDER, metavar="DIR", help="Where the data set's files lie.")
backend_option = click.option(
    "--backend", type=click.Choice(list(BACKENDS)), default="processes", show_default=True, help="Where to train."
)
workers_option = click.option(
    "--workers", type=click.IntRange(min=1), metavar="N", help="Processes; one for each core if not given."
)


def log_options(command: Any) -> Any:
    """`--log-level` and `--log-format`, for commands that run until they are told to stop; see `exitflow.logs`."""
    for name, choices, default, text in (
        ("--log-level", logs.LEVELS, "info", "The least that the log on stderr is told."),
        ("--log-format", logs.FORMATS, "text", "Lines for people, or a JSON object a line."),
    ):
        command = click.option(name, type=click.Choice(choices), default=default, show_default=True, help=text)(command)
    return command


def as_overrides(
    *,
    weighting: str | None = None,
    seed: int | None = None,
    rounds: int | None = None,
    data_dir: str | None = None,
    overrides: Mapping[str, Any],
) -> dict[str, Any]:
    """What --set changes, and then what the options that stand for keys say."""
    options = {"training.weighting": weighting, "training.seed": seed, "training.rounds": rounds, "data.dir": data_dir}
    given = {key: value for key, value in options.items() if value is not None}
    return {key: value for key, value in overrides.items() if key not in given} | given


def split_names(text: str) -> list[str]:
    """`a,b` as names, each once."""
    return list(dict.fromkeys(name.strip() for name in text.split(",")))


def split_seeds(text: str) -> list[int]:
    """The seeds that a text such as `9,42` names."""
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        seeds = []
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise ConfigError(f"expected different numbers from 0 on, such as 9,42,67, got {text!r}", key="--seeds")
    return seeds


def dataset_for(run: Run, data_dir: str | None) -> Dataset:
    """The run's data set, from `data_dir` where that is given."""
    from exitflow.system.assembly import dataset_of

    system = run.system
    return dataset_of(replace(system, data=replace(system.data, dir=data_dir)) if data_dir else system)


def say_next(command: str, *arguments: str) -> None:
    """What a user may want to do next, as the shell takes it."""
    click.echo(f"Next: {called_as()} {shlex.join((command, *arguments))}")


def called_as() -> str:
    """What calls this program again: `exitflow`, or its path where the shell does not look for it."""
    path = sys.argv[0]
    if Path(path).name == "__main__.py":
        return "python -m exitflow"
    elsewhere = Path(path).name == "exitflow" and shutil.which("exitflow") is None
    return shlex.quote(path) if elsewhere else "exitflow"


def print_json(value: Any) -> None:
    """Print a value as JSON, for other programs."""
    click.echo(json.dumps(value, indent=2, allow_nan=False))
