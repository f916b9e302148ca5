"""What goes to a parent: the features, or the input itself.

Every split of a residual network is larger than the image it came from, and a parent holds the whole prefix anyway.
Sending the input costs the parent the computation of the child's part, and it gives the input away.
"""

from __future__ import annotations

import math

from exitflow.serving.bundle.bundle import DATATYPES, Manifest
from exitflow.serving.node.node_settings import ServingSpec
from exitflow.serving.wire.answers import FEATURES, INPUT


def choose_payload(manifest: Manifest, exit: int, spec: ServingSpec, seconds: float) -> tuple[str, str]:
    """(features or input, why), for a node of `exit` that computes one sample in `seconds`."""
    if spec.forward != "auto":
        return (FEATURES if spec.forward == "feature" else INPUT), "as it was told"
    input_bytes = math.prod(manifest.input_shape) * DATATYPES[manifest.input_datatype]().itemsize
    feature_bytes = next(
        cost.bytes
        for cost in manifest.codecs
        if (cost.exit, cost.codec, cost.compress) == (exit, spec.codec, spec.compress)
    )
    bytes_per_second = spec.link_megabits * 1e6 / 8
    input_seconds = input_bytes / bytes_per_second + seconds
    feature_seconds = feature_bytes / bytes_per_second
    chosen = INPUT if input_seconds < feature_seconds else FEATURES
    why = (
        f"the input takes {input_bytes} bytes, and {1e3 * seconds:.2f} ms to compute again: "
        f"{1e3 * input_seconds:.2f} ms; {spec.codec} features take {feature_bytes:.0f} bytes: "
        f"{1e3 * feature_seconds:.2f} ms at {spec.link_megabits:g} Mbit/s"
    )
    return chosen, why
