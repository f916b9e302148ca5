"""Asking nodes, over gRPC: what `load`, `observe` and `reload` use."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import grpc
import grpc.aio

from exitflow.addresses import parse_address
from exitflow.config import decode, parse_json
from exitflow.errors import ConfigError, ServingError
from exitflow.serving.node.links import open_channel
from exitflow.serving.node.status import NodeStatus
from exitflow.serving.ports.grpc_server import OWN_SERVICE
from exitflow.serving.wire.messages import MESSAGES, SERVICE
from exitflow.serving.wire.security import Security

T = TypeVar("T")

TIMEOUT = 10.0  # seconds; of questions about a node, not of requests


class NodeClient:
    """Calls one node over gRPC."""

    def __init__(self, address: str, security: Security) -> None:
        parse_address(address, "ADDRESS")
        self.address = address
        self.channel = open_channel(address, security)
        self._metadata = security.metadata
        self.infer = self.channel.unary_unary(f"/{SERVICE}/ModelInfer")

    async def __aenter__(self) -> NodeClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()

    async def status(self) -> NodeStatus:
        """What the node says of itself."""
        data = await self._ask(f"/{OWN_SERVICE}/Status", b"")
        try:
            return decode(NodeStatus, parse_json(data))
        except (ValueError, ConfigError) as error:
            raise ServingError(f"{self.address}: its status cannot be read ({error}); is it of this version?") from None

    async def samples(self) -> bytes:
        """The bundle's samples, as an .npz file."""
        return await self._ask(f"/{OWN_SERVICE}/Samples", b"")

    async def system(self) -> bytes:
        """The system.toml of the node's bundle."""
        return await self._ask(f"/{OWN_SERVICE}/System", b"")

    async def reload(self) -> NodeStatus:
        """Load the bundle again; the status after it."""
        model = (await self.status()).model
        request = MESSAGES["RepositoryModelLoadRequest"](model_name=model)
        await self._ask(f"/{SERVICE}/RepositoryModelLoad", request.SerializeToString(), timeout=6 * TIMEOUT)
        return await self.status()

    async def _ask(self, method: str, request: bytes, timeout: float = TIMEOUT) -> bytes:
        try:
            call = self.channel.unary_unary(method)
            answer: bytes = await call(request, timeout=timeout, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise ServingError(f"{self.address}: {error.code().name}: {error.details()}") from None
        return answer


async def ask_each(
    addresses: Iterable[str], security: Security, question: Callable[[NodeClient], Awaitable[T]]
) -> list[T]:
    """The same of several nodes at once."""

    async def ask(address: str) -> T:
        async with NodeClient(address, security) as client:
            return await question(client)

    return await asyncio.gather(*map(ask, addresses))
