"""HOST:PORT: where something listens."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass

from exitflow.errors import ConfigError

EXAMPLE = "127.0.0.1:8001"


@dataclass(frozen=True)
class Address:
    """A host's name or IP, without the brackets that a text has around IPv6, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can be meant."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def connect(self, seconds: float) -> None:
        """See that somebody listens there; an OSError if nobody does."""
        socket.create_connection((self.host, self.port), timeout=seconds).close()


def parse_address(text: object, key: str, *, example: str = EXAMPLE, may_be_any: bool = True) -> Address:
    """From a text, or a sentence with the `key` that gave it; `may_be_any`: port 0 means any that is free."""
    found = (
        re.fullmatch(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.%\w]+\]):([0-9]{1,5})", text) if isinstance(text, str) else None
    )
    if found is None or not (0 if may_be_any else 1) <= int(found[2]) <= 65535:
        raise ConfigError(f"expected HOST:PORT, such as {example}, got {text!r}", key=key)
    return Address(found[1].strip("[]"), int(found[2]))
