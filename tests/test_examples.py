"""The examples work as they stand."""

import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from exitflow import MissingExtraError, evaluate, train
from exitflow.cli.main import main

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
def test_three_classifiers_of_scikit_learn_answer_as_one_by_the_commands_in_the_file(tmp_path, capsys):
    import cascade

    cascade.main(tmp_path / "cascade")
    assert "large: 9" in capsys.readouterr().out
    text = cascade.__doc__.partition("    exitflow cascade ")[2].partition("    exitflow load")[0].replace("\\\n", " ")
    command = shlex.split(text.replace("cascade/", f"{tmp_path}/cascade/").replace("bundles/", f"{tmp_path}/bundles/"))
    result = CliRunner().invoke(main, ["cascade", *command])
    assert result.exit_code == 0, result.output
    assert "next: exitflow up" in result.output


@pytest.mark.usefixtures("examples")
def test_without_its_data_the_example_says_what_to_install(monkeypatch):
    import speakers

    monkeypatch.setattr(speakers, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"needs sktime, .*: pip install 'exitflow\[examples\]'"):
        speakers.load()
