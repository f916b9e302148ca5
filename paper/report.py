"""`python -m paper report`: a page of all results, and the tables of documents."""

from __future__ import annotations

from pathlib import Path

import click

from exitflow.errors import ConfigError
from exitflow.report.page import write_page
from exitflow.report.terminal import progress_bar
from paper import documents
from paper.named_results import check_systems
from paper.results import Results
from paper.results_page import results_page


@click.command(short_help="A page with tables and figures of RESULTS.")
@click.argument("results")
@click.option("--out", metavar="DIR", help="Where the page is written; report/SCALE beside RESULTS if not given.")
@click.option("--update", multiple=True, metavar="FILE.md", help="Write the tables of a document anew, and no page.")
@click.option("--check", multiple=True, metavar="FILE.md", help="Only see whether the tables of a document are right.")
def report(results: str, out: str | None, update: tuple[str, ...], check: tuple[str, ...]) -> None:
    """A page with the tables and figures of RESULTS, which needs no network; the figures also as PNG files.

    RESULTS is a file that `reproduce` filled. Tables of documents stand between <!-- results:table1 cifar10 -->
    and <!-- end -->.

    \b
    Example:
      python -m paper report paper/results/small.jsonl --out report
      python -m paper report paper/results/small.jsonl --update docs/results.md
    """
    if (update or check) and out:
        raise ConfigError("writes a page, --update and --check do not: choose one", key="--out")
    if update or check:
        _documents(results, update, check)
        return
    page, figures = build_report(results, out)
    click.echo(f"{page}: written, and {figures} {'figure' if figures == 1 else 'figures'} beside it.")
    if not figures:
        click.echo(f"None of the results in {results} belongs to a table.", err=True)


def build_report(path: str | Path, out: str | Path | None = None) -> tuple[Path, int]:
    """Write the report on the store at `path`; the page, and the number of its figures."""
    results = _results(path)
    page = results_page(results)
    with progress_bar(len(page.plots), unit="figures") as show:
        return write_page(page, Path(out) if out else results.path.parent / "report" / results.path.stem, show), len(
            page.plots
        )


def _results(path: str | Path) -> Results:
    """The store at `path`, which has something in it."""
    results = Results(path)
    if not results.lines:
        raise ConfigError(f"there are no results of `python -m paper reproduce` in {str(path)!r}", key="RESULTS")
    check_systems(results)
    return results


def _documents(path: str, update: tuple[str, ...], check: tuple[str, ...]) -> None:
    results = _results(path)
    for name in update:
        documents.check_marks(Path(name))  # of all, before any is written
    for name in update:
        count = documents.update(Path(name), results)
        click.echo(f"{name}: {count} {'figure' if count == 1 else 'figures'} or tables changed.")
    for name in check:
        count = documents.check(Path(name), results)
        click.echo(f"{name}: {count} tables and figures agree with the records.")
