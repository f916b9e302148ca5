"""`python -m paper reproduce`: reads options, calls the package, prints."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from exitflow.cli.options import (
    data_dir_option,
    json_option,
    print_json,
    split_names,
    split_seeds,
    workers_option,
)
from exitflow.errors import ConfigError, DataError
from exitflow.report.terminal import progress_bar
from exitflow.topology.settings import PAPER_SETTINGS
from paper.figures import TableFigures, gradient_variance_json
from paper.printing import print_figures, print_gradient_variance
from paper.reproduction import Reproduction
from paper.results import STORES
from paper.tables import DATASETS, GRADIENT_VARIANCE, SCALES, Job, Table, find_table, tables_of


@click.command(short_help="Run the experiments behind a table.")
@click.argument("table")
@click.option("--scale", type=click.Choice(SCALES), default="small", show_default=True, help="How large.")
@click.option("--seeds", metavar="N,N", default="9,42,67", show_default=True, help="Every training with each of them.")
@click.option("--datasets", metavar="A,B", default="cifar10,cifar100", show_default=True, help="On which data.")
@click.option("--settings", metavar="X-Y-Z,...", help="Only these columns, such as 80-15-5,5-15-80; all if not given.")
@click.option("--out", metavar="FILE", help="Where results are kept; paper/results/SCALE.jsonl if not given.")
@click.option("--device", default="cpu", show_default=True, help="Where PyTorch computes, such as cuda.")
@workers_option
@data_dir_option
@json_option
def reproduce(
    table: str,
    scale: Any,
    seeds: str,
    datasets: str,
    settings: str | None,
    out: str | None,
    device: str,
    workers: int | None,
    data_dir: str | None,
    as_json: bool,
) -> None:
    """Run the experiments of TABLE that have no result yet, and print it beside the paper's figures.

    TABLE is table1 to table6 (table3 is also called gradient-variance), ours, ours-17-nodes, ours-biased,
    ours-highly-biased, blended, parts, peers, departures, departures-highly-biased, or all; at the scales long and
    pretrained, tables of these names, long-highly-biased and long-17-nodes. Trainings that several cells share run
    once; a run that was killed goes on where it stood, and several processes may fill one --out. With --settings,
    tables that have none of these columns are left out; table3 has no columns. Without --workers there is one for
    each core, or one in all where --device is no cpu.

    \b
    Example:
      python -m paper reproduce table1 --data-dir data --seeds 9
      python -m paper reproduce ours --data-dir data --settings 80-15-5,5-15-80
      python -m paper reproduce all --scale paper --device cuda
    """
    table = GRADIENT_VARIANCE if table == "table3" else table
    chosen = tables_of(scale) if table == "all" else [find_table(table)] if table != GRADIENT_VARIANCE else []
    if chosen and not any(scale in each.scales for each in chosen):
        raise ConfigError(f"{table} is asked for at {' and '.join(chosen[0].scales)}, got {scale!r}", key="--scale")
    chosen = _with_columns(chosen, settings) if settings is not None else chosen
    names, numbers = _dataset_names(datasets, chosen), split_seeds(seeds)
    reproduction = Reproduction(Path(out or STORES / f"{scale}.jsonl"), scale, data_dir, device)
    jobs = reproduction.missing(chosen, numbers, names)
    measured = table in ("all", GRADIENT_VARIANCE)
    unmeasured = reproduction.unmeasured(names, numbers) if measured else []
    if needed := {job.training.dataset for job in jobs} | {name for name, _ in unmeasured}:
        try:
            reproduction.check(sorted(needed))
        except DataError as error:
            raise DataError(f"{error}; {_missing(jobs, unmeasured)} in {reproduction.store}") from None
    with progress_bar(len(jobs) + len(unmeasured), unit="trainings" if jobs else "measurements") as show:
        left = reproduction.run(jobs, workers=workers or _default_workers(device), observer=show)
        for done, (name, seed) in enumerate(unmeasured, start=len(jobs)):
            show(f"gradient variance, {name}, seed {seed}", done)
            reproduction.measure_gradient_variance(name, seed)
    if left:
        click.echo(f"Left to another process that is training them: {', '.join(left)}.", err=True)
    results = reproduction.results
    figures = [TableFigures(each, results, tuple(numbers)) for each in chosen]
    if as_json:
        tables = [each.to_json(names) for each in figures]
        print_json(tables + ([gradient_variance_json(results, names, numbers)] if measured else []))
        return
    for each in figures:
        print_figures(each, names)
    if measured:
        print_gradient_variance(results, names, numbers)


def _missing(jobs: Sequence[Job], unmeasured: Sequence[tuple[str, int]]) -> str:
    """What data are needed for."""
    if not jobs:
        return f"the gradient variance of {len(unmeasured)} data sets and seeds is not there yet"
    others = f" and {len(jobs) - 1} more" if len(jobs) > 1 else ""
    return f"{jobs[0].name}{others} {'have' if others else 'has'} no result yet"


def _default_workers(device: str) -> int:
    """One for each core; an accelerator has room for one training."""
    return (os.cpu_count() or 1) if device == "cpu" else 1


def _with_columns(tables: Sequence[Table], text: str) -> list[Table]:
    """Only the columns that are asked for, and the tables that have any of them."""
    wanted = split_names(text)
    for name in wanted:
        if name not in PAPER_SETTINGS:
            raise ConfigError(f"expected some of {', '.join(PAPER_SETTINGS)}, got {name!r}", key="--settings")
    found = [narrowed for table in tables if (narrowed := table.with_columns(wanted)).settings]
    if tables and not found:
        has = ", ".join(tables[0].settings)
        raise ConfigError(f"{tables[0].name} has the columns {has} only, got {text!r}", key="--settings")
    return found


def _dataset_names(text: str, chosen: Sequence[Table]) -> list[str]:
    names = split_names(text)
    for name in names:
        if name not in DATASETS:
            raise ConfigError(f"expected cifar10, cifar100 or both, got {name!r}", key="--datasets")
    if len(chosen) == 1 and not set(names) & set(chosen[0].datasets):
        own = " and ".join(chosen[0].datasets)
        raise ConfigError(f"{chosen[0].name} is about {own} only, got {text!r}", key="--datasets")
    return names
