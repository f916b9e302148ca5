"""HOST:PORT, and which of them are this machine only."""

from __future__ import annotations

import ipaddress

from exitflow.errors import ConfigError


def parse_address(text: str, key: str) -> tuple[str, int]:
    """(host, port); [::1]:8001 is fine too."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"expected HOST:PORT, such as 127.0.0.1:8001, got {text!r}", key=key)
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can be meant."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def parse_parent(text: str) -> tuple[str, str]:
    """`cloud=10.0.0.1:8001` as (node, address)."""
    name, equals, address = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"expected NODE=HOST:PORT, such as cloud=127.0.0.1:8001, got {text!r}", key="--parent")
    parse_address(address, "--parent")
    return name, address
