"""What a shell offers behind TAB: files, folders, systems, and the names that exitflow knows.

Each is the type of an option or argument, and takes any text: whether it is one that fits is said by the package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from exitflow.system.presets import PRESETS


class Completed(click.ParamType[str]):
    """Any text, for which `offer(what stands there already)` gives what could stand there."""

    name = "text"

    def __init__(self, offer: Callable[[str], Iterable[str | CompletionItem]]) -> None:
        self._offer = offer

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        found = self._offer(incomplete)
        return [each if isinstance(each, CompletionItem) else CompletionItem(each) for each in found]


def one_of(names: Iterable[str]) -> Completed:
    """The shell completes a value by the names that begin with what was typed."""
    known = list(names)
    return Completed(lambda begun: [name for name in known if name.startswith(begun)])


def some_of(names: Iterable[str]) -> Completed:
    """Some of these names, with commas between them: the last is completed, by one that is not there yet."""
    known = list(names)

    def offer(begun: str) -> list[str]:
        *before, last = begun.split(",")
        return [",".join((*before, name)) for name in known if name.startswith(last) and name not in before]

    return Completed(offer)


def _systems(begun: str) -> list[str | CompletionItem]:
    """Presets and TOML files; whatever files there are where neither fits."""
    folder = begun.rpartition("/")[0]
    files = [each.name for each in Path(f"{folder}/" if "/" in begun else ".").glob("*.toml")]
    known = [*PRESETS, *files] if not folder else [f"{folder}/{file}" for file in files]
    found = sorted(each for each in known if each.startswith(begun))
    return [*found] or [CompletionItem(begun, type="file")]


SYSTEM = Completed(_systems)
FILE = Completed(lambda begun: [CompletionItem(begun, type="file")])
FOLDER = Completed(lambda begun: [CompletionItem(begun, type="dir")])
