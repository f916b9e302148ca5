"""The ServerApp that Flower starts: `exitflow train` borrows its grid, or `flwr run` has it train by itself."""

from __future__ import annotations

import socket
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from exitflow.errors import ConfigError
from exitflow.flower.courier import GridCourier, serve_relay

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Lend the grid to the training that waits at the other end of a socket, or train."""
    config = context.run_config
    if relay := config["relay"]:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(relay))
            serve_relay(GridCourier(grid), connection)
    else:
        _train(GridCourier(grid), {key: str(value) for key, value in config.items()})


def _train(courier: GridCourier, config: dict[str, str]) -> None:
    """All paths are on the machine that runs this app."""
    from exitflow.flower.deployment import Membership, server_folder
    from exitflow.runs.training import resume, train
    from exitflow.system.system import load_system

    folder = server_folder(config["federation"]) if config["federation"] else None
    where: dict[str, Any] = {"backend": "flower", "federation": Membership(folder, courier=courier)}
    if config["resume"]:
        resume(config["resume"], **where)
        return
    for key in ("system", "out"):
        if not config[key]:
            raise ConfigError('is missing: flwr run ... --run-config \'system="FILE" out="RUN"\'', key=key)
    data_dir = [f"data.dir={config['data-dir']}"] if config["data-dir"] else []
    train(load_system(config["system"], data_dir), config["out"], **where)
