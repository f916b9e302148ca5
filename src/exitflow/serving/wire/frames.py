"""How requests and answers stand in the messages of a link's stream: any number of frames, one after the other.

A frame is a number that a request and its answer have in common, a value (of a request the seconds that its caller
has left; of an answer its gRPC status, 0 where it is one), and as many bytes as the head says.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

LINK_METHOD = "/exitflow.Node/Link"
_HEAD = struct.Struct("<IdI")  # number, value, bytes


def frame(number: int, value: float, data: bytes) -> bytes:
    """One frame."""
    return _HEAD.pack(number, value, len(data)) + data


def frames(message: bytes) -> Iterator[tuple[int, float, bytes]]:
    """The (number, value, bytes) of every frame; a ValueError where they do not fill the message."""
    place = 0
    while place < len(message):
        if place + _HEAD.size > len(message):
            raise ValueError("the last frame is cut off")
        number, value, size = _HEAD.unpack_from(message, place)
        place += _HEAD.size
        if place + size > len(message):
            raise ValueError("the last frame is cut off")
        yield number, value, message[place : place + size]
        place += size
