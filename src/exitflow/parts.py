"""A user's own part at a seam of exitflow's: `module:function` in a system file, or the function itself from Python.

A file and a run directory hold names, never code, so a function from Python must be one that its module has under
its own name: then whoever reads the name, another process or a later session, finds the same function.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from exitflow.config import require
from exitflow.errors import ConfigError, suggestion

if TYPE_CHECKING:
    Part = Any  # a name, or, from Python, the function itself
else:
    Part = str  # what a file holds

REMOVED = "removed:"  # stands before the name of a part that exitflow once had, in a run that was trained with it


def is_own(name: str) -> bool:
    """Whether a name is of the form `package.module:function`."""
    module, _, function = name.partition(":")
    return all(part.isidentifier() for part in (*module.split("."), function))


def check_part(key: str, name: str, known: Iterable[str], what: str) -> None:
    """Refuse a name that is neither one of `known` nor of the form `module:function`."""
    known = list(known)
    hint = suggestion(name, known)
    own = f"{' One' if hint.endswith('?') else '; one'} of your own is 'package.module:function'"
    problem = f"there is no {what} {name!r}{hint}{own}"
    require(name in known or is_own(name), key, problem)


def take_part(spec: Any, key: str, known: Iterable[str], what: str) -> None:
    """Check the part at `key` of a frozen specification, and replace a function by its name."""
    object.__setattr__(spec, key, part_name(key, getattr(spec, key)))
    check_part(key, getattr(spec, key), known, what)


def load_part(name: str, *, key: str) -> Callable[..., Any]:
    """The function that `module:function` names."""
    if name.startswith(REMOVED):
        problem = f"{name.removeprefix(REMOVED)!r} has been removed; a run that was trained with it can still be used"
        raise ConfigError(f"{problem}, but not be gone on with", key=key)
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        problem = f"cannot import {name!r} ({error}); is its folder on PYTHONPATH?"
        raise ConfigError(problem, key=key) from None
    except (Exception, SystemExit) as error:  # whatever the user's module does when it is imported
        raise ConfigError(f"importing {name!r} failed: {type(error).__name__}: {error}", key=key) from None
    require(callable(found), key, f"{name!r} must be a function, got {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def part_name(key: str, part: str | Callable[..., Any]) -> str:
    """The name of a part that may be given as a function; a name stays as it is."""
    if isinstance(part, str):
        return part
    require(callable(part), key, f"expected a name or a function, got {part!r}")
    module, function = getattr(part, "__module__", ""), getattr(part, "__qualname__", "")
    found = getattr(sys.modules.get(module), function, None) is part
    problem = f"{part!r} is not found under a name of its module, by which a run remembers it"
    require(found, key, f"{problem}; define it with `def` at the top level")
    return f"{module}:{function}"
