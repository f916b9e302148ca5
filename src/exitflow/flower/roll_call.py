"""Which nodes a SuperLink knows, and which of them are connected: asked over its open interface, without a secret."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from exitflow.files import read_file

if TYPE_CHECKING:
    from flwr.supercore.control import ControlHttpClient

PATIENCE = 5.0  # seconds


@dataclass(frozen=True)
class Present:
    """A node as the SuperLink sees it."""

    name: str
    public_key: str  # hexadecimal
    connected: bool
    since: str | None  # when that began, in ISO 8601; None where it has never been connected


@dataclass(frozen=True)
class RollCall:
    """A connection to a SuperLink."""

    client: ControlHttpClient

    def __call__(self) -> list[Present] | None:
        """All nodes whose keys are registered; None where nobody answers who can be believed."""
        from flwr.proto.control_pb2 import ListNodesRequest

        try:
            found = self.client.ListNodes(ListNodesRequest()).nodes_info
        except (httpx.HTTPError, ValueError):
            return None
        return [
            Present(
                node.name,
                node.public_key.hex(),
                node.status == "online",
                (node.last_activated_at if node.status == "online" else node.last_deactivated_at) or None,
            )
            for node in found
            if node.status != "unregistered"
        ]


@contextmanager
def calling(address: str, authority: Path) -> Iterator[RollCall]:
    """A connection to the SuperLink at `address`, whose certificate that authority must have signed."""
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=read_file(authority).decode("ascii"))
    version = RuntimeVersionHttpInterceptor(component_name="exitflow")
    client = ControlHttpClient(f"https://{address}", interceptors=[version], verify=context, timeout=PATIENCE)
    try:
        yield RollCall(client)
    finally:
        client.close()
