"""The ServerApp that Flower starts."""

from __future__ import annotations

import socket

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from exitflow.federated.flower.courier import GridCourier, serve_relay

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Lend the grid to the training that waits at the other end of a socket."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(context.run_config["relay"]))
        serve_relay(GridCourier(grid), connection)
