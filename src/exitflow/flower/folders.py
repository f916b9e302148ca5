"""The folders of a federation: what each of its machines gets.

    DIR/server/        for the machine where the nodes meet, and from which is trained
    DIR/nodes/NAME/    for the machine of each node
    DIR/authority/     for whoever made them: what renews the server's certificate

Secrets are in all of them: the server's private key and shared secret, each node's private key, the authority's own.
No file holds them all once the folders were handed out.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import tomli_w

from exitflow.addresses import parse_address
from exitflow.config import read_toml
from exitflow.errors import ConfigError
from exitflow.flower import commands
from exitflow.flower.keys import (
    DAYS_VALID,
    write_authority,
    write_node_key,
    write_server_certificate,
    write_shared_secret,
)
from exitflow.system.system import System


def check_address(text: str) -> str:
    """The text, if it is HOST:PORT."""
    return str(parse_address(text, "--superlink", example="10.0.0.1:9092", may_be_any=False))


def init_federation(system: System, out: Path, *, superlink: str) -> None:
    """Write what each machine needs into the new folder `out`."""
    address = check_address(superlink)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError("is not an empty directory; keys that are in use must not be overwritten", source=str(out))
    host = parse_address(address, "").host
    server = out / "server"
    authority = write_authority(out / "authority")
    write_server_certificate(server, authority, sorted({host, "127.0.0.1", "localhost"}), days=DAYS_VALID)
    write_shared_secret(server / "superexec.secret")
    _write_common(server, system, address)
    (server / "nodes").mkdir()
    commands.write_app(server / "app", flower_app_config())
    _write_start(server, "exitflow-superlink", "the meeting point of the federation", "server")
    for node in system.topology.nodes:
        folder = out / "nodes" / node.name
        write_node_key(folder)
        shutil.copy(folder / "node.pub", server / "nodes" / f"{node.name}.pub")
        shutil.copy(server / "ca.crt", folder)
        _write_common(folder, system, address, node=node.name)
        _write_start(folder, f"exitflow-node-{node.name}", f"node {node.name} of the federation", "node")


def flower_app_config() -> dict[str, str]:
    """What `flwr run --run-config` may set; all are paths on the machine that runs the ServerApp."""
    return {"relay": "", "system": "", "out": "", "federation": "", "data-dir": "", "resume": ""}


def _write_common(folder: Path, system: System, address: str, **more: str) -> None:
    (folder / "system.toml").write_text(system_for_nodes(system))
    (folder / "federation.toml").write_text(tomli_w.dumps({"superlink": address, **more}))


def system_for_nodes(system: System) -> str:
    """The system, but for where the server's own data lie."""
    return replace(system, data=replace(system.data, dir=None)).to_toml()


def _write_start(folder: Path, unit: str, what: str, command: str) -> None:
    """A start script, and a systemd unit that runs it from where the folder was put."""
    script = f"""#!/bin/sh
# Starts {what}. Keep this folder readable for its owner only: it holds a private key.
here=$(cd "$(dirname "$0")" && pwd)
exec "${{EXITFLOW:-exitflow}}" federation {command} "$here" "$@"
"""
    (folder / "start.sh").write_text(script)
    (folder / "start.sh").chmod(0o700)
    service = f"""# cp {unit}.service /etc/systemd/system/ && systemctl enable --now {unit}
[Unit]
Description=exitflow: {what}
After=network-online.target
Wants=network-online.target

[Service]
# Where you put this folder, and where exitflow is installed; a node with data of its own: start.sh --data-dir DIR
Environment=EXITFLOW=/opt/exitflow/bin/exitflow
ExecStart=/opt/exitflow/federation/start.sh
Restart=always
RestartSec=5
RestartPreventExitStatus=2

[Install]
WantedBy=multi-user.target
"""
    (folder / f"{unit}.service").write_text(service)


def read_address(folder: Path) -> str:
    """Where the SuperLink is, as `init` was told."""
    return check_address(str(read_toml(folder / "federation.toml").get("superlink", "")))


def server_folder(path: str | Path) -> Path:
    """The server's folder: as given, or below the folder that `init` wrote."""
    folder = Path(path)
    for candidate in (folder / "server", folder):
        if (candidate / "superexec.secret").is_file():
            return candidate
    problem = "is not a folder that `exitflow federation init` has written for the server"
    raise ConfigError(problem, key="--federation", source=str(folder))


def node_of(folder: Path) -> str:
    """The name of the node that `folder` was written for."""
    node = read_toml(folder / "federation.toml").get("node") if (folder / "node.key").is_file() else None
    if not isinstance(node, str):
        problem = "is not a folder that `exitflow federation init` has written for a node"
        raise ConfigError(problem, source=str(folder))
    return node
