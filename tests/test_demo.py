"""What `make demo` shows is what the README says that it shows."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from exitflow import compare, load_system

pytestmark = pytest.mark.heavy

ROOT = Path(__file__).parents[1]


def commands():
    """The words behind `exitflow` of each command of the demo."""
    done = subprocess.run(
        ["make", "--dry-run", "--assume-old=.venv/.installed", "demo"], cwd=ROOT, capture_output=True, text=True
    )
    lines = [shlex.split(line) for line in done.stdout.splitlines()]
    return [words[1:] for words in lines if words[0].endswith("/exitflow")]


def option(words, name):
    return words[words.index(name) + 1]


def comparison():
    return next(words for words in commands() if words[0] == "compare")


def promised():
    """weighting -> mean and deviation of the accuracy as served, in the README."""
    rows = re.findall(r"^([\w-]+) .* ([\d.]+) ± ([\d.]+)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    return {name: (float(mean), float(std)) for name, mean, std in rows}


def test_the_demo_shows_what_the_default_does_for_a_user():
    words = comparison()
    system = load_system(ROOT / words[1])
    assert (system.training.weighting, system.training.server_step) == ("auto", "coverage")
    assert option(words, "--weightings") == "auto,serving-rate,balanced-adj"
    assert len(option(words, "--seeds").split(",")) == 3
    assert [each[0] for each in commands()] == ["plan", "compare", "report", "evaluate", "export", "load"]


def test_the_readme_has_a_row_for_each_training_of_the_demo_and_the_default_is_ahead_in_it():
    found = promised()
    assert list(found) == option(comparison(), "--weightings").split(",")
    assert max(found, key=found.get) == "auto"


@pytest.mark.slow
def test_the_demo_comes_out_as_the_readme_says(tmp_path):
    words = comparison()
    names, seeds = option(words, "--weightings").split(","), [int(seed) for seed in option(words, "--seeds").split(",")]
    system = load_system(ROOT / words[1], [option(words, "--set")])
    found = compare(system, names, seeds, out=tmp_path, backend="processes")
    for name, (mean, std) in promised().items():
        assert 100 * found.accuracy(name).mean == pytest.approx(mean, abs=max(2 * std, 0.5))
    assert max(names, key=lambda name: found.accuracy(name).mean) == "auto"
