"""How we call Flower: the command lines of its programs, their settings, and two of them as we run them.

TLS always, and a key for every node, on loopback too: there is one way in which a federation runs. The SuperLink
leaves it to others to run the ServerApp (`--isolation process`); whoever trains does so with a SuperExec beside the
training, and proves with a shared secret that it may.
"""

from __future__ import annotations

import contextlib
import json
import os
import ssl
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from exitflow import __version__

if TYPE_CHECKING:
    from uvicorn import Config

SERVER_APP = "exitflow.flower.server_app:app"
CLIENT_APP = "exitflow.flower.client_app:app"
CONNECTION = "exitflow"  # the name of our SuperLink in Flower's configuration

QUIET = {  # nothing of Flower's or Ray's may call out
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def superlink(folder: Path, *, host: str, port: int, database: Path | None) -> list[str]:
    """The meeting point; `folder` holds its certificate and the shared secret."""
    command = ["flower-superlink", "--host", host, "--port", str(port)]
    command += ["--ssl-ca-certfile", str(folder / "ca.crt"), "--ssl-certfile", str(folder / "server.crt")]
    command += ["--ssl-keyfile", str(folder / "server.key"), "--enable-supernode-auth"]
    command += ["--isolation", "process", "--superexec-auth-secret-file", str(folder / "superexec.secret")]
    command += ["--disable-runtime-dependency-installation"]
    return [*command, "--database", str(database)] if database else command


def superexec(folder: Path, address: str, parent: int) -> list[str]:
    """Runs the ServerApp where the training is."""
    command = ["flower-superexec", "--runtime-api-address", address, "--root-certificates", str(folder / "ca.crt")]
    return [*command, "--superexec-auth-secret-file", str(folder / "superexec.secret"), "--parent-pid", str(parent)]


def supernode(folder: Path, address: str, *, port: int, worker: Path) -> list[str]:
    """A node; `folder` holds its key. Its own port is for its client app only, on loopback."""
    command = ["flower-supernode", "--superlink", address, "--root-certificates", str(folder / "ca.crt")]
    command += ["--auth-supernode-private-key", str(folder / "node.key"), "--host", "127.0.0.1", "--port", str(port)]
    return [*command, "--node-config", f"worker={json.dumps(str(worker))}"]


def write_app(folder: Path, config: dict[str, Any]) -> None:
    """The Flower app: all of its code is the installed exitflow."""
    components = {"serverapp": SERVER_APP, "clientapp": CLIENT_APP}
    table = {
        "project": {"name": folder.name, "version": __version__, "description": "exitflow", "dependencies": []},
        "tool": {"flwr": {"app": {"publisher": "exitflow", "components": components, "config": config}}},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(tomli_w.dumps(table))


def write_connection(home: Path, address: str, certificates: Path) -> None:
    """Tell Flower's command line where our SuperLink is."""
    home.mkdir(parents=True, exist_ok=True)
    connection = {"address": address, "root-certificates": str(certificates.resolve())}
    table = {"superlink": {"default": CONNECTION, CONNECTION: connection}}
    (home / "config.toml").write_text(tomli_w.dumps(table))


def environment(home: Path) -> dict[str, str]:
    """For every process of Flower's that we start."""
    programs = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", os.defpath)
    return {
        **os.environ,
        **QUIET,
        "FLWR_HOME": str(home),
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25",
        "PATH": f"{programs}{os.pathsep}{path}",
    }


def control_main() -> None:
    """Run the commands that the first argument lists, as JSON; the first that fails ends it with what it said."""
    import click
    from flwr.cli.app import app

    request = json.loads(sys.argv[1])
    for command in request["commands"]:
        try:
            app(command, standalone_mode=False)
        except click.ClickException as error:
            problem = " ".join(error.format_message().split())
            if not request["tolerate"] or request["tolerate"] not in problem:
                sys.exit(problem)


def superlink_main() -> None:
    """The SuperLink: Flower's own program, with two settings of its web server that it has no options for."""
    import uvicorn
    from flwr.superlink.cli import flower_superlink

    run = uvicorn.run

    def run_renewable(*args: Any, **options: Any) -> None:
        # no line for every request either: nodes ask every few seconds, and the log would grow for ever
        run(*args, **{**options, "ssl_context_factory": renewable, "access_log": False})

    uvicorn.run = run_renewable
    flower_superlink()


def renewable(config: Config, make: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
    """A context that shows every new connection the certificate that is in the files at that time.

    What cannot be used is passed over: key and certificate may be replaced one after the other.
    """
    files = [Path(str(name)) for name in (config.ssl_certfile, config.ssl_keyfile)]
    seen, current = _stamps(files), make()

    def renew(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        nonlocal seen, current
        if (stamps := _stamps(files)) != seen:
            seen = stamps
            with contextlib.suppress(OSError, ValueError):
                current = make()
        connection.context = current

    first = current
    first.sni_callback = renew  # called for every connection, also for those that name no host
    return first


def _stamps(files: list[Path]) -> list[tuple[int, int] | None]:
    """What changes when one of the files is replaced."""
    return [(found.st_mtime_ns, found.st_ino) if path.exists() and (found := path.stat()) else None for path in files]
