"""A JSON header and a payload of bytes over a local socket.

Between a node's thin Flower app and its warm worker, and between the server's thin Flower app and the training.
Needs the standard library only: Flower starts a process for every message, and that process must start fast.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

Header = dict[str, Any]
Buffer = bytes | bytearray | memoryview

_LENGTHS = struct.Struct("!IQ")  # of header and payload


def send_frame(connection: socket.socket, header: Mapping[str, Any], payload: Buffer = b"") -> None:
    """Write one message to a socket."""
    text = json.dumps(header).encode()
    connection.sendall(_LENGTHS.pack(len(text), len(payload)) + text)
    connection.sendall(payload)


def receive_frame(connection: socket.socket) -> tuple[Header, bytes]:
    """One message; EOFError where the other side has gone."""
    header_length, payload_length = _LENGTHS.unpack(_read(connection, _LENGTHS.size))
    header: Header = json.loads(_read(connection, header_length))
    return header, _read(connection, payload_length)


def _read(connection: socket.socket, length: int) -> bytes:
    buffer = bytearray(length)
    view = memoryview(buffer)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise EOFError("the other side closed the connection")
        view = view[count:]
    return bytes(buffer)
