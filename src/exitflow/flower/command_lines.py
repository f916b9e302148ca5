"""The command lines of Flower's programs that we start, and its app.

TLS always, and a key for every node, on loopback too: there is one way in which a federation runs. The SuperLink
leaves it to others to run the ServerApp (`--isolation process`); whoever trains does so with a SuperExec beside the
training, and proves with a shared secret that it may.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tomli_w

from exitflow import __version__

SERVER_APP = "exitflow.flower.server_app:app"
CLIENT_APP = "exitflow.flower.client_app:app"


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
