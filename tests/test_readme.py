"""What the README tells people to type works as it stands there."""

import dataclasses
import re
import runpy
import shlex
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from exitflow.cli.main import main
from exitflow.data.data_spec import DataSpec
from exitflow.federated.options.federation_spec import FederationSpec
from exitflow.federated.training_spec import TrainingSpec
from exitflow.models.specs import FAMILIES

pytestmark = pytest.mark.heavy

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("checkout")
def test_every_command_works():
    commands = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("exitflow")]
    assert len(commands) >= 5
    for command in commands:
        result = CliRunner().invoke(main, shlex.split(command)[1:])
        assert result.exit_code == 0, (command, result.output)


@pytest.mark.usefixtures("checkout")
def test_the_python_example_works(capsys):
    (program,) = blocks("python")
    exec(compile(program, "README.md", "exec"), {})
    assert "0.8" in capsys.readouterr().out


def test_it_is_short_and_its_picture_is_what_the_script_draws():
    assert README.count("\n") <= 110
    script = runpy.run_path(str(ROOT / "docs" / "draw_tree.py"))
    assert script["PICTURE"].read_text() == script["picture"]()


def test_make_targets_and_linked_files_exist():
    targets = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make (\w+)", README):
        assert f"\n{target}:" in targets, target
    for link in re.findall(r"\]\(([^)h][^)]*)\)", README):
        assert (ROOT / link.partition("#")[0]).exists(), link


def test_every_key_of_a_system_file_is_documented():
    text = (ROOT / "docs" / "system-file.md").read_text()
    for spec in (DataSpec, TrainingSpec, FederationSpec, *FAMILIES.values()):
        for field in dataclasses.fields(spec):
            assert f"`{field.name}`" in text, field.name
