"""Free ports of this machine, for programs that are started on it."""

from __future__ import annotations

import contextlib
import random
import socket

HOST = "127.0.0.1"
# Below those from which systems give one to every outgoing connection (from 32768 on Linux): such a port is often taken
# by somebody else before the program that it was found for listens there.
_RANGE = range(20_000, 32_000)


def free_ports(count: int) -> list[int]:
    """Different ports that nobody listens on."""
    found: list[int] = []
    for port in random.SystemRandom().sample(_RANGE, len(_RANGE)):
        if len(found) == count:
            break
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((HOST, port))
            found.append(port)
    return found
