"""Writing files so that a reader sees the old one or the new one, never a half, even after a crash."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, data: bytes) -> None:
    """Replace `path` by `data`: temporary file beside it, fsync, rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:  # a full disk does not say of which file
        error.filename = error.filename or str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def is_leftover(path: Path) -> bool:
    """Whether it is what a kill has left of a file that `write_atomically` was writing."""
    return path.name.startswith(".") and path.name.endswith(".tmp")


def write_secret(path: Path, data: bytes) -> None:
    """A file that only its owner may read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
