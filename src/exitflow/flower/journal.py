"""The journal of a federation: what happens in a training, an event a line, in the folder of the server.

The training writes it, the server's log repeats it, and `exitflow federation status` adds it up. Each line is a JSON
object with the time and one of these events:

    training   one begins or goes on: its run directory, and how many rounds it will have
    round      its tasks go out: to which nodes
    update     one came: of which node, its loss, bytes and seconds
    missing    none came of a node, or one that was refused: why
    end        the training is over: the problem, if it did not finish
"""

from __future__ import annotations

import datetime
import fcntl
import json
import logging
import math
import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from exitflow.config import parse_json
from exitflow.federated.types import Missing, Task, Update
from exitflow.files import LARGE_FILE, read_file
from exitflow.logs import about

Event = dict[str, Any]

FILE = "journal.jsonl"
ROTATED_AT = 16 << 20  # bytes: a training that finds more begins a new journal

log = logging.getLogger("exitflow.federation")


@dataclass(frozen=True)
class Journal:
    """Writes down what happens in a training, and tells the log of this process."""

    file: BinaryIO | None = None  # where nobody keeps a journal, only the log is told

    def tasks(self, tasks: Sequence[Task]) -> None:
        """The tasks of a round go out; there may be none."""
        if tasks:
            self._write("round", round=tasks[0].round, nodes=[task.node for task in tasks])

    def answer(self, answer: Update | Missing) -> None:
        """An update came, or did not."""
        task = answer.task
        down, up = answer.wire_bytes or (0, 0)
        seconds = None if answer.seconds is None else round(answer.seconds, 3)
        who = {"node": task.node, "round": task.round, "bytes_down": down, "bytes_up": up, "seconds": seconds}
        if isinstance(answer, Update):
            losses = [loss for loss in answer.losses if loss is not None and math.isfinite(loss)]
            self._write("update", **who, loss=round(statistics.fmean(losses), 6) if losses else None)
        else:
            self._write("missing", **who, refused=answer.refused, reason=answer.reason)

    def _write(self, event: str, **fields: Any) -> None:
        written: Event = {"time": _now(), "event": event, **fields}
        tell(written, logging.INFO)
        if self.file:
            self.file.write(json.dumps(written).encode() + b"\n")
            self.file.flush()


@contextmanager
def keeping_journal(folder: Path | None, *, run: Path, rounds: int) -> Iterator[Journal]:
    """The journal of a training, as long as it lasts; `folder` is the server's, None where there is none.

    A lock that ends with this process, however it ends, says meanwhile that a training goes on.
    """
    if folder is None:
        yield Journal()
        return
    with (folder / FILE).open("a+b") as file:
        fcntl.lockf(file, fcntl.LOCK_SH)
        if file.tell() > ROTATED_AT:
            file.truncate(0)
        journal = Journal(file)
        journal._write("training", run=str(run.resolve()), rounds=rounds, process=os.getpid())
        try:
            yield journal
        except BaseException as error:
            journal._write("end", problem=str(error) or "it was interrupted")
            raise
        journal._write("end", problem=None)


def is_being_kept(folder: Path) -> bool:
    """Whether a training goes on and writes the journal."""
    try:
        with (folder / FILE).open("r+b") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except (BlockingIOError, PermissionError):
        return True
    return False


def read_journal(folder: Path) -> list[Event]:
    """All whole events; none where there is no journal."""
    try:
        return _events(read_file(folder / FILE, LARGE_FILE))
    except FileNotFoundError:
        return []


class Follower:
    """Reads what is added to the journal of a federation."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._read = self._size()

    def new(self) -> list[Event]:
        """What was added since the last time."""
        size = self._size()
        if size < self._read:  # a new one was begun
            self._read = 0
        if size == self._read:
            return []
        with self._path.open("rb") as file:
            file.seek(self._read)
            added = file.read(size - self._read)
        whole = added[: added.rfind(b"\n") + 1]
        self._read += len(whole)
        return _events(whole)

    def _size(self) -> int:
        return self._path.stat().st_size if self._path.is_file() else 0


def tell(event: Event, most: int = logging.WARNING) -> None:
    """Tell the log of this process what has happened; what went wrong, at the level `most`."""
    fields = {name: value for name, value in event.items() if name not in ("time", "event", "nodes", "reason")}
    went_wrong = event.get("event") == "missing" or event.get("problem")
    log.log(most if went_wrong else logging.INFO, _sentence(event), extra=about(**fields))


def _sentence(event: Event) -> str:
    what, node, round = event.get("event"), event.get("node"), event.get("round")
    if what == "training":
        return f"a training of {event.get('rounds')} rounds has come: {event.get('run')}"
    if what == "round":
        return f"round {round}: tasks for {len(event.get('nodes', ()))} nodes"
    if what == "update":
        return f"round {round}: node {node!r} has sent its update, {event.get('bytes_up')} bytes"
    if what == "missing":
        verb = "is refused" if event.get("refused") else "is missing"
        return f"round {round}: the update of node {node!r} {verb}: {event.get('reason')}"
    return f"the training ended: {event.get('problem') or 'all rounds are done'}"


def _events(lines: bytes) -> list[Event]:
    found = []
    for line in lines.splitlines(keepends=True):
        if not line.endswith(b"\n"):  # a kill has cut it off
            continue
        try:
            event = parse_json(line)
        except ValueError:
            continue
        if isinstance(event, dict) and isinstance(event.get("event"), str):
            found.append(event)
    return found


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
