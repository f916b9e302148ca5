"""All nodes of a bundle as processes on this machine, on loopback; what `exitflow up` starts."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import selectors
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from exitflow.errors import ConfigError, ServingError
from exitflow.files import read_file, write_atomically
from exitflow.free_ports import HOST, free_ports
from exitflow.serving.bundle.bundle import Bundle

log = logging.getLogger("exitflow.serving")

READY_SECONDS = 60.0
STOP_SECONDS = 10.0
FIRST_PAUSE, LAST_PAUSE = 1.0, 60.0  # seconds before a node that ended is started again
FIRST_PORT = 1024  # those below are for the system's own services


@dataclass(frozen=True)
class Place:
    """Where a node of the tree listens."""

    grpc: str
    http: str


class LocalCluster:
    """Started and stopped as one; single nodes can be killed and started again, on the same ports."""

    def __init__(
        self,
        bundle: Bundle,
        *,
        options: Sequence[str] = (),
        options_of: Mapping[str, Sequence[str]] | None = None,
        logs: Path | None = None,
        base_port: int | None = None,
    ) -> None:
        """`options` go to every `exitflow serve`, `options_of` to that of a node; what they log goes to `logs`.

        Without `logs` it goes to stderr. The nodes, in the order of the bundle, take two ports each from `base_port`,
        gRPC and HTTP; else any free ones.
        """
        self._options_of = options_of or {}
        self.bundle, self._options, self._logs = bundle, list(options), logs
        names = [node.name for node in bundle.topology.nodes]
        ports = free_ports(2 * len(names)) if base_port is None else _ports_from(base_port, 2 * len(names))
        self.places = {
            name: Place(f"{HOST}:{ports[2 * index]}", f"{HOST}:{ports[2 * index + 1]}")
            for index, name in enumerate(names)
        }
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._pauses: dict[str, float] = {}  # before the next start of nodes that ended
        self._due: dict[str, float] = {}  # when it is

    @property
    def processes(self) -> Mapping[str, subprocess.Popen[str]]:
        """Those that were started and not stopped."""
        return self._processes

    def start(self, names: Sequence[str] = (), *, bundle: Path | None = None, options: Sequence[str] = ()) -> None:
        """These nodes, or all; returns when they are ready."""
        chosen = list(names) or list(self.places)
        try:
            for name in chosen:
                self._processes[name] = self._spawn(name, bundle or self.bundle.path, options)
            deadline = time.monotonic() + READY_SECONDS
            for name in chosen:
                self._read_ready_line(name, deadline)
        except BaseException:
            self.stop()
            raise

    def stop(self, names: Sequence[str] = (), *, how: int = signal.SIGTERM) -> None:
        """These nodes, or all; returns when they are gone."""
        chosen = [name for name in (list(names) or list(self._processes)) if name in self._processes]
        for name in chosen:
            with contextlib.suppress(ProcessLookupError):
                self._processes[name].send_signal(how)
        for name in chosen:
            process = self._processes.pop(name)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for stream in (process.stdin, process.stdout):
                if stream:
                    stream.close()

    def ended(self) -> Iterator[tuple[str, int]]:
        """Nodes that ended by themselves, with their exit code; each is named once."""
        for name, process in list(self._processes.items()):
            code = process.poll()
            if code is not None:
                self.stop([name])
                yield name, code

    def keep_running(self, now: float) -> None:
        """Start nodes again that ended by themselves, ever more rarely; `now` is in seconds, and calls are frequent."""
        for name, code in self.ended():
            pause = self._pauses.get(name, FIRST_PAUSE)
            self._pauses[name], self._due[name] = min(2 * pause, LAST_PAUSE), now + pause
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            log.warning("node %s %s; it is started again in %g s", name, how, pause)
        for name in [name for name, due in self._due.items() if due <= now]:
            del self._due[name]
            self._processes[name] = self._spawn(name, self.bundle.path, ())
            log.info("node %s is started again", name)

    def _spawn(self, name: str, bundle: Path, options: Sequence[str]) -> subprocess.Popen[str]:
        place = self.places[name]
        parents = [f"--parent={link.name}={self.places[link.name].grpc}" for link in self.bundle.node(name).parents]
        command = [sys.executable, "-m", "exitflow", "serve", str(bundle), "--node", name, "--until-stdin-closes"]
        command += ["--listen", place.grpc, "--http", place.http, *parents, *self._options]
        command += [*self._options_of.get(name, ()), *options]
        log: IO[Any] | None = (self._logs / f"{name}.log").open("a") if self._logs else None
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # Ctrl-C is for `up`, which then stops the nodes in order
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )
        finally:
            if log:
                log.close()

    def _read_ready_line(self, name: str, deadline: float) -> None:
        process = self._processes[name]
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(max(deadline - time.monotonic(), 0)):
                raise ServingError(f"node {name!r} was not ready within {READY_SECONDS:g} s")
        if not process.stdout.readline():
            problem = f"node {name!r} ended with exit code {process.wait()} before it was ready"
            raise ServingError(f"{problem}: {self._last_words(name)}")

    def _last_words(self, name: str) -> str:
        """The end of its log, which may be gone when somebody looks for it."""
        lines = (self._logs / f"{name}.log").read_text(errors="replace").splitlines() if self._logs else []
        return lines[-1] if lines else "its log says why"

    def __enter__(self) -> LocalCluster:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @contextlib.contextmanager
    def announced(self) -> Iterator[None]:
        """While it runs, `running_tree` finds it."""
        path = _announcement(self.bundle.path)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_private(path.parent):
            problem = "may be written by others; set $XDG_RUNTIME_DIR to a directory of your own"
            raise ServingError(f"{path.parent}: {problem}")
        places = {name: asdict(place) for name, place in self.places.items()}
        write_atomically(path, json.dumps({"pid": os.getpid(), "places": places}).encode())
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _ports_from(first: int, count: int) -> range:
    if not FIRST_PORT <= first <= 65536 - count:
        problem = f"must be between {FIRST_PORT} and {65536 - count}, for {count} ports from there, got {first}"
        raise ConfigError(problem, key="--base-port")
    return range(first, first + count)


def running_tree(bundle: Path) -> dict[str, Place] | None:
    """Where the nodes listen that `exitflow up` started of this bundle, if they still run."""
    path = _announcement(bundle)
    try:
        if not _is_private(path.parent):
            return None  # who knows where it would send the token
        found = json.loads(read_file(path))
        os.kill(found["pid"], 0)
        return {name: Place(**place) for name, place in found["places"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _is_private(folder: Path) -> bool:
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def _announcement(bundle: Path) -> Path:
    """In a directory of the user's own for things that last as long as processes."""
    home = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    name = hashlib.sha256(str(bundle.resolve()).encode()).hexdigest()[:16]
    return Path(home) / f"exitflow-{os.getuid()}" / f"{name}.json"
