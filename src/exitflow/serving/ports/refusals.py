"""Why a request is refused: every reason, with its status in gRPC and in HTTP; a sentence goes with each refusal."""

from __future__ import annotations

import logging
from enum import Enum

import grpc

from exitflow.errors import ExitflowError
from exitflow.logs import about
from exitflow.serving.node.batching import OverloadedError
from exitflow.serving.node.node import ExpiredError, Node, UnknownVersionError
from exitflow.serving.ports.requests import UnknownModelError
from exitflow.serving.wire.answers import BadRequestError

log = logging.getLogger("exitflow.serving")

Code = grpc.StatusCode


class Reason(Enum):
    """The kinds of refusals; clients may rely on their statuses."""

    INVALID = "invalid"  # the request makes no sense
    UNAUTHENTICATED = "unauthenticated"  # the token is missing or wrong
    DENIED = "denied"  # this caller may not ask that
    NOT_FOUND = "not-found"  # there is no such model, version or path
    METHOD = "method"  # the path is asked with another HTTP method
    UNUSABLE = "unusable"  # the bundle cannot be used, or the caller has another
    TOO_LARGE = "too-large"
    OVERLOADED = "overloaded"  # the queue is full, or a link carries more than its limit
    FAILED = "failed"  # by the node's own fault
    STOPPING = "stopping"
    LATE = "late"  # the deadline passed, or the request did not come in time

    @property
    def code(self) -> grpc.StatusCode:
        """The status of this refusal in gRPC."""
        return _STATUSES[self][0]

    @property
    def http(self) -> int:
        """The status of this refusal in HTTP."""
        return _STATUSES[self][1]


_STATUSES = {
    Reason.INVALID: (Code.INVALID_ARGUMENT, 400),
    Reason.UNAUTHENTICATED: (Code.UNAUTHENTICATED, 401),
    Reason.DENIED: (Code.PERMISSION_DENIED, 403),
    Reason.NOT_FOUND: (Code.NOT_FOUND, 404),
    Reason.METHOD: (Code.UNIMPLEMENTED, 405),
    Reason.UNUSABLE: (Code.FAILED_PRECONDITION, 409),
    Reason.TOO_LARGE: (Code.RESOURCE_EXHAUSTED, 413),
    Reason.OVERLOADED: (Code.RESOURCE_EXHAUSTED, 429),
    Reason.FAILED: (Code.INTERNAL, 500),
    Reason.STOPPING: (Code.UNAVAILABLE, 503),
    Reason.LATE: (Code.DEADLINE_EXCEEDED, 504),
}


class RefusedError(Exception):
    """Ends a request with a reason and one sentence."""

    def __init__(self, reason: Reason, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


def as_refusal(
    error: Exception, node: Node, *, forwarded: bool = False, request: str = "", peer: str = ""
) -> RefusedError:
    """What `error` means to the caller, counted and logged; `request` and `peer` stand in the log."""
    refusal = _refusal(error, node, forwarded=forwarded)
    reason = refusal.reason
    node.counts.refused[reason.value] += 1
    extra = about(code=reason.code.name, request=request or None, peer=peer or None)
    if reason is Reason.FAILED:
        log.error("a request failed", exc_info=error, extra=extra)
    else:  # a full queue and a deadline say nothing of who asked, and are counted
        level = logging.DEBUG if reason in (Reason.OVERLOADED, Reason.LATE) else logging.INFO
        log.log(level, "a request was refused: %s", refusal, extra=extra)
    return refusal


def _refusal(error: Exception, node: Node, *, forwarded: bool) -> RefusedError:
    match error:
        case RefusedError():
            return error
        case BadRequestError():
            node.counts.invalid += 1
            return RefusedError(Reason.INVALID, str(error))
        case UnknownModelError() | UnknownVersionError():
            return RefusedError(Reason.UNUSABLE if forwarded else Reason.NOT_FOUND, str(error))
        case OverloadedError():
            return RefusedError(Reason.OVERLOADED, f"node {node.name!r} has a full queue; try again later")
        case ExpiredError():
            return RefusedError(Reason.LATE, "the deadline passed before the request was computed")
        case ExitflowError():
            return RefusedError(Reason.UNUSABLE, str(error))
        case _:
            return RefusedError(Reason.FAILED, "the node failed on this request; its log says why")
