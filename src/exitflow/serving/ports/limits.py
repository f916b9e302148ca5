"""How many callers a node bears, and for how long: whatever waits for a caller is bounded in number and in time."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

ANSWER_SECONDS = 30.0  # for an answer to be taken
MAX_CONNECTIONS = 4096  # of a port
MAX_FILES = 65_536  # which a process may well have open
_OWN_FILES = 96  # that the node itself needs, and its links
_PORTS = 3
_ESTABLISHED = "01"  # in /proc/net/tcp


class Patience:
    """Waits that are bounded in number: one too many, and the one that lasts longest is given up."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._waits: dict[object, Callable[[], object]] = {}  # how each is given up, the oldest first

    def begin(self, wait: object, give_up: Callable[[], object]) -> None:
        """Count one more that has begun."""
        if len(self._waits) >= self._most:
            self._waits.pop(next(iter(self._waits)))()
        self._waits[wait] = give_up

    def end(self, wait: object) -> None:
        """What was waited for came, or the wait was given up."""
        self._waits.pop(wait, None)

    @contextlib.asynccontextmanager
    async def at_most(self, seconds: float) -> AsyncIterator[None]:
        """Raises TimeoutError after so many seconds, or earlier if there are too many waits."""
        async with asyncio.timeout(seconds) as wait:

            def give_up() -> None:
                if not wait.expired():
                    wait.reschedule(asyncio.get_running_loop().time())

            self.begin(wait, give_up)
            try:
                yield
            finally:
                self.end(wait)


def raise_file_limit() -> None:
    """Let this process have as many open files as it may: the usual soft limit of 1,024 is one of another time."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def max_connections() -> int:
    """How many connections a port may have, so that all of them leave the node the files that it needs itself."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = MAX_FILES if soft == resource.RLIM_INFINITY else soft
    return min(max((files - _OWN_FILES) // _PORTS, 8), MAX_CONNECTIONS)


def open_connections(ports: Mapping[str, int]) -> dict[str, int]:
    """How many connections each of our ports has, by the kernel's own count; {} where there is no Linux to ask."""
    found: Counter[int] = Counter()
    for table in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/self/net", table).read_text().splitlines()[1:]
        except OSError:
            continue
        for _, local, _, state, *_ in map(str.split, lines):
            if state == _ESTABLISHED:
                found[int(local.rpartition(":")[2], 16)] += 1
    return {kind: found[number] for kind, number in ports.items()} if Path("/proc/self/net").exists() else {}
