"""From the folder of a run, or of several, to its report."""

from __future__ import annotations

from pathlib import Path

from exitflow.errors import RunError
from exitflow.report.page import Page, write_page
from exitflow.report.runs_page import runs_page
from exitflow.report.terminal import progress_bar
from exitflow.runs.measured_accuracy import read_accuracy
from exitflow.runs.runs import Run


def build_report(folder: str | Path, out: str | Path | None = None) -> tuple[Path, int]:
    """Write the report on `folder`; the page, and the number of its figures."""
    folder = Path(folder)
    page = make_page(folder)
    with progress_bar(len(page.plots), unit="figures") as show:
        return write_page(page, Path(out) if out else folder / "report", show), len(page.plots)


def make_page(folder: Path) -> Page:
    """By what lies in the folder: one run, or several."""
    if not folder.is_dir():
        raise RunError(f"{folder}: there is no such folder")
    own = folder / "spec.toml"
    specs = [own] if own.is_file() else sorted(folder.glob("*/spec.toml"))
    if not specs:
        raise RunError(f"{folder}: holds no runs")
    found = {path.parent.name: read_accuracy(path.parent) for path in specs}
    measured = {name: accuracy for name, accuracy in found.items() if accuracy}
    return runs_page(folder, [Run(path.parent) for path in specs], measured)
