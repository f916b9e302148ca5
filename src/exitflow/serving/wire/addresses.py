"""Where a node listens, and where its parents do."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from exitflow.addresses import parse_address
from exitflow.errors import ConfigError, ServingError


def bound_socket(address: str, key: str) -> socket.socket:
    """A socket that has the address, or a ServingError."""
    where = parse_address(address, key)
    try:
        (family, kind, protocol, _, place), *_ = socket.getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM)
        found = socket.socket(family, kind, protocol)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(place)
        except OSError:
            found.close()
            raise
    except OSError as error:
        raise ServingError(f"{key}: cannot listen on {address}: {error.strerror or error}") from None
    return found


def parse_parents(texts: Sequence[str]) -> dict[str, str]:
    """Node -> address, from texts such as `cloud=10.0.0.1:8001`."""
    found: dict[str, str] = {}
    for text in texts:
        name, address = _parse_parent(text)
        if name in found:
            raise ConfigError(f"{name!r} is given twice, at {found[name]} and {address}", key="--parent")
        found[name] = address
    return found


def _parse_parent(text: str) -> tuple[str, str]:
    name, equals, address = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"expected NODE=HOST:PORT, such as cloud=127.0.0.1:8001, got {text!r}", key="--parent")
    parse_address(address, "--parent")
    return name, address
