"""The ServerApp that Flower starts: it lends its grid to a training.

`exitflow train` starts it beside itself and waits at a socket. With `flwr run` it is the other way round: the ServerApp
starts `exitflow train`, with what `--run-config` says, and then does the same.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from exitflow.errors import ConfigError, TrainingError
from exitflow.flower.courier import Courier, GridCourier, serve_relay
from exitflow.flower.preloaded import end_with_parent

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Lend the grid to the training that waits for it, or to one that is started for that."""
    config = {key: str(value) for key, value in context.run_config.items()}
    if config["relay"]:
        _lend(GridCourier(grid), Path(config["relay"]))
        return
    with tempfile.TemporaryDirectory(prefix="exitflow-") as folder:
        relay = Path(folder) / "relay"
        command = [sys.executable, "-m", "exitflow", *training_arguments(config), "--relay", str(relay)]
        training = subprocess.Popen(command, preexec_fn=end_with_parent)
        while not relay.exists() and training.poll() is None:
            time.sleep(0.1)
        if training.poll() is None:
            _lend(GridCourier(grid), relay)
        if code := training.wait():
            raise TrainingError(f"`exitflow train` ended with code {code}; what it said stands above")


def training_arguments(config: Mapping[str, str]) -> list[str]:
    """The command that trains as `--run-config` says; all paths are on the machine that runs this app."""
    where = ["--backend", "flower", "--federation", config["federation"]]
    where += ["--data-dir", config["data-dir"]] if config["data-dir"] else []
    if config["resume"]:
        return ["train", "--resume", config["resume"], *where]
    for key in ("system", "out"):
        if not config[key]:
            raise ConfigError('is missing: flwr run ... --run-config \'system="FILE" out="RUN"\'', key=key)
    return ["train", config["system"], "--out", config["out"], *where]


def _lend(courier: Courier, relay: Path) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(relay))
        serve_relay(courier, connection)
