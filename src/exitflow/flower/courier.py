"""Who carries messages between the training and the nodes.

Only Flower's ServerApp, a process that Flower starts, holds the grid over which nodes are reached. `GridCourier`
works there. The training usually runs in the user's own process, with its progress bar and its run directory:
`RelayCourier` is the same over a local socket, at whose other end the ServerApp runs `serve_relay`.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from exitflow.addresses import parse_address
from exitflow.errors import TrainingError
from exitflow.flower.frames import Header, receive_frame, send_frame

if TYPE_CHECKING:
    from flwr.serverapp import Grid

PATIENCE = 60.0  # seconds that the SuperLink may be away
LOOK = 2.0  # seconds without an answer, after which we look whether it is

_IN_OUR_WORDS = {  # Flower's codes of errors
    3: "no answer in time",  # the message expired
    4: "no answer in time",  # the reply came too late
    5: "it is not connected",  # no heartbeat for a minute
}


@dataclass(frozen=True, slots=True)
class Station:
    """A node as Flower knows it."""

    id: int
    name: str  # under which its key was registered
    public_key: str  # hexadecimal
    online: bool


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back for a message: a header and a payload, or else an error."""

    message: str  # the id of what it answers
    header: Header = field(default_factory=dict)
    payload: bytes = b""
    error: str | None = None
    refused: bool = False  # the error is that what came cannot be read
    wire_bytes: tuple[int, int] | None = None  # of payloads, down and up
    seconds: float | None = None  # since the message was sent


class Courier(Protocol):
    """What carries messages between the training and the nodes."""

    def stations(self) -> list[Station]:
        """The nodes that are registered."""

    def send(self, station: int, header: Mapping[str, Any], payload: bytes, *, seconds: float) -> str:
        """Send a message that is worth something for so many seconds; returns its id."""

    def receive(self, messages: Collection[str]) -> list[Reply]:
        """The replies that have arrived for these messages; each is handed out once."""

    def close(self) -> None:
        """Nothing will be sent or received any more."""


def registered(courier: Courier, keys: Mapping[str, str]) -> dict[str, int]:
    """node -> Flower's number for it: only under the names and with the keys that are known, whoever else is there."""
    return {station.name: station.id for station in courier.stations() if keys.get(station.name) == station.public_key}


class GridCourier:
    """Over Flower's grid; inside a ServerApp."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def stations(self) -> list[Station]:
        """The nodes that Flower's SuperLink knows."""
        return [
            Station(node.node_id, node.name, node.public_key.hex(), node.status == "online")
            for node in self._grid.get_nodes()
        ]

    def send(self, station: int, header: Mapping[str, Any], payload: bytes, *, seconds: float) -> str:
        """As a Flower message of its own."""
        from flwr.app import Message

        from exitflow.flower.envelopes import to_records

        kind = "train" if header.get("kind") == "train" else "query"
        group = str(header.get("task", {}).get("round", ""))
        message = Message(to_records(dict(header), payload), station, kind, ttl=seconds, group_id=group)
        return next(iter(self._grid.push_messages([message])))

    def receive(self, messages: Collection[str]) -> list[Reply]:
        """What the SuperLink has got; its own errors name the message, not the node."""
        from exitflow.flower.envelopes import from_records

        replies = []
        for message in self._grid.pull_messages(list(messages)):
            answered = message.metadata.reply_to_message_id
            if message.has_error():
                error = message.error
                words = _IN_OUR_WORDS.get(error.code) or f"{error.reason} (Flower's code {error.code})"
                replies.append(Reply(answered, error=words))
                continue
            try:
                replies.append(Reply(answered, *from_records(message.content)))
            except ValueError as error:
                replies.append(Reply(answered, error=str(error), refused=True))
        return replies

    def close(self) -> None:
        """The grid is Flower's to close."""


def serve_relay(courier: Courier, connection: socket.socket) -> None:
    """Do for the training what it asks through `connection`, until it closes that."""
    while True:
        try:
            request, payload = receive_frame(connection)
        except (EOFError, OSError):
            return
        if request["do"] == "stations":
            stations = [asdict(station) for station in courier.stations()]
            send_frame(connection, {"stations": stations})
        elif request["do"] == "send":
            sent = courier.send(request["station"], request["header"], payload, seconds=request["seconds"])
            send_frame(connection, {"message": sent})
        else:
            replies = courier.receive(request["messages"])
            send_frame(connection, {"count": len(replies)})
            for reply in replies:
                send_frame(connection, {**asdict(reply), "payload": None}, reply.payload)


class RelayCourier:
    """Over a ServerApp elsewhere, which connects to the socket at `path`.

    It reaches the SuperLink at `address`; where that is empty, Flower alone looks after the SuperLink.
    """

    def __init__(self, path: Path, address: str) -> None:
        self.path = path
        self.address = address
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(1)
        self._connection: socket.socket | None = None

    def wait(self, seconds: float) -> bool:
        """Whether the ServerApp is there, or has come within so many seconds."""
        if not self._connection and select.select([self._listener], [], [], seconds)[0]:
            self._connection = self._listener.accept()[0]
        return self._connection is not None

    def stations(self) -> list[Station]:
        """The nodes that the ServerApp sees."""
        return [Station(**station) for station in self._ask({"do": "stations"})["stations"]]

    def send(self, station: int, header: Mapping[str, Any], payload: bytes, *, seconds: float) -> str:
        """Send a message through the ServerApp."""
        request = {"do": "send", "station": station, "header": header, "seconds": seconds}
        return str(self._ask(request, payload)["message"])

    def receive(self, messages: Collection[str]) -> list[Reply]:
        """Receive replies through the ServerApp."""
        count = self._ask({"do": "receive", "messages": list(messages)})["count"]
        replies = []
        for _ in range(count):
            header, payload = self._receive()
            replies.append(Reply(**{**header, "payload": payload}))
        return replies

    def close(self) -> None:
        """Let the ServerApp end, which it does when its connection is closed."""
        for end in (self._connection, self._listener):
            if end:
                end.close()
        self._connection = None

    def _ask(self, request: Header, payload: bytes = b"") -> Header:
        try:
            send_frame(self._open(), request, payload)
        except OSError:
            raise _gone() from None
        return self._receive()[0]

    def _receive(self) -> tuple[Header, bytes]:
        self._wait()
        try:
            return receive_frame(self._open())
        except (EOFError, OSError):
            raise _gone() from None

    def _wait(self) -> None:
        """Until an answer comes. Flower itself would try for ever to reach a SuperLink that has gone."""
        heard = time.monotonic()
        while not select.select([self._open()], [], [], LOOK)[0]:
            if self._superlink_listens():
                heard = time.monotonic()
            elif time.monotonic() - heard > PATIENCE:
                problem = f"nobody has answered at {self.address} for {PATIENCE:g} s"
                raise TrainingError(f"{problem}; start the SuperLink again, and `exitflow train --resume` goes on")

    def _superlink_listens(self) -> bool:
        if not self.address:
            return True
        try:
            parse_address(self.address, "").connect(LOOK)
            return True
        except OSError:
            return False

    def _open(self) -> socket.socket:
        if not self._connection:
            raise _gone()
        return self._connection


def _gone() -> TrainingError:
    return TrainingError("Flower's SuperLink ended the run; what was finished is kept: go on with --resume")
