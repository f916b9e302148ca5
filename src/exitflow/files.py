"""Files, read within bounds and written whole.

A file is read only if it is a regular one of no more than an agreed size, so that no pipe, device or slip of a finger
stalls a program or fills its memory. It is written so that a reader sees the old one or the new one, never a half,
even after a crash.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from exitflow.errors import BusyError

MiB = 2**20
SMALL_FILE = 4 * MiB  # the most that is read of what a person has written, or what describes a single thing
MEDIUM_FILE = 64 * MiB  # ... of what exitflow has written with an entry for each node
MAX_SYNCING = 32  # files that are waited for at once
LARGE_FILE = 2048 * MiB  # ... of data, weights and records


def read_file(path: Path, limit: int = SMALL_FILE) -> bytes:
    """The bytes of a regular file of at most `limit` bytes; an OSError for everything else."""
    with open_regular(path, limit) as file:
        expected = max(os.fstat(file.fileno()).st_size, min(limit, MiB))  # files in /proc say that they are empty
        data = file.read(expected + 1)
    if len(data) > expected:
        raise OSError(errno.EFBIG, "grows while it is read", str(path))
    return data


def open_regular(path: Path, limit: int = LARGE_FILE) -> BinaryIO:
    """A regular file of at most `limit` bytes, opened for reading; an OSError for everything else, without waiting."""
    if "\0" in str(path):
        raise OSError(errno.EINVAL, "no name of a file holds a zero byte", str(path))
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # or a pipe would wait for its writer
    try:
        _check_regular(os.fstat(descriptor), path, limit)
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def _check_regular(found: os.stat_result, path: Path, limit: int) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise OSError(errno.EISDIR, "is a directory", str(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    if found.st_size > limit:
        problem = f"has {found.st_size:,} bytes, and at most {limit:,} are read of such a file"
        raise OSError(errno.EFBIG, problem, str(path))


def write_atomically(path: Path, data: bytes, *, mode: int = 0o666, lasting: bool = True) -> None:
    """Replace `path` by `data`: temporary file beside it, fsync, rename, fsync of the folder.

    The umask is taken from `mode`. A file that is not `lasting` survives a kill of the process, but a crash of the
    machine only once `sync_files` was called.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            file.write(data)
            file.flush()
            if lasting:
                os.fsync(file.fileno())
        temporary.replace(path)
        if lasting:
            sync_folder(path.parent)
    except OSError as error:  # a full disk does not say of which file, and the temporary one says nobody anything
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        temporary.unlink(missing_ok=True)


def append_line(path: Path, line: bytes) -> None:
    """Add a line to a file, which is begun where there is none. A kill may leave a part of it, without its end."""
    begun = path.exists()
    with path.open("ab") as file:
        file.write(line + b"\n")
        file.flush()
        os.fsync(file.fileno())
    if not begun:
        sync_folder(path.parent)


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, that a crash of the machine cannot take away again."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


def sync_files(paths: Sequence[Path]) -> None:
    """Wait until all these files are safely on disk: at once, which takes hardly longer than for one of them."""
    if paths:
        with ThreadPoolExecutor(min(len(paths), MAX_SYNCING)) as threads:
            list(threads.map(_sync_file, paths))
            list(threads.map(sync_folder, {path.parent for path in paths}))


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are safely on disk; without that, a crash may undo a rename."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot do that
            raise
    finally:
        os.close(descriptor)


def is_leftover(path: Path) -> bool:
    """Whether it is what a kill has left of a file that `write_atomically` was writing."""
    return path.name.startswith(".") and path.name.endswith(".tmp")


def write_secret(path: Path, data: bytes) -> None:
    """A file that only its owner may read."""
    write_atomically(path, data, mode=0o600)


@contextmanager
def locked(path: Path, problem: str, *, wait: bool = False) -> Iterator[None]:
    """Only one process is in here at a time; others wait for it, or get a BusyError. The lock ends with the process.

    It is a POSIX lock, which workers do not inherit: one that outlives its parent for a moment holds up nobody.
    """
    with path.open("w") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except (BlockingIOError, PermissionError):
            raise BusyError(problem) from None
        yield
