"""Programs of Flower's that we start, and that end when we do, however we end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from exitflow.errors import TrainingError
from exitflow.flower.commands import environment
from exitflow.flower.preloaded import SOCKET, end_with_parent, request, write_commands

STARTING = 120.0  # seconds that a program has to start


@dataclass
class RunningProgram:
    """A running program of Flower's."""

    name: str
    pid: int
    log: Path
    _connection: socket.socket
    _exit: int | None = None

    def poll(self, seconds: float = 0.0) -> int | None:
        """Its exit code, once it has ended; waits for that so long at most."""
        if self._exit is None and select.select([self._connection], [], [], seconds)[0]:
            message = self._connection.recv(100)
            self._exit = json.loads(message)["exit"] if message else -signal.SIGKILL
            self._connection.close()
        return self._exit

    def kill(self, signal_number: int = signal.SIGTERM) -> None:
        """Send it a signal, if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal_number)

    def forget(self) -> None:
        """Do not ask any more how it ends."""
        self._connection.close()

    def last_words(self) -> str:
        """The errors at the end of its log, or else the last line."""
        text = re.sub(r"\x1b\[[0-9;]*m", "", self.log.read_text(errors="replace"))
        entries = re.findall(r"^(\w+)\s*: +(.*(?:\n(?!\w+\s*: ).+)*)", text, flags=re.MULTILINE)
        errors = [re.sub(r"^Exit Code: \d+\s*", "", words) for level, words in entries if level == "ERROR"]
        lines = [line for line in text.splitlines() if line.strip()]
        said = " ".join(filter(None, errors)) or (lines or ["it said nothing"])[-1]
        return " ".join(said.split())[:500]


class Programs:
    """Programs by name. `folder` takes Flower's settings, the commands that Flower is to find, and logs."""

    def __init__(self, folder: Path, *, logs: Path | None = None) -> None:
        self._logs = logs or folder / "logs"
        self.stopped = False
        self._logs.mkdir(parents=True, exist_ok=True)
        self._socket = folder / "preloaded"
        self.flower_home = folder / "flower"
        self.env = environment(self.flower_home)
        write_commands(folder / "bin")
        self.env |= {"PATH": f"{folder / 'bin'}{os.pathsep}{self.env['PATH']}", SOCKET: str(self._socket)}
        with (self._logs / "preloaded.log").open("ab") as log:
            self._preloaded = subprocess.Popen(
                [sys.executable, "-m", "exitflow.flower.preloaded", str(self._socket)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.env,
                start_new_session=True,  # Ctrl-C is ours to handle
                preexec_fn=end_with_parent,
            )
        self._running: dict[str, RunningProgram] = {}

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None) -> RunningProgram:
        """Start one of Flower's commands."""
        self._wait_until_loaded()
        log = self._logs / f"{name}.log"
        with log.open("wb") as output:
            pid, connection = request(self._socket, command, {**self.env, **(env or {})}, output.fileno())
        if name in self._running:
            self._running[name].forget()
        self._running[name] = RunningProgram(name, pid, log, connection)
        return self._running[name]

    def flwr(self, commands: Sequence[Sequence[str]], *, tolerate: str | None = None) -> None:
        """Run these commands of Flower's own command line; failures that have that word are tolerated."""
        request = {"commands": [list(command) for command in commands], "tolerate": tolerate}
        program = self.start("flwr", ["exitflow-control", json.dumps(request)])
        code = program.poll(STARTING)
        if code != 0:
            program.kill(signal.SIGKILL)
        self._running.pop("flwr").forget()
        if code != 0:
            raise TrainingError(f"Flower's SuperLink refused: {program.last_words()}")

    def wait_for_port(self, host: str, port: int, *, patience: float = STARTING) -> None:
        """Wait until somebody listens there."""
        give_up = time.monotonic() + patience
        while True:
            self.check()
            try:
                socket.create_connection((host, port), timeout=1).close()
                return
            except OSError as error:
                if time.monotonic() > give_up:
                    raise TrainingError(f"nobody answers at {host}:{port}: {error.strerror or error}") from None
                time.sleep(0.1)

    def __getitem__(self, name: str) -> RunningProgram:
        return self._running[name]

    @property
    def pids(self) -> set[int]:
        """The process ids of all programs that were started."""
        return {program.pid for program in self._running.values()}

    @property
    def preloaded_pid(self) -> int:
        """The process id of what all programs are forked from."""
        return self._preloaded.pid

    def check(self) -> None:
        """Complain if one of them has ended by itself."""
        for name, program in self._running.items():
            if (code := program.poll()) is not None:
                raise TrainingError(f"Flower's {name} ended with code {code}: {program.last_words()}")

    def stop(self, patience: float = 5.0) -> None:
        """End them all: those that do not listen, by force."""
        self.stopped = True
        for program in list(self._running.values()):
            program.kill()
        give_up = time.monotonic() + patience
        for program in self._running.values():
            if program.poll(max(0.0, give_up - time.monotonic())) is None:
                program.kill(signal.SIGKILL)
            program.forget()
        self._running.clear()
        self._preloaded.terminate()
        self._preloaded.wait()

    def _wait_until_loaded(self) -> None:
        give_up = time.monotonic() + STARTING
        while not self._socket.exists():
            if self._preloaded.poll() is not None or time.monotonic() > give_up:
                words = (self._logs / "preloaded.log").read_text(errors="replace").strip().splitlines()
                raise TrainingError(f"Flower did not start: {words[-1] if words else 'it said nothing'}")
            time.sleep(0.05)


@contextmanager
def working_folder() -> Iterator[Path]:
    """A folder for as long as the block lasts, for sockets, whose paths must be short, and for logs."""
    folder = Path(tempfile.mkdtemp(prefix="exitflow-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
