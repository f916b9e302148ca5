"""What a node tells about itself: metadata, Triton's configuration and statistics, and its status."""

from __future__ import annotations

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
_DATA_TYPES = {
    "UINT8": (2, "TYPE_UINT8"),
    "INT32": (8, "TYPE_INT32"),
    "FP32": (11, "TYPE_FP32"),
    "BYTES": (13, "TYPE_STRING"),
}


def server_metadata() -> dict[str, Any]:
    """What the server says of itself."""
    return {"name": "exitflow", "version": __version__, "extensions": list(EXTENSIONS)}


def model_metadata(node: Node) -> dict[str, Any]:
    """The inputs and outputs of the model."""
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
    """Triton's statistics of a model, from our counts."""
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
