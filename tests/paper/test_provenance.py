"""Figures say when, from which source and where they came about."""

import json
import shutil
import subprocess

import pytest

from exitflow.config import encode
from paper import provenance as module
from paper.provenance import commit, provenance


@pytest.mark.heavy
def test_provenance_says_when_what_and_where():
    found = provenance()
    assert "cores" in found.machine
    assert "/" not in found.machine.replace("/s", "")  # no paths
    assert all(encode(found).values())
    assert json.dumps(encode(found))


@pytest.mark.heavy
@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_the_commit_is_that_of_exitflow_not_of_whatever_repository_it_is_installed_in(tmp_path, monkeypatch):
    def git(*arguments):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=tmp_path, check=True)

    git("init", "--quiet")
    git("commit", "--quiet", "--allow-empty", "--message", "another project")
    (tmp_path / "provenance.py").write_text("")
    monkeypatch.setattr(module, "__file__", str(tmp_path / "provenance.py"))
    commit.cache_clear()
    try:
        assert commit() == "unknown"
        git("add", "provenance.py")
        git("commit", "--quiet", "--message", "ours")
        commit.cache_clear()
        clean = commit()
        assert len(clean) >= 12
        (tmp_path / "provenance.py").write_text("changed")
        commit.cache_clear()
        assert commit() == f"{clean}-changed"
    finally:
        commit.cache_clear()
