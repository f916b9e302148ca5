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
from collections.abc import Sequence

HOST = "127.0.0.1"
# Below those from which systems give one to every outgoing connection (from 32768 on Linux): such a port is often taken
# by somebody else before the program that it was found for listens there.
PORTS = range(20_000, 32_000)
MOST_RESERVED = 256  # at a time; the programs of earlier ones listen by then, or have ended


class FreePorts:
    """Gives each port of some to one program at a time."""

    def __init__(self, ports: Sequence[int] = PORTS, most_reserved: int = MOST_RESERVED) -> None:
        self._ports = ports
        self._most_reserved = most_reserved
        self._reserved: deque[int] = deque()  # file descriptors

    def __call__(self, count: int) -> list[int]:
        """Different ports that nobody listens on, nor has just been given."""
        found: list[int] = []
        for port in random.SystemRandom().sample(self._ports, len(self._ports)):
            if len(found) == count:
                break
            with contextlib.suppress(OSError):
                self._reserve(port)
                found.append(port)
        return found

    def give_back(self) -> None:
        """Let go of all ports that are reserved."""
        while self._reserved:
            os.close(self._reserved.popleft())

    def _reserve(self, port: int) -> None:
        """Keep others from a port; an OSError where it is taken or reserved."""
        with socket.socket(type=socket.SOCK_DGRAM) as reservation, socket.socket() as probe:
            reservation.bind((HOST, port))
            probe.bind((HOST, port))
            self._reserved.append(reservation.detach())
        while len(self._reserved) > self._most_reserved:
            os.close(self._reserved.popleft())


free_ports = FreePorts()
