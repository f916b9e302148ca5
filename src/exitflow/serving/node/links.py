"""To one parent: the channel, and what went over it.

While the link is cut nothing is sent; in the background the parent is asked from time to time whether it is ready with
our bundle, and when it is, requests flow again. So no request waits for a parent that is known to be down.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from exitflow.routing.clock import Clock, sleep
from exitflow.routing.link_state import LinkState
from exitflow.serving.bundle.bundle import MAX_MESSAGE
from exitflow.serving.wire.messages import MESSAGES, SERVICE, ModelInferResponse
from exitflow.serving.wire.security import Security

log = logging.getLogger("exitflow.serving")

PROBE_TIMEOUT = 1.0

CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 3000),  # for a connection to come about, however far the other is
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_retries", 0),
    ("grpc.keepalive_time_ms", 20_000),  # so that a machine that vanished is noticed, and its name looked up again
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.use_local_subchannel_pool", 1),
]


def open_channel(address: str, security: Security) -> grpc.aio.Channel:
    """To a node; made inside the event loop that uses it."""
    credentials = security.channel_credentials()
    if credentials:
        return grpc.aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


class LinkError(Exception):
    """A forward was not answered."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason  # unreachable, timeout, deadline, overloaded, version, invalid, refused, nonsense, failed


_REASONS = {
    grpc.StatusCode.UNAVAILABLE: "unreachable",
    grpc.StatusCode.DEADLINE_EXCEEDED: "timeout",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "overloaded",
    grpc.StatusCode.FAILED_PRECONDITION: "version",
    grpc.StatusCode.CANCELLED: "unreachable",
    grpc.StatusCode.INVALID_ARGUMENT: "invalid",
}


@dataclass
class LinkCounts:
    """Since the node started."""

    forwarded: int = 0  # samples
    answered: int = 0
    audited: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    failures: Counter[str] = field(default_factory=Counter)  # reason -> samples


class ParentLink:
    """Made inside the event loop that uses it: a channel of another loop fails every call."""

    def __init__(self, name: str, address: str, security: Security, clock: Clock) -> None:
        self.name, self.address = name, address
        self.counts = LinkCounts()
        self.state = LinkState()
        self._clock = clock
        self._was_connected = True  # nothing waits for it
        self._probe: asyncio.Task[None] | None = None
        self._expects = ("", "")
        self._metadata = security.metadata
        self._channel = open_channel(address, security)
        self._infer = self._channel.unary_unary(
            f"/{SERVICE}/ModelInfer", request_serializer=None, response_deserializer=None
        )
        self._ready = self._channel.unary_unary(
            f"/{SERVICE}/ModelReady",
            request_serializer=MESSAGES["ModelReadyRequest"].SerializeToString,
            response_deserializer=MESSAGES["ModelReadyResponse"].FromString,
        )

    def was_connected(self) -> bool:
        """Whether the channel was connected when this was last asked. If it is not now, it tries to be."""
        state = self._channel.get_state(try_to_connect=True)
        before, self._was_connected = self._was_connected, state is grpc.ChannelConnectivity.READY
        return before

    def expect(self, model: str, version: str) -> None:
        """What the parent must be ready with before requests flow again."""
        self._expects = (model, version)

    async def infer(self, request: Any, timeout: float) -> Any:
        """The parent's ModelInferResponse, or a LinkError."""
        data = request.SerializeToString()
        self.counts.bytes_sent += len(data)
        try:
            raw = await self._infer(data, timeout=timeout, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            reason = _REASONS.get(error.code(), "refused")
            raise LinkError(reason, error.details() or error.code().name) from None
        self.counts.bytes_received += len(raw)
        try:
            return ModelInferResponse.FromString(raw)
        except DecodeError:
            raise LinkError("nonsense", "its answer is no ModelInferResponse") from None

    def failed(self, failure: LinkError, samples: int) -> None:
        """Count it, and cut the link if it was one too many."""
        self.counts.failures[failure.reason] += samples
        if self.state.failed(failure.reason, str(failure)):
            log.warning("link to %s at %s is cut: %s", self.name, self.address, self.state.problem)
            self._probe = asyncio.get_running_loop().create_task(self._wait_until_ready())

    async def _wait_until_ready(self) -> None:
        while True:
            await sleep(self._clock, self.state.next_pause())
            model, version = self._expects
            try:
                question = MESSAGES["ModelReadyRequest"](name=model, version=version)
                reply = await self._ready(question, timeout=PROBE_TIMEOUT, metadata=self._metadata)
                if reply is not None and reply.ready:  # None: it cannot be read
                    break
            except grpc.aio.AioRpcError:
                continue
            except Exception:
                log.exception("asking whether %s is ready failed", self.name)
        self.state.mended()
        log.warning("link to %s at %s works again", self.name, self.address)

    async def close(self) -> None:
        """End the probe and the channel."""
        if self._probe:
            self._probe.cancel()
        await self._channel.close()
