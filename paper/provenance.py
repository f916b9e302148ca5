"""When, from which source and on what machine figures come about."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Provenance:
    """Where figures come from, as far as it is known."""

    date: str = "unknown"
    commit: str = "unknown"
    machine: str = "unknown"
    instructions: str = "unknown"  # of the processor that PyTorch used, which decide the last bits of a sum
    python: str = "?"
    torch: str = "?"


def provenance() -> Provenance:
    """That of figures that come about now."""
    import torch

    return Provenance(
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        commit=commit(),
        machine=f"{_processor()}, {os.cpu_count()} cores, {platform.system()}",
        instructions=torch.backends.cpu.get_cpu_capability(),
        python=platform.python_version(),
        torch=torch.__version__,
    )


@cache
def commit() -> str:
    """Of the source that runs, as it was when this was first asked; `-changed` where it is not quite that."""
    source = Path(__file__)
    describe = ("describe", "--always", "--dirty=-changed", "--abbrev=12", "--exclude=*")
    try:  # an installed package may lie in a repository that is not its own, and does not track it
        _git(source.parent, "ls-files", "--error-unmatch", source.name)
        return _git(source.parent, *describe)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
