"""HTTP/2 by hand, for callers that no library would let us be."""

import asyncio
import struct
from contextlib import asynccontextmanager

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS = 0, 1, 3, 4
END_STREAM, END_HEADERS = 1, 4
INITIAL_WINDOW_SIZE = 4


def frame(kind, flags, stream, payload=b""):
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def settings(**values):
    """`window`: bytes of an answer that are taken unasked."""
    window = values.get("window", 65535)
    return frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, window))


def head_of_call(stream, method, **metadata):
    """A gRPC call begins, and its message may follow."""
    fields = {":method": "POST", ":scheme": "http", ":path": method, ":authority": "x", "te": "trailers"}
    fields |= {"content-type": "application/grpc", **metadata}
    literal = b"".join(
        b"\0" + bytes([len(key)]) + key.encode() + bytes([len(value)]) + value.encode() for key, value in fields.items()
    )
    return frame(HEADERS, END_HEADERS, stream, literal)


def message_of_call(stream, data):
    return frame(DATA, END_STREAM, stream, b"\0" + struct.pack(">I", len(data)) + data)


@asynccontextmanager
async def connection(address, **values):
    """(reader, writer), after the greeting."""
    reader, writer = await asyncio.open_connection(*address.split(":"))
    writer.write(PREFACE + settings(**values) + frame(SETTINGS, 1, 0))
    try:
        yield reader, writer
    finally:
        writer.close()


async def frames(reader):
    """(kind, flags, stream, payload) of what comes."""
    while head := await reader.read(9):
        head += await reader.readexactly(9 - len(head))
        payload = await reader.readexactly(int.from_bytes(head[:3]))
        yield head[3], head[4], int.from_bytes(head[5:9]), payload
