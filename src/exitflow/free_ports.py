"""Free ports of this machine, for programs that are started on it.

Seconds may pass until such a program listens, in which another process may look for ports too. So a port is reserved:
whoever has been given it holds the UDP port of the same number, which no program here uses, and others pass it over.
The system frees it with the process, however that ends.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections import deque

HOST = "127.0.0.1"
# Below those from which systems give one to every outgoing connection (from 32768 on Linux): such a port is often taken
# by somebody else before the program that it was found for listens there.
_RANGE = range(20_000, 32_000)
_MOST_RESERVED = 256  # at a time; the programs of earlier ones listen by then, or have ended
_reserved: deque[int] = deque()  # file descriptors


def free_ports(count: int) -> list[int]:
    """Different ports that nobody listens on, nor has just been given."""
    found: list[int] = []
    for port in random.SystemRandom().sample(_RANGE, len(_RANGE)):
        if len(found) == count:
            break
        with contextlib.suppress(OSError):
            _reserve(port)
            found.append(port)
    return found


def _reserve(port: int) -> None:
    """Or an OSError, where it is taken or reserved."""
    with socket.socket(type=socket.SOCK_DGRAM) as reservation, socket.socket() as probe:
        reservation.bind((HOST, port))
        probe.bind((HOST, port))
        _reserved.append(reservation.detach())
    while len(_reserved) > _MOST_RESERVED:
        os.close(_reserved.popleft())
