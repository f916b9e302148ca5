"""What a node says of itself to those who run it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from exitflow.serving.node.node import Node

if TYPE_CHECKING:
    from exitflow.serving.wire.own_certificate import OwnCertificate

WARNING_DAYS = 7  # before a certificate ends


def problems(node: Node, certificate: OwnCertificate | None = None) -> list[str]:
    """What an operator should know; [] when all is well."""
    cut = [f"link to {link.name} is cut: {link.state.problem}" for link in node.links.values() if not link.state.open]
    known = {link.name for link in node.current.bundle.node(node.name).parents}
    found = cut + [f"no address was given for parent {name}" for name in sorted(known - set(node.links))]
    if certificate and (days := (certificate.shown.ends - time.time()) / 86_400) < WARNING_DAYS:
        found.append(f"the certificate ends in {max(days, 0):.0f} days: renew it with exitflow certs --renew")
    return found


@dataclass(frozen=True)
class LinkStatus:
    """What has happened on the link to one parent since the node started."""

    address: str
    payload: str  # what goes over it: features or the input
    problem: str  # why it is cut; "": it is not
    forwarded: int  # samples, audits too
    answered: int  # samples, without audits
    audited: int
    failures: dict[str, int]  # samples by reason
    bytes_sent: int
    bytes_received: int
    times_cut: int
    tokens: float | None = None  # samples that it may carry at once; None: it has no limit
    burst: float | None = None  # ... and at most


@dataclass(frozen=True)
class NodeStatus:
    """All that a node says of itself, since it started; counts are samples, unless it says requests."""

    node: str
    exit: int
    model: str
    bundle: str  # its hash
    confidence: str  # by which samples are ranked
    pid: int
    started: float  # seconds since 1970
    time: float  # now
    ready: bool
    problems: tuple[str, ...]
    arrived: int  # from clients
    from_children: dict[str, int]
    received: int  # from both
    served: int  # answered by its own exit
    fallbacks: dict[str, int]  # of these, by the reason why no parent answered
    out_of_tokens: int  # of these, because a link was full
    rejected: int  # requests
    invalid: int  # requests
    expired: int  # requests
    failed: int  # requests
    requests: int  # answered
    batches: dict[str, int]  # size -> how many
    audited: int
    agreed: int
    arrival_rate: float  # samples/s of late
    links: dict[str, LinkStatus]  # by parent
    threshold: float | None = None  # None: nothing is sure enough, or everything is


def status(node: Node) -> NodeStatus:
    """At this moment."""
    counts, bundle, now = node.counts, node.current.bundle, node.now
    return NodeStatus(
        node=node.name,
        exit=node.exit,
        model=bundle.manifest.name,
        bundle=bundle.hash,
        confidence=bundle.manifest.confidence,
        pid=os.getpid(),
        started=node.started,
        time=time.time(),
        ready=not node.draining,
        problems=tuple(problems(node)),
        arrived=counts.arrived,
        from_children=dict(counts.from_children),
        received=counts.received,
        served=counts.served,
        fallbacks=dict(counts.fallbacks),
        out_of_tokens=counts.out_of_tokens,
        rejected=counts.rejected,
        invalid=counts.invalid,
        expired=counts.expired,
        failed=counts.failed,
        requests=counts.requests,
        batches={str(size): times for size, times in sorted(counts.batches.items())},
        audited=counts.audited,
        agreed=counts.agreed,
        arrival_rate=node.control.arrival_rate(now),
        threshold=_finite(node.control.threshold),
        links={name: _link_status(node, name, now) for name in node.links},
    )


def _link_status(node: Node, name: str, now: float) -> LinkStatus:
    link = node.links[name]
    return LinkStatus(
        address=link.address,
        payload=node.current.payloads[name],
        problem=link.state.problem,
        forwarded=link.counts.forwarded,
        answered=link.counts.answered,
        audited=link.counts.audited,
        failures=dict(link.counts.failures),
        bytes_sent=link.counts.bytes_sent,
        bytes_received=link.counts.bytes_received,
        times_cut=link.state.times_cut,
        tokens=node.control.tokens(now).get(name),
        burst=node.control.bursts.get(name),
    )


def _finite(value: float) -> float | None:
    return value if abs(value) < 1e300 else None
