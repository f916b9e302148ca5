"""The Flower app of a node: hands each message to the node's warm worker, and its answer back.

Flower starts a process for every message. This one imports neither PyTorch nor NumPy code of ours; model and data
stay in the worker, whose socket the SuperNode's configuration names.
"""

from __future__ import annotations

import socket
import time

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from exitflow.flower.envelopes import from_records, to_records
from exitflow.flower.frames import receive_frame, send_frame

WORKER = "worker"  # key of the SuperNode's configuration: the path of the worker's socket
PATIENCE = 60.0  # seconds in which a restarting worker is waited for

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """A task of a round."""
    return _forward(message, context)


@app.query()
def query(message: Message, context: Context) -> Message:
    """Answer a message that is not about training."""
    return _forward(message, context)


def _forward(message: Message, context: Context) -> Message:
    header, payload = from_records(message.content)
    with _connect(str(context.node_config[WORKER])) as worker:
        send_frame(worker, header, payload)
        return Message(to_records(*receive_frame(worker)), reply_to=message)


def _connect(path: str) -> socket.socket:
    give_up = time.monotonic() + PATIENCE
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(path)
            return connection
        except OSError:
            connection.close()
            if time.monotonic() > give_up:
                raise
            time.sleep(0.1)
