"""Flower's programs, forked from one process that has imported them.

Flower starts a process for every message, and each would spend most of two seconds of a core on importing Flower.
Here one process imports it once, and forks: a program starts in milliseconds, and shares its memory with the others.
The programs are Flower's own, unchanged: what its commands call is called with the same arguments and environment.
Flower finds them because `write_commands` puts commands of the same names at the front of its PATH; where the
process is not there any more, those run Flower's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

PROGRAMS = {  # as in Flower's own list of commands, but for what is ours
    "flower-superlink": "exitflow.flower.commands:superlink_main",
    "flower-supernode": "flwr.supernode.cli:flower_supernode",
    "flower-superexec": "flwr.supercore.cli:flower_superexec",
    "flwr-clientapp": "flwr.supernode.cli:flwr_clientapp",
    "flwr-serverapp": "flwr.superlink.cli:flwr_serverapp",
    "exitflow-control": "exitflow.flower.commands:control_main",
}
STARTED_BY_FLOWER = ("flower-superexec", "flwr-clientapp", "flwr-serverapp")
SOCKET = "EXITFLOW_PRELOADED"  # environment variable: where the process listens

_MAX_REQUEST = 1 << 17  # bytes; an environment and a command line
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_prctl = ctypes.CDLL(None).prctl

_COMMAND = """\
#!{python} -IS
import json, os, socket, sys
request = {{"argv": ["{name}", *sys.argv[1:]], "env": dict(os.environ), "cwd": os.getcwd()}}
try:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(os.environ["{socket}"])
    socket.send_fds(connection, [json.dumps(request).encode()], [1, 2])
    connection.recv(100)
except (KeyError, OSError):
    os.execv("{original}", ["{original}", *sys.argv[1:]])
"""


def end_with_parent() -> None:
    """Have this process ended when the one that started it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def write_commands(folder: Path) -> None:
    """Commands with the names of Flower's that ask the preloaded process."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in STARTED_BY_FLOWER:
        beside = Path(sys.executable).parent / name
        original = str(beside) if beside.exists() else shutil.which(name)
        path = folder / name
        path.write_text(_COMMAND.format(python=sys.executable, name=name, socket=SOCKET, original=original))
        path.chmod(0o700)


def request(path: Path, argv: Sequence[str], env: Mapping[str, str], output: int) -> tuple[int, socket.socket]:
    """Start a program with its output to a file; its process id, and a connection that will tell how it ended."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(str(path))
    message = {"argv": list(argv), "env": dict(env), "cwd": os.getcwd()}
    socket.send_fds(connection, [json.dumps(message).encode()], [output, output])
    return int(json.loads(connection.recv(_MAX_REQUEST))["pid"]), connection


def main() -> None:
    """Listen at the socket that the command line names, and fork a program for each request."""
    end_with_parent()
    programs = {name: _load(reference) for name, reference in PROGRAMS.items()}
    importlib.import_module("exitflow.flower.client_app")
    gc.freeze()  # the collector would touch, and so copy, what the programs share
    wake, woken = socket.socketpair()
    wake.setblocking(False)
    woken.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    not_yet = f"{sys.argv[1]}.new"  # who finds the socket may connect at once
    listener.bind(not_yet)
    os.chmod(not_yet, 0o600)
    listener.listen(100)
    os.rename(not_yet, sys.argv[1])
    _serve(listener, woken, programs)


def _serve(listener: socket.socket, woken: socket.socket, programs: dict[str, Callable[[], None]]) -> None:
    callers: dict[int, socket.socket] = {}  # by the process that was started for them
    while True:
        ready, _, _ = select.select([listener, woken], [], [])
        if woken in ready:
            woken.recv(1000)
            _reap(callers)
        if listener in ready:
            connection, _ = listener.accept()
            message, descriptors, _, _ = socket.recv_fds(connection, _MAX_REQUEST, 2)
            if not message:
                continue
            pid = os.fork()
            if not pid:
                _become(json.loads(message), descriptors, programs)
            for descriptor in descriptors:
                os.close(descriptor)
            callers[pid] = connection
            _tell(connection, {"pid": pid})


def _reap(callers: dict[int, socket.socket]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        with callers.pop(pid) as connection:
            _tell(connection, {"exit": os.waitstatus_to_exitcode(status)})


def _tell(connection: socket.socket, message: Mapping[str, int]) -> None:
    with contextlib.suppress(OSError):  # whoever asked may not care
        connection.send(json.dumps(message).encode())


def _become(message: dict[str, object], descriptors: list[int], programs: dict[str, Callable[[], None]]) -> None:
    """Never returns: this process is the program now."""
    code = 1
    try:
        end_with_parent()
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(descriptors[0], 1)
        os.dup2(descriptors[1], 2)
        os.closerange(3, 256)
        argv = [str(part) for part in message["argv"]]  # type: ignore[attr-defined]
        os.environ.clear()
        os.environ.update(message["env"])  # type: ignore[call-overload]
        os.chdir(str(message["cwd"]))
        sys.argv = argv
        programs[Path(argv[0]).name]()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1 if end.code else 0
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _load(reference: str) -> Callable[[], None]:
    module, _, name = reference.partition(":")
    function: Callable[[], None] = getattr(importlib.import_module(module), name)
    return function


if __name__ == "__main__":
    main()
