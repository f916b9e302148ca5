"""From TOML values to frozen dataclasses, and back.

A specification is a frozen dataclass whose annotations say what TOML may hold: `int`, `float`, `bool`, `str`,
`Literal[...]`, `X | None` (an absent key), `tuple[X, ...]`, `dict[str, X]`, or another specification. `decode` checks
a parsed TOML value against it and names the key of the first thing that does not fit. A specification checks the
ranges of its own fields in `__post_init__` with `require`, and their types with `check_fields`, so it is just as safe
to build from Python.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from exitflow.errors import ConfigError, suggestion
from exitflow.files import SMALL_FILE, read_file

T = TypeVar("T")
Changes = Mapping[str, Any] | Sequence[str]  # {"training.rounds": 5}, or ["training.rounds=5"]

MAX_KEY_PARTS = 8  # of a dotted key: tomllib makes tables for every prefix of it, which takes memory without end
_KEY_PART = r"""(?:[\w-]+|"[^"\n]*"|'[^'\n]*')"""
_LONG_KEY = re.compile(rf"(?:^|[\[{{,])[ \t]*{_KEY_PART}(?:[ \t]*\.[ \t]*{_KEY_PART}){{{MAX_KEY_PARTS}}}", re.MULTILINE)

MAX_RATE = 1e15  # requests/s; sums of rates stay finite, and exact to a request


def require(condition: bool, key: str, problem: str) -> None:
    """Raise a ConfigError at `key` unless `condition` holds."""
    if not condition:
        raise ConfigError(problem, key=key)


def require_rate(value: float | None, key: str) -> None:
    """A rate in requests/s: finite and not negative; None where there is no limit."""
    valid = value is None or 0 <= value <= MAX_RATE
    require(valid, key, f"a rate must be a finite number of requests/s, from 0 to {MAX_RATE:g}, got {value}")


def read_toml(path: Path, limit: int = SMALL_FILE) -> dict[str, Any]:
    """The parsed file of at most `limit` bytes, or a ConfigError that names it."""
    try:
        return parse_toml(read_file(path, limit).decode("utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError("no such file", source=str(path)) from None
    except IsADirectoryError:
        raise ConfigError("is a directory, a TOML file is needed", source=str(path)) from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", source=str(path)) from None
    except UnicodeDecodeError:
        raise ConfigError("is not a text file in UTF-8", source=str(path)) from None
    except ConfigError as error:
        raise error.within(source=str(path)) from None


def parse_toml(text: str) -> dict[str, Any]:
    """The parsed text, or a ConfigError."""
    if _LONG_KEY.search(text):
        raise ConfigError(f"holds a dotted key of more than {MAX_KEY_PARTS} parts")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits is a ValueError, [[[... a RecursionError
        raise ConfigError(f"is not valid TOML: {error}") from None


def parse_json(text: bytes) -> Any:
    """The parsed text; NaN and infinity, which are no JSON, are a ValueError as all else that is none."""
    try:
        return json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def parse_assignment(text: str, example: str = "training.rounds=5") -> tuple[str, Any]:
    """`training.rounds=5` as ("training.rounds", 5); the value is TOML, or else a plain string."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not all(key.split(".")):
        raise ConfigError(f"expected key=value, such as {example}, got {text!r}", key="--set")
    try:
        return key, parse_toml(f"value = {value}")["value"]
    except ConfigError:
        return key, value


def parse_changes(given: Changes, example: str = "training.rounds=5") -> dict[str, Any]:
    """Dotted keys with the values that they are changed to; of two texts for one key the last holds."""
    if isinstance(given, Mapping):
        return {str(key): value for key, value in given.items()}
    listed = isinstance(given, Sequence) and not isinstance(given, str)
    require(listed, "overrides", f"expected a mapping, or texts such as {example!r} in a list, got {given!r}")
    found: dict[str, Any] = {}
    for text in given:
        key, value = parse_assignment(str(text), example)
        found.pop(key, None)
        found[key] = value
    return found


def assign(table: dict[str, Any], key: str, value: Any) -> None:
    """Set `value` at the dotted `key`, making tables on the way; in an array of tables, a name finds its table."""
    path = key.split(".")
    place: Any = table
    for name in path[:-1]:
        place = _named(place, name) if isinstance(place, list) else place.setdefault(name, {})
        if not isinstance(place, dict | list):
            raise ConfigError("is not a table, so nothing can be set inside it", key=name)
    if isinstance(place, list):
        raise ConfigError(f"is an array of tables: say of which, such as {path[-2]}.NAME.{path[-1]}", key=path[-2])
    place[path[-1]] = value


def _named(tables: list[Any], name: str) -> Any:
    """The table of an array that has this `name`."""
    names = {str(table.get("name")): table for table in tables if isinstance(table, dict)}
    if name not in names:
        raise ConfigError(f"there is none of that name{suggestion(name, names)}", key=name)
    return names[name]


def located(key: str, function: Callable[..., T], *args: Any) -> T:
    """`function(*args)`, with the key added to the error it may raise."""
    try:
        return function(*args)
    except ConfigError as error:
        raise error.within(key) from None


def decode(kind: type[T], value: Any) -> T:
    """`value`, as parsed from TOML, checked and turned into the dataclass `kind`."""
    return typing.cast(T, _decode_dataclass(kind, value))


def check_keys(table: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse the first key that is not known, with the nearest one that is."""
    known = list(known)
    for key in table:
        if key not in known:
            raise ConfigError(f"unknown key{suggestion(key, known)}", key=key)


def require_table(value: Any) -> dict[str, Any]:
    """`value` if it is a TOML table."""
    if not isinstance(value, dict):
        raise ConfigError(f"expected a table, got {_describe(value)}")
    return value


def decode_list(kind: type[T], value: Any, key: str) -> list[T]:
    """An array of tables, such as [[tiers]]."""
    if not isinstance(value, list):
        raise ConfigError(f"expected an array of tables ([[{key}]]), got {_describe(value)}", key=key)
    return [located(f"{key}[{index}]", decode, kind, item) for index, item in enumerate(value)]


def encode(spec: Any) -> dict[str, Any]:
    """A specification as TOML values; what is None is left out."""
    fields = ((field.name, getattr(spec, field.name)) for field in dataclasses.fields(spec))
    return {name: _encode(value) for name, value in fields if value is not None}


def _encode(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return encode(value)
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _encode(item) for key, item in value.items()}
    return value


@functools.cache
def _schema(kind: type) -> dict[str, tuple[Any, bool]]:
    """Each field's name, annotation, and whether it must be given."""
    hints = typing.get_type_hints(kind)
    missing = dataclasses.MISSING
    return {
        field.name: (hints[field.name], field.default is missing and field.default_factory is missing)
        for field in dataclasses.fields(kind)
        if field.init
    }


def _decode_dataclass(kind: type, value: Any) -> Any:
    table = require_table(value)
    schema = _schema(kind)
    check_keys(table, schema)
    for name, (_, required) in schema.items():
        require(name in table or not required, name, "is missing")
    return kind(**{name: located(name, _decode, schema[name][0], item) for name, item in table.items()})


def _decode(hint: Any, value: Any) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _decode_dataclass(typing.cast(type, hint), value)
    if origin is Literal:
        return _decode_choice(args, value)
    if origin in (Union, types.UnionType):
        return None if value is None and type(None) in args else _decode_union(args, value)
    if origin is tuple:
        return _decode_tuple(args[0], value)
    if origin is dict:
        return {key: located(key, _decode, args[1], item) for key, item in require_table(value).items()}
    return _decode_scalar(hint, value)


def check_fields(spec: Any) -> None:
    """Refuse a specification built from Python one of whose fields holds something else than it says."""
    kind: type = type(spec)
    for name, (hint, _) in _schema(kind).items():
        value = getattr(spec, name)
        choices = _choices(hint, in_list=isinstance(value, tuple))
        for item in value if isinstance(value, tuple) else [value]:
            if choices and item is not None:
                located(name, _decode_choice, choices, item)
        require(_fits(hint, value), name, f"expected {_expected(hint)}, got {_describe(value)}")


def _fits(hint: Any, value: Any) -> bool:
    """Whether a value from Python is what a field says, where that is made of what TOML may hold."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(option, value) for option in args)
    if origin is tuple:
        return isinstance(value, tuple | list) and all(_fits(args[0], item) for item in value)
    if origin is dict:
        return isinstance(value, Mapping)
    if hint in (int, float):
        return isinstance(value, int if hint is int else int | float) and not isinstance(value, bool)
    return isinstance(value, hint) if hint in (str, bool, types.NoneType) else True


def _expected(hint: Any) -> str:
    args = [each for each in get_args(hint) if each not in (types.NoneType, Ellipsis)]
    if get_origin(hint) is tuple:
        return "a tuple"
    return "a mapping" if get_origin(hint) is dict else _SCALARS.get(args[0] if args else hint, "something else")


def _choices(hint: Any, *, in_list: bool) -> tuple[Any, ...]:
    """The values that a Literal allows: alone or as one of several types, or, for what stands in a list, in a tuple."""
    if get_origin(hint) is Literal:
        return () if in_list else get_args(hint)
    if get_origin(hint) is tuple:
        return _choices(get_args(hint)[0], in_list=False) if in_list else ()
    if get_origin(hint) in (Union, types.UnionType):
        return next((found for each in get_args(hint) if (found := _choices(each, in_list=in_list))), ())
    return ()


def _decode_choice(choices: tuple[Any, ...], value: Any) -> Any:
    if value in choices:
        return value
    raise ConfigError(f"must be one of {', '.join(map(repr, choices))}, got {_describe(value)}")


def _decode_union(options: tuple[Any, ...], value: Any) -> Any:
    """By the one option that a list, or a single value, can be meant for."""
    options = tuple(option for option in options if option is not type(None))
    fitting = [option for option in options if (get_origin(option) is tuple) == isinstance(value, list | tuple)]
    return _decode((fitting or options)[0], value)


def _decode_tuple(item_hint: Any, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"expected a list, got {_describe(value)}")
    return tuple(located(f"[{index}]", _decode, item_hint, item) for index, item in enumerate(value))


_SCALARS = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}


def _decode_scalar(hint: Any, value: Any) -> Any:
    if type(value) is int and abs(value) >= 2**63:  # what TOML promises to hold
        raise ConfigError(f"expected {_SCALARS[hint]} of at most 64 bits, got one of {len(str(abs(value)))} digits")
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is hint:
        return value
    raise ConfigError(f"expected {_SCALARS[hint]}, got {_describe(value)}")


def _describe(value: Any) -> str:
    if isinstance(value, dict):
        return "a table"
    return f"the list {value!r}" if isinstance(value, list) else repr(value)
