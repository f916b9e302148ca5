"""Why a forward was not answered, in one word and one sentence."""

from __future__ import annotations

import grpc
import grpc.aio


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
_BY_NUMBER = {code.value[0]: reason for code, reason in _REASONS.items()}


def reason_of(status: int) -> str:
    """The reason behind the number of a gRPC status."""
    return _BY_NUMBER.get(status, "refused")


def link_error(error: grpc.aio.AioRpcError) -> LinkError:
    """What a call's end means to a link."""
    return LinkError(_REASONS.get(error.code(), "refused"), error.details() or error.code().name)
