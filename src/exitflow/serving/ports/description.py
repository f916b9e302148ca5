"""What a node tells about itself: metadata, Triton's configuration and statistics, and its status."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from exitflow import __version__
from exitflow.serving.bundle.bundle import MAX_SAMPLES
from exitflow.serving.node.node import Node
from exitflow.serving.wire.answers import INPUT, OUTPUTS
from exitflow.serving.wire.messages import MESSAGES
from exitflow.serving.wire.own_certificate import OwnCertificate

EXTENSIONS = ("model_configuration", "statistics", "binary_tensor_data", "model_repository")
PLATFORM = "onnxruntime_onnx"
WARNING_DAYS = 7  # before a certificate ends
_DATA_TYPES = {
    "UINT8": (2, "TYPE_UINT8"),
    "INT32": (8, "TYPE_INT32"),
    "FP32": (11, "TYPE_FP32"),
    "BYTES": (13, "TYPE_STRING"),
}


def server_metadata() -> dict[str, Any]:
    """Of the server."""
    return {"name": "exitflow", "version": __version__, "extensions": list(EXTENSIONS)}


def model_metadata(node: Node) -> dict[str, Any]:
    """Inputs and outputs."""
    manifest = node.current.bundle.manifest
    shapes: dict[str, list[int]] = {"scores": [-1, manifest.num_classes]}
    versions = [loaded.bundle.version for loaded in (node.current, node.previous) if loaded]
    return {
        "name": manifest.name,
        "versions": versions,
        "platform": PLATFORM,
        "inputs": [{"name": INPUT, "datatype": manifest.input_datatype, "shape": [-1, *manifest.input_shape]}],
        "outputs": [
            {"name": name, "datatype": datatype, "shape": shapes.get(name, [-1])} for name, datatype in OUTPUTS.items()
        ],
    }


def model_config(node: Node, *, named: bool = False) -> dict[str, Any]:
    """Triton's, in which shapes leave the batch out; data types as numbers, or `named` as in its JSON."""
    metadata = model_metadata(node)
    tensors = {
        side: [
            {"name": each["name"], "data_type": _DATA_TYPES[each["datatype"]][named], "dims": each["shape"][1:] or [1]}
            for each in metadata[f"{side}s"]
        ]
        for side in ("input", "output")
    }
    return {
        "name": metadata["name"],
        "platform": PLATFORM,
        "backend": "onnxruntime",
        "max_batch_size": MAX_SAMPLES,
        **tensors,
        "dynamic_batching": {"preferred_batch_size": [node.spec.max_batch], "max_queue_delay_microseconds": 0},
    }


def statistics(node: Node) -> dict[str, Any]:
    """Triton's, from our counts."""
    counts = node.counts
    samples = sum(size * times for size, times in counts.batches.items())
    runs = counts.batches.total()

    def duration(count: int, seconds: float) -> dict[str, int]:
        return {"count": count, "ns": max(int(1e9 * seconds), 0)}

    return {
        "name": node.current.bundle.manifest.name,
        "version": node.current.bundle.version,
        "last_inference": counts.last_inference_ms,
        "inference_count": samples,
        "execution_count": runs,
        "inference_stats": {
            "success": duration(counts.requests, counts.request_seconds.total),
            "fail": duration(counts.rejected + counts.invalid + counts.expired + counts.failed, 0.0),
            "queue": duration(counts.requests, counts.queue_seconds),
            "compute_input": duration(runs, 0.0),
            "compute_infer": duration(runs, counts.compute_seconds),
            "compute_output": duration(runs, 0.0),
        },
        "batch_stats": [
            {"batch_size": size, "compute_infer": duration(times, counts.compute_seconds * size * times / samples)}
            for size, times in sorted(counts.batches.items())
        ],
    }


def statistics_message(node: Node) -> Any:
    """The same as a message."""
    return MESSAGES["ModelStatisticsResponse"](model_stats=[_statistics_message(statistics(node))])


def _statistics_message(found: dict[str, Any]) -> Any:
    return MESSAGES["ModelStatistics"](**found)


@dataclass(frozen=True)
class Surroundings:
    """What the process around a node knows."""

    ports: Mapping[str, int] = field(default_factory=dict)  # kind -> number
    certificate: OwnCertificate | None = None


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
