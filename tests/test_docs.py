"""The documentation builds as a site, and what the tutorial tells people to type works as it stands there."""

import itertools
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text()
BLOCKS = re.findall(r'^```(\w+)(?: title="([^"]*)")?\n(.*?)^```', TUTORIAL, flags=re.DOTALL | re.MULTILINE)
BIN = Path(sys.executable).parent


def run(command: str, folder: Path) -> str:
    program, *arguments = shlex.split(command)
    done = subprocess.run([BIN / program, *arguments], cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout


def shortened(text: str) -> str:
    """Enough to see that it works, not that it learns."""
    return text.replace("rounds = 15", "rounds = 2").replace('write("train", 4000)', 'write("train", 700)')


@pytest.mark.heavy
def test_the_tutorial_goes_from_an_empty_folder_to_an_answer(tmp_path):
    server = None
    said = {}
    try:
        for language, title, text in BLOCKS:
            if language != "sh":
                (tmp_path / title).write_text(shortened(text))
            elif title == "in a second terminal":
                program, *arguments = [*shlex.split(text), "--json"]
                server = subprocess.Popen([BIN / program, *arguments], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
                nodes = json.loads("".join(itertools.takewhile(lambda line: line != "}\n", server.stdout)) + "}")[
                    "nodes"
                ]
            else:
                for command in text.splitlines():
                    said[command] = run(
                        command.replace("ADDRESS", nodes["camera-0"]["http"] if server else ""), tmp_path
                    )
    finally:
        if server:
            server.terminate()
            server.communicate(timeout=30)
    assert "70.0" in said["exitflow plan shapes.toml"]
    assert "whole system" in said["exitflow evaluate runs/shapes"]
    assert re.search(r"answered with exit [123]: \w+; it is a", said["python ask.py ADDRESS"])


def test_every_page_is_short_enough_to_be_read():
    lengths = {page.relative_to(ROOT): page.read_text().count("\n") for page in (ROOT / "docs").rglob("*.md")}
    assert not {str(page): length for page, length in lengths.items() if length > 250}
    assert lengths[Path("docs/results.md")] <= 120


@pytest.mark.heavy
@pytest.mark.filterwarnings("default")
def test_the_site_builds_without_a_warning(tmp_path):
    command = [BIN / "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path / "site"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    commands = (tmp_path / "site" / "commands.html").read_text()
    assert "exitflow federation init" in commands
    for page in (tmp_path / "site").rglob("*.html"):
        assert not re.search(
            r'(?:src|href)="https?://(?!github.com|squidfunk)[^"]*\.(?:js|css|woff2?)"', page.read_text()
        ), page
