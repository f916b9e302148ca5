"""Writing files so that a reader sees the old one or the new one, never a half, even after a crash."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from exitflow.errors import BusyError


def write_atomically(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Replace `path` by `data`: temporary file beside it, fsync, rename. The umask is taken from `mode`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:  # a full disk does not say of which file, and the temporary one says nobody anything
        error.filename, error.filename2 = str(path), None
        raise
    finally:
        temporary.unlink(missing_ok=True)


def is_leftover(path: Path) -> bool:
    """Whether it is what a kill has left of a file that `write_atomically` was writing."""
    return path.name.startswith(".") and path.name.endswith(".tmp")


def write_secret(path: Path, data: bytes) -> None:
    """A file that only its owner may read."""
    write_atomically(path, data, mode=0o600)


@contextmanager
def locked(path: Path, problem: str) -> Iterator[None]:
    """Only one process is in here at a time; a BusyError for others. The lock ends with the process, however it ends.

    It is a POSIX lock, which workers do not inherit: one that outlives its parent for a moment holds up nobody.
    """
    with path.open("w") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise BusyError(problem) from None
        yield
