"""To one parent: the channel, and what went over it.

While the link is cut nothing is sent; in the background the parent is asked from time to time whether it is ready with
our bundle, and when it is, requests flow again. So no request waits for a parent that is known to be down. A parent
that has had nothing to answer for a while is asked too: that it is gone is known before somebody needs it.
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
from exitflow.routing.link_state import IDLE_PAUSE, LinkState
from exitflow.serving.bundle.bundle import MAX_MESSAGE
from exitflow.serving.node.counts import Histogram
from exitflow.serving.node.link_errors import LinkError, link_error
from exitflow.serving.node.link_stream import LinkStream, NoStreamError
from exitflow.serving.wire.certificate_files import host_of_node
from exitflow.serving.wire.messages import MESSAGES, SERVICE, ModelInferResponse
from exitflow.serving.wire.security import Security

log = logging.getLogger("exitflow.serving")

PROBE_TIMEOUT = 1.0
STREAM_AGE = 20.0  # seconds after which a new stream is taken: the parent bounds how long one may last
RENEWAL_GRACE = 30.0  # seconds for what is under way when a link connects anew

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


def open_channel(address: str, security: Security, *, node: str | None = None) -> grpc.aio.Channel:
    """To a node, which must have the certificate of `node`, if that is given; made in the event loop that uses it."""
    credentials = security.channel_credentials()
    if credentials:
        name = [("grpc.ssl_target_name_override", host_of_node(node))] if node else []
        return grpc.aio.secure_channel(address, credentials, options=[*CHANNEL_OPTIONS, *name])
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


# By these the parent has answered; after the others nobody knows whether it has received anything.
_ANSWERED = {"overloaded", "version", "invalid", "refused", "nonsense"}


@dataclass
class LinkCounts:
    """What a link has carried since the node started."""

    forwarded: int = 0  # samples
    answered: int = 0
    audited: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    failures: Counter[str] = field(default_factory=Counter)  # reason -> samples
    seconds: Histogram = field(default_factory=Histogram)  # from a request to its answer


class ParentLink:
    """It does nothing until it is connected."""

    def __init__(self, name: str, address: str, security: Security, clock: Clock, round_trip: float = 0.0) -> None:
        """`round_trip` is that of a rehearsal, in seconds, on top of the real one."""
        self.name, self.address = name, address
        self.counts = LinkCounts()
        self.state = LinkState()
        self._clock, self._half_trip = clock, round_trip / 2
        self._answered = clock.now()  # when something last came from the parent
        self._expects = ("", "")
        self._security, self._metadata = security, security.metadata
        self._stream: LinkStream | None = None
        self._streams = True  # whether the parent knows them
        self._closing: set[asyncio.Task[None]] = set()

    def connect(self) -> None:
        """In the event loop that uses it: a channel of another loop fails every call."""
        self._open()
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    def _open(self) -> None:
        self._retire_stream()
        self._channel = open_channel(self.address, self._security, node=self.name)
        self._infer = self._channel.unary_unary(
            f"/{SERVICE}/ModelInfer", request_serializer=None, response_deserializer=None
        )
        self._ready = self._channel.unary_unary(
            f"/{SERVICE}/ModelReady",
            request_serializer=MESSAGES["ModelReadyRequest"].SerializeToString,
            response_deserializer=MESSAGES["ModelReadyResponse"].FromString,
        )

    def connect_anew(self) -> None:
        """With our renewed certificate; what is under way ends over the old connection."""
        closing = asyncio.get_running_loop().create_task(self._channel.close(RENEWAL_GRACE))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        self._open()

    def expect(self, model: str, version: str) -> None:
        """What the parent must be ready with before requests flow again."""
        self._expects = (model, version)

    async def infer(self, request: Any, count: int, timeout: float) -> Any:
        """The parent's ModelInferResponse to a request of `count` samples, or a LinkError."""
        turn = self.state.in_air.next_turn()
        try:
            response = await self._infer_once(request, timeout)
        except BaseException as error:
            if isinstance(error, LinkError) and error.reason in _ANSWERED:
                self.state.in_air.answered(turn, count)
            else:
                self.state.in_air.lost(turn, count)
            raise
        self.state.in_air.answered(turn, count)
        return response

    async def _infer_once(self, request: Any, timeout: float) -> Any:
        data, started = request.SerializeToString(), self._clock.now()
        self.counts.bytes_sent += len(data)
        try:
            if self._half_trip:
                await sleep(self._clock, self._half_trip)
            left = max(timeout - 2 * self._half_trip, 0.001)
            raw = await self._ask(data, left)
            if self._half_trip:
                await sleep(self._clock, self._half_trip)
        except grpc.aio.AioRpcError as error:
            raise link_error(error) from None
        self._answered = self._clock.now()
        self.counts.seconds.add(self._answered - started)
        self.counts.bytes_received += len(raw)
        try:
            return ModelInferResponse.FromString(raw)
        except DecodeError:
            raise LinkError("nonsense", "its answer is no ModelInferResponse") from None

    async def _ask(self, data: bytes, timeout: float) -> bytes:
        if self._streams:
            try:
                return await self._current_stream().ask(data, timeout)
            except NoStreamError:
                self._streams, self._stream = False, None
        answer: bytes = await self._infer(data, timeout=timeout, metadata=self._metadata)
        return answer

    def _current_stream(self) -> LinkStream:
        now = self._clock.now()
        if self._stream is None or self._stream.ended or now - self._stream.opened > STREAM_AGE:
            self._retire_stream()
            self._stream = LinkStream(self._channel, self._metadata, now)
        return self._stream

    def _retire_stream(self) -> None:
        """What is under way on it ends, and so does it then."""
        if self._stream:
            self._stream.finish()
            self._stream = None

    def failed(self, failure: LinkError, samples: int) -> None:
        """Count it, and cut the link if it was one too many."""
        self.counts.failures[failure.reason] += samples
        if self._cut_by(failure):
            self._watching.cancel()  # it sleeps for as long as suits a link that is not cut
            self._watching = asyncio.get_running_loop().create_task(self._watch())

    def _cut_by(self, failure: LinkError) -> bool:
        is_cut = self.state.failed(failure.reason, str(failure))
        if is_cut:
            log.warning("link to %s at %s is cut: %s", self.name, self.address, self.state.problem)
        return is_cut

    async def _watch(self) -> None:
        """Ask the parent from time to time, where no answers say that it is there."""
        while True:
            await sleep(self._clock, self.state.next_pause())
            if self._stream and self._stream.idle and self._clock.now() - self._stream.opened > STREAM_AGE:
                self._retire_stream()
            if self.state.open and self._clock.now() - self._answered < IDLE_PAUSE:
                continue
            try:
                await self._ask_whether_ready()
            except LinkError as failure:
                self._cut_by(failure)
            except Exception:
                log.exception("asking whether %s is ready failed", self.name)
            else:
                self._answered = self._clock.now()
                if not self.state.open:
                    self.state.mended()
                    log.warning("link to %s at %s works again", self.name, self.address)

    async def _ask_whether_ready(self) -> None:
        """Ask the parent whether it is ready; a LinkError where it does not say."""
        turn = self.state.in_air.next_turn()
        model, version = self._expects
        question = MESSAGES["ModelReadyRequest"](name=model, version=version)
        try:
            reply = await self._ready(question, timeout=PROBE_TIMEOUT, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise link_error(error) from None
        self.state.in_air.answered(turn)
        if reply is None:  # it cannot be read
            raise LinkError("nonsense", "its readiness cannot be read")
        if not reply.ready:
            raise LinkError("version", f"it is not ready with bundle {version[:12]}")

    async def close(self) -> None:
        """End the watch and the channel."""
        self._watching.cancel()
        if self._stream:
            self._stream.cancel()
            self._stream = None  # as long as anybody holds a call, gRPC holds its connection
        for closing in self._closing:
            closing.cancel()
        await self._channel.close()
