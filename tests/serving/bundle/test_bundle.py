"""A bundle is whole or it is refused, with the file and what is wrong in one sentence."""

import json
import shutil
from pathlib import Path

import pytest

from exitflow.errors import BundleError, ConfigError
from exitflow.serving.bundle.assembling import check_place
from exitflow.serving.bundle.bundle import load_bundle, sha256
from tests.serving.small import make_bundle


@pytest.fixture
def copy(bundle, tmp_path):
    shutil.copytree(bundle.path, tmp_path / "b")
    return tmp_path / "b"


def test_the_same_parts_give_the_same_hash(bundle, tmp_path):
    again = make_bundle(tmp_path / "again", blends_answers=True)
    assert again.hash == bundle.hash
    for changes in ({"seed": 1}, {"blends_answers": False}):
        assert make_bundle(tmp_path / str(changes), **({"blends_answers": True} | changes)).hash != bundle.hash


def test_a_node_reads_only_the_segments_that_it_runs(bundle):
    assert len(load_bundle(bundle.path).segments) == 3
    assert len(load_bundle(bundle.path, max_exit=1).segments) == 1


@pytest.mark.parametrize("file", ["segment-1.onnx", "segment-3.onnx", "system.toml"])
def test_a_changed_file_is_refused(copy, file):
    data = bytearray((copy / file).read_bytes())
    data[len(data) // 2] ^= 1
    (copy / file).write_bytes(bytes(data))
    with pytest.raises(BundleError, match=rf"{file}: has SHA-256 [0-9a-f]+..., the manifest says [0-9a-f]+"):
        load_bundle(copy)


def test_changed_samples_are_refused_when_they_are_read(copy):
    (copy / "samples.npz").write_bytes(b"")
    with pytest.raises(BundleError, match=r"samples.npz: has SHA-256"):
        load_bundle(copy).samples()


def test_a_missing_file_is_named(copy):
    (copy / "segment-2.onnx").unlink()
    with pytest.raises(BundleError, match=r"segment-2.onnx: no such file"):
        load_bundle(copy)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"format": 3}, "is a bundle of format 3, this exitflow reads 2"),
        ({"num_classes": "ten"}, "num_classes: expected a whole number, got 'ten'"),
        ({"surprise": 1}, "surprise: unknown key"),
        ({"blends": [{"before": 0.0, "own": 1.0}]}, "blends: one for each of 3 segments, or none; got 1"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(copy, change, sentence):
    manifest = json.loads((copy / "manifest.json").read_text()) | change
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=sentence):
        load_bundle(copy)


def _no_node(manifest):
    del manifest["nodes"][next(iter(manifest["nodes"]))]


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (
            lambda m: m["segments"][0].update(file="../secret"),
            r"segments\[0\].file: must be 'segment-1.onnx', got '../secret'",
        ),
        (lambda m: m["segments"][0].update(file="segment-2.onnx"), r"must be 'segment-1.onnx', got 'segment-2.onnx'"),
        (
            lambda m: m["segments"][1].update(feature_shape=[-1]),
            r"segments\[1\].feature_shape: must be sizes from 1, got \[-1\]",
        ),
        (lambda m: m.update(segments=[]), "segments: a network has at least one"),
        (
            lambda m: m.update(segments=m["segments"][:1], blends=[], codecs=[]),
            "has no threshold or no segment for node",
        ),
        (
            lambda m: m.update(confidence="zz"),
            "confidence: must be one of 'entropy', 'max-softmax', 'margin', 'gain', got 'zz'",
        ),
        (lambda m: m.update(input_datatype="INT64"), "input_datatype: must be one of 'UINT8', 'FP32', got 'INT64'"),
        (lambda m: m.update(input_shape=[0, 8]), r"input_shape: must be sizes from 1, got \[0, 8\]"),
        (lambda m: m.update(num_classes=-3), "num_classes: must be at least 1, got -3"),
        (lambda m: m.update(codecs=[]), "codecs: every codec is needed"),
        (
            lambda m: next(iter(m["nodes"].values())).update(serve_fraction=7),
            "serve_fraction: must be between 0 and 1, got 7",
        ),
        (_no_node, "has no threshold or no segment for node"),
    ],
)
def test_a_manifest_with_impossible_values_is_refused(copy, spoil, sentence):
    manifest = json.loads((copy / "manifest.json").read_text())
    spoil(manifest)
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=sentence):
        load_bundle(copy)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"format": NaN}'])
def test_json_that_is_none_is_refused(copy, text):
    (copy / "manifest.json").write_text(text)
    with pytest.raises(BundleError, match="is not valid JSON"):
        load_bundle(copy)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [(b"[", "is not valid TOML"), (b"\xff", "is not a text file in UTF-8"), (b"nodes = 3", "nodes: expected an array")],
)
def test_a_system_file_that_cannot_be_read_is_refused(copy, text, sentence):
    (copy / "system.toml").write_bytes(text)
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["files"]["system.toml"] = sha256(text)
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=rf"system.toml: {sentence}"):
        load_bundle(copy)


def test_what_is_no_bundle_is_said_to_be_none(tmp_path):
    with pytest.raises(BundleError, match="is not a bundle; make one with: exitflow export"):
        load_bundle(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(BundleError, match="is not valid JSON"):
        load_bundle(tmp_path)


def test_an_unknown_node_is_refused_with_the_nearest(bundle):
    with pytest.raises(ConfigError, match="there is no node 'edge0'; did you mean 'edge-0'"):
        bundle.node("edge0")


def test_a_place_that_is_taken_is_refused_before_the_work(copy, tmp_path):
    check_place(copy, replace=True)
    with pytest.raises(BundleError, match="is already there; replace it with --replace"):
        check_place(copy, replace=False)
    with pytest.raises(BundleError, match="is already there; choose another"):
        check_place(tmp_path, replace=True)


def test_the_manifest_says_what_was_measured(bundle):
    manifest = bundle.manifest
    assert set(manifest.nodes) == {node.name for node in bundle.topology.nodes}
    assert {cost.codec for cost in manifest.codecs} == {"fp32", "fp16", "u8", "u4"}
    assert all(cost.changed == 0 for cost in manifest.codecs if cost.codec == "fp32")
    assert manifest.report.changed == (0.0, 0.0, 0.0)
    samples = bundle.samples()
    assert samples.outputs.logits.shape == (3, 400, 4)


def test_a_replacement_that_ends_halfway_leaves_the_old_bundle(tmp_path, monkeypatch):
    bundle = make_bundle(tmp_path / "b")
    renames = []
    rename = Path.rename

    def interrupted(self, target):
        renames.append(target)
        if len(renames) == 2:  # the new one into the place of the old one
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_bundle(tmp_path / "b", seed=1)
    assert load_bundle(tmp_path / "b").hash == bundle.hash
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
