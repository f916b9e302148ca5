"""What a node says of itself to those who run it."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

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


def status(node: Node) -> dict[str, Any]:
    """Everything, for `load`, `observe` and people."""
    counts, bundle = node.counts, node.current.bundle
    now = node.now
    tokens, bursts = node.control.tokens(now), node.control.bursts
    return {
        "node": node.name,
        "exit": node.exit,
        "model": bundle.manifest.name,
        "bundle": bundle.hash,
        "confidence": bundle.manifest.confidence,
        "pid": os.getpid(),
        "started": node.started,
        "time": time.time(),
        "ready": not node.draining,
        "problems": problems(node),
        "arrived": counts.arrived,
        "from_children": dict(counts.from_children),
        "received": counts.received,
        "served": counts.served,
        "fallbacks": dict(counts.fallbacks),
        "out_of_tokens": counts.out_of_tokens,
        "rejected": counts.rejected,
        "invalid": counts.invalid,
        "expired": counts.expired,
        "failed": counts.failed,
        "requests": counts.requests,
        "batches": {str(size): times for size, times in sorted(counts.batches.items())},
        "audited": counts.audited,
        "agreed": counts.agreed,
        "arrival_rate": node.control.arrival_rate(node.now),
        "threshold": _finite(node.control.threshold),
        "links": {
            name: {
                "address": link.address,
                "payload": node.current.payloads[name],
                "problem": link.state.problem,
                "forwarded": link.counts.forwarded,
                "answered": link.counts.answered,
                "audited": link.counts.audited,
                "failures": dict(link.counts.failures),
                "bytes_sent": link.counts.bytes_sent,
                "bytes_received": link.counts.bytes_received,
                "times_cut": link.state.times_cut,
                "tokens": tokens.get(name),
                "burst": bursts.get(name),
            }
            for name, link in node.links.items()
        },
    }


def _finite(value: float) -> float | None:
    return value if abs(value) < 1e300 else None
