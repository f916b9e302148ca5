"""A bundle: all that the nodes of a hierarchy need to serve, in one directory.

    manifest.json    what the other files are, with their SHA-256; thresholds, and what the export measured
    segment-E.onnx   from exit E-1's features (the input for E = 1) to exit E's features and logits
    system.toml      the system as it was trained, from which the plan follows
    samples.npz      some test inputs with labels and every exit's answers, for `exitflow load`

The hash of the manifest names the bundle: nodes work together only if they hold the same.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from exitflow.config import decode, encode, parse_json, parse_toml, require
from exitflow.errors import BundleError, ConfigError, suggestion
from exitflow.evaluation.blending import Blend
from exitflow.evaluation.calibration import NodeCalibration
from exitflow.evaluation.outputs import ExitOutputs
from exitflow.files import LARGE_FILE, MEDIUM_FILE, read_file, write_atomically
from exitflow.npz import open_npz
from exitflow.routing import GAIN, NUM_FEATURES, RANKINGS
from exitflow.serving.wire.codecs import CODECS
from exitflow.topology.graph import Node, Topology, decode_topology
from exitflow.topology.rates import ServingPlan, serving_plan

FORMAT = 2
MANIFEST = "manifest.json"
SYSTEM = "system.toml"
SAMPLES = "samples.npz"

MAX_SAMPLES = 1024  # in one request; the segments are exported for no more
MAX_MESSAGE = 64 * 2**20  # bytes
LEAST_LIMIT = 4 * 2**20  # bytes: gRPC's own

DATATYPES: dict[str, type[np.generic]] = {
    "UINT8": np.uint8,
    "FP32": np.float32,
}  # of inputs, as the protocol names them


@dataclass(frozen=True)
class SegmentEntry:
    """One ONNX file and what flows out of it."""

    file: str
    feature_shape: tuple[int, ...]  # of one sample, behind this segment
    multiply_adds: int  # of one sample, this segment and its head


@dataclass(frozen=True)
class CodecCost:
    """What sending features through a codec costs, measured on validation data."""

    exit: int  # whose features are sent
    codec: str
    compress: bool
    bytes: float  # a sample, on average
    changed: float  # fraction of the answers of the next exit that differ
    accuracy_change: float  # of the next exit


@dataclass(frozen=True)
class ExportReport:
    """How far the bundle's answers are from PyTorch's, on test data."""

    precision: str  # fp32 or int8
    exit_accuracy: tuple[float, ...]
    torch_exit_accuracy: tuple[float, ...]
    changed: tuple[float, ...]  # of each exit, the fraction of answers that differ
    largest_difference: float  # of a logit, relative to the largest logit
    accuracy: float  # as served
    torch_accuracy: float  # as served


@dataclass(frozen=True)
class Manifest:
    """What manifest.json says of a bundle."""

    format: int
    name: str  # of the model, as clients ask for it
    confidence: str
    input_datatype: str
    input_shape: tuple[int, ...]  # of one sample
    num_classes: int
    segments: tuple[SegmentEntry, ...]
    blends: tuple[Blend, ...]  # how each exit makes its answer; () where each answers by itself
    nodes: dict[str, NodeCalibration]
    node_accuracy: dict[str, float]  # predicted, on what the node serves
    report: ExportReport
    codecs: tuple[CodecCost, ...]
    files: dict[str, str]  # name -> SHA-256
    gains: tuple[tuple[float, ...], ...] = ()  # of each exit, where samples are ranked by expected gain

    def __post_init__(self) -> None:
        for key, choices in (("confidence", RANKINGS), ("input_datatype", DATATYPES)):
            given = getattr(self, key)
            require(given in choices, key, f"must be one of {', '.join(map(repr, choices))}, got {given!r}")
        require(self.num_classes >= 1, "num_classes", f"must be at least 1, got {self.num_classes}")
        _require_sizes(self.input_shape, "input_shape")
        require(len(self.segments) >= 1, "segments", "a network has at least one")
        for exit, entry in enumerate(self.segments, start=1):
            expected = segment_file(exit)
            require(entry.file == expected, f"segments[{exit - 1}].file", f"must be {expected!r}, got {entry.file!r}")
            _require_sizes(entry.feature_shape, f"segments[{exit - 1}].feature_shape")
        count, needed = len(self.blends), len(self.segments)
        require(count in (0, needed), "blends", f"one for each of {needed} segments, or none; got {count}")
        rows = needed if self.confidence == GAIN else 0
        fits = len(self.gains) == rows and all(len(each) == 2 * NUM_FEATURES for each in self.gains)
        require(fits, "gains", f"must be {2 * NUM_FEATURES} weights for each of {rows} segments")
        measured = {(cost.exit, cost.codec, cost.compress) for cost in self.codecs}
        wanted = {(exit, codec, packs) for exit in range(1, needed) for codec in CODECS for packs in (False, True)}
        require(measured == wanted, "codecs", "every codec is needed, with and without compression, of every exit")

    def ranking(self, exit: int) -> tuple[str, tuple[float, ...]]:
        """How an exit ranks what it sees: a kind of confidence, and the weights that expected gain needs."""
        return self.confidence, self.gains[exit - 1] if self.gains else ()

    def largest_request(self, exit: int) -> int:
        """Bytes that a request to a node of `exit` may have: as inputs, bytes written as numbers, or as features.

        As a power of two, so that a bundle of much the same shapes can take this one's place.
        """
        numbers = math.prod(self.input_shape)
        sample = 2 * numbers * DATATYPES[self.input_datatype]().itemsize
        for entry in self.segments[: exit - 1]:
            sample = max(sample, 4 * (math.prod(entry.feature_shape) + self.num_classes))
        rounded = 1 << (2**16 + MAX_SAMPLES * sample - 1).bit_length()
        return min(max(rounded, LEAST_LIMIT), MAX_MESSAGE)

    @property
    def accuracy(self) -> float:
        """As served, predicted by the evaluation on test data."""
        return self.report.accuracy


@dataclass(frozen=True)
class Samples:
    """Test inputs to ask with."""

    inputs: npt.NDArray[Any]  # (N, ...) as clients send them
    outputs: ExitOutputs  # labels, and the answers of the bundle's own segments

    def to_bytes(self) -> bytes:
        """The samples as an .npz file."""
        file = io.BytesIO()
        outputs = self.outputs
        arrays: dict[str, Any] = {"inputs": self.inputs, "labels": outputs.labels, "logits": outputs.logits}
        if outputs.gains:
            arrays["gains"] = np.asarray(outputs.gains)
        np.savez_compressed(file, **arrays)
        return file.getvalue()

    @staticmethod
    def from_bytes(data: bytes) -> Samples:
        """From an .npz file, in which a BundleError names what is wrong; nothing is unpickled."""
        try:
            with open_npz(io.BytesIO(data)) as file:
                gains = tuple(map(tuple, file.read("gains").tolist())) if "gains" in file else ()
                return Samples(file.read("inputs"), ExitOutputs(file.read("logits"), file.read("labels"), gains))
        except ValueError as error:
            raise BundleError(f"{SAMPLES} cannot be read: {error}; export the bundle again") from None


@dataclass(frozen=True)
class Bundle:
    """A bundle that was read and found whole; the segments are in memory, so the directory may change."""

    path: Path
    hash: str  # SHA-256 of the manifest
    manifest: Manifest
    topology: Topology
    segments: tuple[bytes, ...]

    @property
    def plan(self) -> ServingPlan:
        """The rates it is meant to serve."""
        return serving_plan(self.topology)

    @property
    def version(self) -> str:
        """Short for the hash; the model's version in the protocol."""
        return self.hash[:12]

    def node(self, name: str, *, key: str = "--node") -> Node:
        """The node of that name; `key` is where the name was given."""
        if name not in self.topology.by_name:
            raise ConfigError(
                f"there is no node {name!r}{suggestion(name, self.topology.by_name)}",
                key=key,
                source=str(self.path),
            )
        return self.topology.by_name[name]

    def samples(self) -> Samples:
        """The test inputs that came with it."""
        return Samples.from_bytes(self.read(SAMPLES))

    def read(self, file: str) -> bytes:
        """One of its files, if it is what the manifest says."""
        return _read(self.path, file, self.manifest.files.get(file, ""))


def load_bundle(path: str | Path, *, max_exit: int | None = None) -> Bundle:
    """Read and check; segments beyond `max_exit` are left out."""
    path = Path(path)
    text = _read_bytes(path, MANIFEST, MEDIUM_FILE)
    manifest = _decode_manifest(path / MANIFEST, text)
    topology = _decode_topology(path / SYSTEM, _read(path, SYSTEM, manifest.files.get(SYSTEM, ""), MEDIUM_FILE))
    for node in topology.nodes:
        if node.name not in manifest.nodes or node.exit > len(manifest.segments):
            raise BundleError(f"{path / MANIFEST}: has no threshold or no segment for node {node.name!r}")
    wanted = manifest.segments[:max_exit]
    segments = tuple(_read(path, entry.file, manifest.files.get(entry.file, "")) for entry in wanted)
    return Bundle(path, hashlib.sha256(text).hexdigest(), manifest, topology, segments)


def write_bundle(path: Path, manifest: Manifest, contents: Mapping[str, bytes]) -> None:
    """Into the empty directory `path`; the manifest last, so that half a bundle is none."""
    for name, data in contents.items():
        write_atomically(path / name, data)
    write_atomically(path / MANIFEST, json.dumps(encode(manifest), indent=1, allow_nan=False).encode())


def segment_file(exit: int) -> str:
    """The path of a node's segment."""
    return f"segment-{exit}.onnx"


def sha256(data: bytes) -> str:
    """The SHA-256 digest of a file, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def _require_sizes(shape: tuple[int, ...], key: str) -> None:
    require(all(size >= 1 for size in shape), key, f"must be sizes from 1, got {list(shape)}")


def _decode_manifest(path: Path, text: bytes) -> Manifest:
    try:
        table = parse_json(text)
        found = table.get("format") if isinstance(table, dict) else None
        if found != FORMAT:
            raise BundleError(f"{path}: is a bundle of format {found!r}, this exitflow reads {FORMAT}; export it again")
        return decode(Manifest, table)
    except ValueError:
        raise BundleError(f"{path}: is not valid JSON; export the bundle again") from None
    except ConfigError as error:
        raise BundleError(f"{path}: {error.key}: {error.problem}") from None


def _decode_topology(path: Path, text: bytes) -> Topology:
    try:
        return decode_topology(parse_toml(text.decode()))
    except UnicodeDecodeError:
        raise BundleError(f"{path}: is not a text file in UTF-8") from None
    except ConfigError as error:
        raise BundleError(f"{path}: {error}") from None


def _read(path: Path, file: str, expected: str, limit: int = LARGE_FILE) -> bytes:
    data = _read_bytes(path, file, limit)
    if (found := sha256(data)) != expected:
        raise BundleError(f"{path / file}: has SHA-256 {found[:12]}..., the manifest says {expected[:12] or 'nothing'}")
    return data


def _read_bytes(path: Path, file: str, limit: int = LARGE_FILE) -> bytes:
    try:
        return read_file(path / file, limit)
    except FileNotFoundError:
        whose = "no such file" if (path / MANIFEST).is_file() else "is not a bundle; make one with: exitflow export"
        raise BundleError(f"{path / file if (path / MANIFEST).is_file() else path}: {whose}") from None
    except OSError as error:
        raise BundleError(f"{path / file}: cannot be read: {error.strerror}") from None
