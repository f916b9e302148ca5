"""A bundle from ONNX segments and data: runs them, calibrates, and measures what codecs cost. Needs no PyTorch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from exitflow.errors import BundleError
from exitflow.evaluation.accuracy import evaluate_plan
from exitflow.evaluation.blending import Blend, blended, fit_blends
from exitflow.evaluation.calibration import calibrate
from exitflow.evaluation.gains import fit_gains
from exitflow.evaluation.outputs import ExitOutputs
from exitflow.files import make_folder, sync_folder
from exitflow.routing import GAIN
from exitflow.serving.bundle.bundle import (
    FORMAT,
    MANIFEST,
    SAMPLES,
    SYSTEM,
    CodecCost,
    ExportReport,
    Manifest,
    Samples,
    SegmentEntry,
    segment_file,
    sha256,
    write_bundle,
)
from exitflow.serving.bundle.engine import Engine
from exitflow.serving.wire.codecs import CODECS, decode, encode
from exitflow.topology.graph import Topology

Array = npt.NDArray[Any]

BATCH_SIZE = 64
MAX_MEASURED = 500  # validation samples on which codecs are tried


@dataclass(frozen=True)
class LabelledInputs:
    """As clients send them: bytes, or 32-bit floats."""

    inputs: Array  # (N, ...)
    labels: npt.NDArray[np.int64]  # (N,)


@dataclass(frozen=True)
class Parts:
    """What a bundle is made of."""

    name: str
    topology: Topology
    system_toml: str  # node by node
    segments: Sequence[bytes]  # ONNX
    multiply_adds: Sequence[int]  # of each segment with its head, for one sample
    validation: LabelledInputs  # thresholds are calibrated on it
    test: LabelledInputs
    confidence: str = "entropy"
    precision: str = "fp32"
    blends_answers: bool = False  # whether an exit answers together with those before it
    num_samples: int = 2000  # test samples that go into the bundle


def check_place(out: Path, *, replace: bool) -> None:
    """Whether a bundle may be written there, before anything costly is done."""
    is_bundle = (out / MANIFEST).is_file()
    if out.exists() and not (replace and is_bundle):
        raise BundleError(f"{out}: is already there; {'replace it with --replace' if is_bundle else 'choose another'}")


def assemble(parts: Parts, out: Path, *, reference: ExitOutputs | None = None) -> Manifest:
    """Write the bundle; the report compares with `reference`, answers to the same test data, or with itself."""
    engines = [Engine([data]) for data in parts.segments]
    own_validation, features = _run(engines, parts.validation)
    own_test, _ = _run(engines, parts.test)
    blends = fit_blends(own_validation) if parts.blends_answers else ()
    validation, test = (blended(outputs, blends) for outputs in (own_validation, own_test))
    gains = fit_gains(validation) if parts.confidence == GAIN else ()
    validation, test = (replace(outputs, gains=gains) for outputs in (validation, test))
    if reference:
        reference = replace(reference, gains=gains)
    evaluation = evaluate_plan(test, parts.topology, confidence_kind=parts.confidence)
    count = parts.num_samples
    samples = Samples(parts.test.inputs[:count], ExitOutputs(test.logits[:, :count], test.labels[:count], gains))
    files = {segment_file(exit): data for exit, data in enumerate(parts.segments, start=1)}
    files |= {SYSTEM: parts.system_toml.encode(), SAMPLES: samples.to_bytes()}
    manifest = Manifest(
        format=FORMAT,
        name=parts.name.replace(":", "-").replace("/", "-"),
        confidence=parts.confidence,
        input_datatype="UINT8" if parts.test.inputs.dtype == np.uint8 else "FP32",
        input_shape=tuple(parts.test.inputs.shape[1:]),
        num_classes=test.logits.shape[2],
        segments=_entries(parts, features),
        blends=blends,
        gains=gains,
        nodes=dict(calibrate(validation, parts.topology, confidence_kind=parts.confidence)),
        node_accuracy={
            name: served.accuracy for name, served in evaluation.nodes.items() if served.accuracy is not None
        },
        report=_report(parts, reference or test, test),
        codecs=_codec_costs(engines, features, validation, blends),
        files={name: sha256(data) for name, data in files.items()},
    )
    _write(out, manifest, files)
    return manifest


def _run(engines: Sequence[Engine], data: LabelledInputs) -> tuple[ExitOutputs, list[Array]]:
    """Outputs of all exits, and the features behind all but the deepest."""
    carry, logits, features = data.inputs, [], []
    for engine in engines:
        batches = [engine.run({0: carry[start : start + BATCH_SIZE]}) for start in range(0, len(carry), BATCH_SIZE)]
        logits.append(np.concatenate([batch[1] for batch in batches]))
        if all(batch[0] is not None for batch in batches):
            carry = np.concatenate([batch[0] for batch in batches if batch[0] is not None])
            features.append(carry)
    return ExitOutputs(np.stack(logits), data.labels), features


def _entries(parts: Parts, features: list[Array]) -> tuple[SegmentEntry, ...]:
    shapes = [tuple(part.shape[1:]) for part in features] + [()]
    return tuple(
        SegmentEntry(segment_file(exit), shape, cost)
        for exit, (shape, cost) in enumerate(zip(shapes, parts.multiply_adds, strict=True), start=1)
    )


def _report(parts: Parts, before: ExitOutputs, after: ExitOutputs) -> ExportReport:
    differ = before.logits.argmax(axis=2) != after.logits.argmax(axis=2)
    scale = float(np.abs(before.logits).max()) or 1.0
    accuracy = [
        evaluate_plan(outputs, parts.topology, confidence_kind=parts.confidence).accuracy for outputs in (before, after)
    ]
    return ExportReport(
        precision=parts.precision,
        exit_accuracy=tuple(after.exit_accuracy.tolist()),
        torch_exit_accuracy=tuple(before.exit_accuracy.tolist()),
        changed=tuple(differ.mean(axis=1).tolist()),
        largest_difference=float(np.abs(before.logits - after.logits).max()) / scale,
        accuracy=accuracy[1],
        torch_accuracy=accuracy[0],
    )


def _codec_costs(
    engines: Sequence[Engine], features: list[Array], outputs: ExitOutputs, blends: Sequence[Blend]
) -> tuple[CodecCost, ...]:
    labels = outputs.labels[:MAX_MEASURED]
    more = 4 * outputs.logits.shape[2] if blends else 0  # bytes: the logits go with the features
    costs = []
    for exit, sent in enumerate(features, start=1):
        sent = sent[:MAX_MEASURED]
        exact = outputs.logits[exit].argmax(axis=1)[:MAX_MEASURED]
        for codec in CODECS:
            logits = _logits(engines[exit], decode(encode(sent, codec), sent.shape, codec))
            if blends:
                logits = blends[exit].answer(outputs.logits[exit - 1][:MAX_MEASURED], logits)
            answers = logits.argmax(axis=1)
            changed = float((answers != exact).mean())
            change = float((answers == labels).mean() - (exact == labels).mean())
            for compress in (False, True):
                size = sum(len(encode(row[None], codec, compress=compress)) for row in sent) / len(sent)
                costs.append(CodecCost(exit, codec, compress, size + more, changed, change))
    return tuple(costs)


def _logits(engine: Engine, carry: Array) -> Array:
    starts = range(0, len(carry), BATCH_SIZE)
    return np.concatenate([engine.run({0: carry[start : start + BATCH_SIZE]})[1] for start in starts])


def _write(out: Path, manifest: Manifest, files: dict[str, bytes]) -> None:
    """Beside its place, then moved there, so that a node that loads it again never sees a half."""
    temporary, old = (out.with_name(f".{out.name}.{os.getpid()}.{what}") for what in ("new", "old"))
    try:
        make_folder(out.parent)
        temporary.mkdir()
        write_bundle(temporary, manifest, files)
        if out.exists():
            out.rename(old)
        temporary.rename(out)
        sync_folder(out.parent)
    except OSError as error:
        raise BundleError(f"{out}: cannot be written: {error.strerror}") from None
    finally:
        if not out.exists() and old.exists():
            old.rename(out)
        for leftover in (temporary, old):
            shutil.rmtree(leftover, ignore_errors=True)
