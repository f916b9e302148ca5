"""Who calls a gRPC port, and what that caller may ask.

The port for nodes (`--listen`) is for the children of this node, which forward what the link allows, and for whoever
runs the tree, who reloads bundles and reads samples. Where nodes have certificates, these say who is who. The port for
clients answers requests and tells about the node, no more.
"""

from __future__ import annotations

from typing import Any

from exitflow.routing.rate_control import JITTER, TokenBucket
from exitflow.serving.node.node import Node
from exitflow.serving.ports.refusals import Reason, RefusedError
from exitflow.serving.ports.requests import Wanted
from exitflow.serving.wire.certificate_files import CLIENT

BUNCHED = 1.0  # seconds by which forwards may bunch on their way, and still look as if the child kept the limit


class Callers:
    """Who may ask what at one port. `certified`: all have shown a certificate of the tree's CA."""

    def __init__(self, node: Node, *, for_nodes: bool, certified: bool) -> None:
        self._node, self.for_nodes, self._certified = node, for_nodes, certified
        self._buckets: dict[tuple[str, float], TokenBucket] = {}

    def check_operator(self, context: Any) -> None:
        """Whether this is somebody who runs the tree."""
        if not self.for_nodes:
            raise RefusedError(Reason.DENIED, "this is asked at the port for nodes (--listen)")
        if self._certified and (name := _name(context)) != CLIENT:
            raise RefusedError(Reason.DENIED, f"this takes the certificate of {CLIENT!r}, not that of {name!r}")

    def check_request(self, wanted: Wanted, context: Any) -> None:
        """Whether the caller may ask for these answers, and as many."""
        name = _name(context) if self._certified else None
        if wanted.child is not None:
            if name is not None and name != wanted.child:
                raise RefusedError(Reason.DENIED, f"this certificate is not that of node {wanted.child!r}")
            self._check_child(wanted.child, wanted)
        elif name is not None and name != CLIENT:
            sentence = f"node {name!r} may only forward; requests of its own take the certificate of {CLIENT!r}"
            raise RefusedError(Reason.DENIED, sentence)

    def _check_child(self, child: str, wanted: Wanted) -> None:
        node = self._node
        limits = [
            link.max_transfer_rate
            for link in wanted.loaded.bundle.topology.by_name[child].parents
            if link.name == node.name
        ]
        if not limits:
            raise RefusedError(Reason.DENIED, f"node {child!r} is no child of node {node.name!r}")
        (limit,) = limits
        if limit is None or node.spec.control != "rate":
            return
        if not self._bucket(child, limit).take(node.now, len(wanted.carry)):
            node.counts.over_limit[child] += len(wanted.carry)
            raise RefusedError(Reason.OVERLOADED, f"node {child!r} forwards more than its link's limit, {limit:g}/s")

    def _bucket(self, child: str, limit: float) -> TokenBucket:
        if (child, limit) not in self._buckets:
            self._buckets[child, limit] = allowance(limit, self._node.spec.burst_seconds, self._node.now)
        return self._buckets[child, limit]


def allowance(limit: float, burst_seconds: float, now: float) -> TokenBucket:
    """What a child may send: larger than its own bucket and full at first, so that who keeps the limit may always."""
    burst = max(limit * burst_seconds, 1) + limit * (BUNCHED + JITTER) + 1e-6
    return TokenBucket(limit, burst, now - burst / limit if limit > 0 else now)


def _name(context: Any) -> str:
    """What the caller's certificate says."""
    names = context.auth_context().get("x509_common_name") or [b""]
    name: str = names[0].decode("utf-8", "replace")
    return name
