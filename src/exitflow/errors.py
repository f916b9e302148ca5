"""What can go wrong, as one tree.

    ExitflowError                 catch this one to catch them all
    ├── ConfigError               a system file, preset, option or specification is not valid
    ├── DataError                 a data set is missing or damaged
    ├── RunError                  a run directory cannot be used as asked
    │   └── BusyError             another process is training in it
    ├── TrainingError             training itself had to stop
    ├── BundleError               a bundle is missing, damaged, or not what is needed
    ├── ServingError              a node or a tree of nodes cannot be started, reached or used as asked
    ├── StaleFiguresError         a document says something else than the records
    └── MissingExtraError         an optional dependency is not installed

The command line prints the message as one sentence and ends with `exit_code`: 2 for what the user can
mend by asking differently, 1 for what failed on the way.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

MAX_WORD, MAX_SENTENCE = 300, 1200  # characters of an error, which may repeat what it was given


class ExitflowError(Exception):
    """Base of all errors that exitflow raises on purpose. Its message is one line of bounded length."""

    exit_code = 2

    def __init__(self, message: str = "") -> None:
        super().__init__(one_line(message))


class ConfigError(ExitflowError):
    """A value that the user gave is not valid; knows the file and the key it stands at."""

    def __init__(self, problem: str, *, key: str = "", source: str = "") -> None:
        super().__init__(": ".join(part for part in (source, key, problem) if part))
        self.problem = problem
        self.key = key
        self.source = source

    def within(self, key: str = "", *, source: str = "") -> ConfigError:
        """The same problem, seen from one level further out."""
        if key and self.key:
            key = f"{key}{self.key}" if self.key.startswith("[") else f"{key}.{self.key}"
        return ConfigError(self.problem, key=key or self.key, source=source or self.source)


class DataError(ExitflowError):
    """A data set is missing, damaged, or does not fit."""


class RunError(ExitflowError):
    """A run directory does not hold what is needed, or holds something that must not be lost."""


class BusyError(RunError):
    """Another process is training this run."""


class TrainingError(ExitflowError):
    """Training had to stop; what was finished is on disk."""

    exit_code = 1


class BundleError(ExitflowError):
    """A bundle is missing or damaged, or does not fit."""


class ServingError(ExitflowError):
    """A node or a tree of nodes cannot be started, reached or used as asked."""


class StaleFiguresError(ExitflowError):
    """A document says something else than the records it was made from."""

    exit_code = 1


class MissingExtraError(ExitflowError):
    """An optional dependency is needed and not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"this needs {package}, which is not installed: pip install {_distribution(extra)}")


def _distribution(extra: str) -> str:
    """What pip calls this package with an extra: by its folder, in a checkout."""
    root = Path(__file__).parents[2]
    if not (root / "pyproject.toml").is_file():
        return f"'exitflow[{extra}]'"
    return f"-e '{'.' if root == Path.cwd() else root}[{extra}]'"


def os_problem(error: OSError) -> str:
    """The file and the problem, as in `runs/x: No space left on device`."""
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if error.filename else reason


def one_line(text: str) -> str:
    """`text` as one line of printable characters, in which a long word, and a long whole, lose their middle."""
    if len(text) <= MAX_WORD and text.isprintable():
        return text
    words = _without_middle(text, 2 * MAX_SENTENCE).split()
    line = " ".join(_without_middle(_printable(word), MAX_WORD) for word in words)
    return _without_middle(line, MAX_SENTENCE)


def _without_middle(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length // 2]}…{text[-length // 2 :]}"


def _printable(word: str) -> str:
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in word)


def suggestion(given: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` where one of `known` is near to `given`, otherwise the whole list."""
    names = sorted(known)
    if (near := _nearest(str(given), names)) is not None:
        return f"; did you mean {near!r}?"
    return f"; known are: {', '.join(names)}" if names else ""


def _nearest(given: str, names: Sequence[str]) -> str | None:
    """A name that `given` is nearly, or abbreviates (lr for learning_rate), or shares its longest word with."""
    if near := difflib.get_close_matches(given, names, n=1, cutoff=0.6):
        return near[0]
    words = {name: re.split(r"[-_.]", name) for name in names}
    for name, parts in words.items():
        if len(given) > 1 and given == "".join(part[:1] for part in parts):
            return name
    for word in sorted(re.split(r"[-_.]", given), key=len, reverse=True):
        for name, parts in words.items():
            if len(word) > 3 and any(part in (word, f"{word}s", word.removesuffix("s")) for part in parts):
                return name
    return None
