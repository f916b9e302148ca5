"""What docs/federation.md tells people to type works. tests/flower/test_deployment.py runs its longer way."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch

from exitflow.cli.main import main
from exitflow.flower.commands import QUIET
from exitflow.runs.runs import Run

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "federation.md").read_text()
LINES = [line for block in re.findall(r"```sh\n(.*?)```", TEXT, flags=re.DOTALL) for line in block.splitlines()]
COMMANDS = [line for line in LINES if line.startswith("exitflow ")]


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_is_one_with_options_that_it_has(line):
    command, args = main, shlex.split(line, comments=True)[1:]
    while hasattr(command, "commands"):
        name, *args = args
        command = command.get_command(click.Context(command), name)
    with command.make_context(name, args):
        pass


def test_the_doc_has_the_commands_that_the_tests_know():
    assert len(COMMANDS) == 8
    starts = [line for line in LINES if "start.sh" in line]
    assert starts == ["federation/server/start.sh", "federation/nodes/device-0/start.sh"]


def test_flowers_own_commands_do_not_call_out():
    blocks = [block for block in re.findall(r"```sh\n(.*?)```", TEXT, flags=re.DOTALL) if re.search("^fl", block, re.M)]
    assert len(blocks) == 2
    for block in blocks:
        settings = dict(part.split("=") for part in block.splitlines()[0].partition("#")[0].split()[1:])
        assert settings.items() <= QUIET.items()
        assert "FLWR_TELEMETRY_ENABLED" in settings


def test_linked_files_exist():
    for link in re.findall(r"\]\(([^)h#][^)]*)\)", TEXT):
        assert (ROOT / "docs" / link).exists(), link


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_what_runs_on_one_machine_gives_the_same_with_flower_ray_and_one_process(tmp_path):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    exitflow = os.path.join(os.path.dirname(sys.executable), "exitflow")
    lines = [line for line in COMMANDS if "--out runs/flower" in line or "--out runs/ray" in line]
    assert len(lines) == 2
    lines.append(lines[0].replace("--backend flower", "--backend serial").replace("runs/flower", "runs/serial"))
    for line in lines:
        done = subprocess.run([exitflow, *shlex.split(line)[1:]], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
    flower, ray, serial = (Run(tmp_path / "runs" / name).state().tensors for name in ("flower", "ray", "serial"))
    assert all(torch.equal(flower[name], serial[name]) and torch.equal(ray[name], serial[name]) for name in serial)
