"""What a long-lived process says about itself: one log on stderr, as text or as JSON lines.

Whatever a peer sent may stand in a log, so no record can look like another or fill the disk. A record is one line, or
one and an indented traceback; what cannot be printed is escaped, so that a log is valid UTF-8 without control
characters; long texts are cut. Each place in the code that logs may write a hundred records at once and one a second
after that. Modules log through `logging.getLogger("exitflow....")`, and give fields that a machine should find again
with `extra=about(peer=..., request=...)`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TextIO, get_args

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
FORMATS: tuple[str, ...] = get_args(LogFormat)
LEVELS: tuple[str, ...] = get_args(LogLevel)

MAX_TEXT = 2_000  # characters of a message or a field
MAX_TRACEBACK = 20_000  # characters
BURST, PER_SECOND = 100, 1.0  # records of one place in the code
LEFT_OUT = "(more of these are left out for a while)"
THIRD_PARTIES = ("asyncio", "flwr", "grpc", "httpx", "uvicorn")  # below warnings they tell an operator nothing


def set_up(level: str = "info", style: str = "text", *, who: str = "") -> None:
    """Let all loggers of this process write to stderr; `who` is the node or program that speaks.

    gRPC's core writes to stderr past every logger, a peer's text included. So it is told to keep to its own errors,
    unless $GRPC_VERBOSITY says otherwise; this must be called before grpc is imported.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    handler = BoundedHandler()
    handler.setFormatter(_JsonLines(who) if style == "json" else _TextLines(who))
    root = logging.getLogger()
    for old in [each for each in root.handlers if isinstance(each, BoundedHandler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    for name in THIRD_PARTIES:
        logging.getLogger(name).setLevel(max(root.level, logging.WARNING))
    logging.captureWarnings(True)


def set_up_sentences(program: str) -> None:
    """Where nobody sets up a log, let warnings stand on stderr as the program's other sentences do, each once."""
    logging.lastResort = _Sentences(program)


def about(**fields: object) -> dict[str, Any]:
    """`extra` of a record: names and values that stand in it as such. Those that are None are left out."""
    return {"about": {name: value for name, value in fields.items() if value is not None}}


def printable(text: str, most: int = MAX_TEXT) -> str:
    """The text in one line, with whatever is not printable escaped, cut after `most` characters."""
    cut = text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"
    if cut.isprintable():
        return cut
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode() for char in cut
    )


@dataclass
class _Budget:
    """How many more records one place in the code may write."""

    left: float
    updated: float

    def take(self, now: float) -> bool:
        """One more, if there is."""
        self.left = min(self.left + max(now - self.updated, 0.0) * PER_SECOND, BURST)
        self.updated = max(now, self.updated)
        if self.left < 1:
            return False
        self.left -= 1
        return True


class BoundedHandler(logging.StreamHandler[TextIO]):
    """Leaves out records of a place in the code that has used up its budget, and says so once."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self._budgets: dict[tuple[str, int], _Budget] = {}  # one for each place, of which there are finitely many

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        """What is stderr at this moment: tests and notebooks replace it."""
        return sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        """The handler's lock is held here."""
        budget = self._budgets.setdefault((record.pathname, record.lineno), _Budget(BURST, record.created))
        if budget.take(record.created):
            record.is_last = budget.left < 1
            super().emit(record)


class _Sentences(BoundedHandler):
    """Warnings of a command that somebody waits for."""

    def __init__(self, program: str) -> None:
        super().__init__()
        self.setLevel(logging.WARNING)
        self._program, self._said = program, set[str]()

    def format(self, record: logging.LogRecord) -> str:
        return f"{self._program}: warning: {printable(record.getMessage())}"

    def emit(self, record: logging.LogRecord) -> None:
        sentence = self.format(record)
        if sentence not in self._said:
            self._said.add(sentence)
            super().emit(record)


class _TextLines(logging.Formatter):
    """`2026-11-19 06:12:00,123 edge-0 WARNING what happened (peer=127.0.0.1:4711)`."""

    def __init__(self, who: str) -> None:
        super().__init__()
        self._who = f"{printable(who)} " if who else ""

    def format(self, record: logging.LogRecord) -> str:
        fields = ", ".join(f"{name}={value}" for name, value in _fields(record).items())
        parts = [f"{self.formatTime(record)} {self._who}{record.levelname}", printable(record.getMessage())]
        parts += [f"({fields})"] if fields else []
        parts += [LEFT_OUT] if getattr(record, "is_last", False) else []
        trace = [f"    | {printable(line)}" for line in _traceback(self, record).splitlines()]
        return "\n".join([" ".join(parts), *trace])


class _JsonLines(logging.Formatter):
    """An object for each record, on one line."""

    def __init__(self, who: str) -> None:
        super().__init__()
        self._who = {"node": printable(who)} if who else {}

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        head = {"time": f"{seconds}.{int(record.msecs):03d}Z", "level": record.levelname.lower()}
        tail = {"logger": record.name, "message": printable(record.getMessage())}
        trace = [printable(line) for line in _traceback(self, record).splitlines()]
        more: dict[str, Any] = {"traceback": trace} if trace else {}
        if getattr(record, "is_last", False):
            more["more_left_out"] = True
        fields = {name: value for name, value in _fields(record).items() if name not in head | tail | more}
        return json.dumps({**head, **self._who, **tail, **fields, **more}, ensure_ascii=False)


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    """Numbers as they are; all else as printable text."""
    found: Mapping[str, Any] = getattr(record, "about", {})
    return {name: value if _is_number(value) else printable(str(value)) for name, value in found.items()}


def _is_number(value: object) -> bool:
    """Whether JSON has it as a number, or as true and false."""
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    if not record.exc_info:
        return ""
    text = formatter.formatException(record.exc_info)
    return text if len(text) <= MAX_TRACEBACK else f"{text[: MAX_TRACEBACK // 2]}\n...\n{text[-MAX_TRACEBACK // 2 :]}"
