"""From a folder to its report."""

from __future__ import annotations

from pathlib import Path

from exitflow.errors import RunError
from exitflow.experiments.named_results import check_systems
from exitflow.experiments.results import Results, TrainingFolder
from exitflow.report.page import Page, write_page
from exitflow.report.results_page import results_page
from exitflow.report.runs_page import runs_page
from exitflow.report.terminal import progress_bar


def build_report(folder: str | Path, out: str | Path | None = None) -> tuple[Path, int]:
    """Write the report on `folder`; the page, and the number of its figures."""
    folder = Path(folder)
    page = make_page(folder)
    with progress_bar(len(page.plots), unit="figures") as show:
        return write_page(page, Path(out) if out else folder / "report", show), len(page.plots)


def make_page(folder: Path) -> Page:
    """By what lies in the folder: results, one run, or several."""
    if not folder.is_dir():
        raise RunError(f"{folder}: there is no such folder")
    if (folder / "spec.toml").is_file():
        return runs_page(folder, [TrainingFolder(folder)])
    results = Results(folder)
    if results.provenances() or (folder / ".work").is_dir():
        check_systems(results)
        return results_page(results)
    runs = [TrainingFolder(path.parent) for path in sorted(folder.glob("*/spec.toml"))]
    if not runs:
        raise RunError(f"{folder}: holds no results of `exitflow reproduce` and no runs")
    return runs_page(folder, runs)
