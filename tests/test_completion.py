"""What a shell offers behind TAB."""

import os
import subprocess
import sys

import click
import pytest
from click.shell_completion import ShellComplete

from exitflow.cli.completion import Completed
from exitflow.cli.main import main
from exitflow.federated.weighting import WEIGHTINGS
from exitflow.runs.methods import METHODS
from exitflow.system.presets import PRESETS
from tests.test_cli import commands

PLACES = ("RUN", "DIR", "BUNDLE", "FILE", "BUNDLE|ADDRESS...", "SYSTEM", "RUNS", "FOLDER")


def offered(*words):
    """(kind, value) of each thing behind the last word, which is not finished."""
    *args, incomplete = words
    found = ShellComplete(main, {}, "exitflow", "_EXITFLOW_COMPLETE").get_completions(args, incomplete)
    return [(item.type, item.value) for item in found]


def names(*words):
    return [value for _, value in offered(*words)]


def test_commands_and_options_are_offered():
    assert names("evaluate", "--con") == ["--confidence"]
    assert names("ev") == ["evaluate"]
    assert names("federation", "no") == ["node"]


def test_systems_are_presets_and_toml_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "campus.toml").touch()
    (tmp_path / "notes.txt").touch()
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "city.toml").touch()
    assert names("plan", "") == sorted(["campus.toml", *PRESETS])
    assert names("train", "paper-17-") == ["paper-17-cifar10", "paper-17-cifar100"]
    assert names("plan", "sub/") == ["sub/city.toml"]
    assert names("plan", f"{tmp_path}/c") == [f"{tmp_path}/campus.toml"]
    assert offered("plan", "su") == [("file", "su")]  # the shell itself knows folders


def test_weightings_and_methods_are_offered_also_after_a_comma():
    assert names("train", "--weighting", "") == list(WEIGHTINGS)
    assert names("compare", "x", "--weightings", "auto,serving") == ["auto,serving-rate"]
    assert names("compare", "x", "--weightings", "auto,au") == []  # once is enough
    assert names("compare", "x", "--methods", "fjord,d") == ["fjord,depthfl"]
    assert names("compare", "x", "--methods", "") == list(METHODS)


@pytest.mark.parametrize("words", [("evaluate", "r"), ("train", "--resume", "r"), ("load", "r"), ("up", "r")])
def test_runs_and_bundles_are_folders(words):
    assert offered(*words) == [("dir", "r")]


def test_a_place_that_is_asked_for_is_always_completed():
    for path, command in commands():
        context = click.Context(command)
        for parameter in command.params:
            if parameter.make_metavar(context).strip("[]") in PLACES:
                assert isinstance(parameter.type, Completed), (path, parameter)


@pytest.mark.heavy
def test_a_shell_that_asks_gets_an_answer():
    environment = {
        **os.environ,
        "_EXITFLOW_COMPLETE": "bash_complete",
        "COMP_WORDS": "exitflow train --weighting ser",
        "COMP_CWORD": "3",
    }
    program = "from exitflow.cli.main import main; main(prog_name='exitflow')"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout == "plain,serving-rate\n", done.stderr
