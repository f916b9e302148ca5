"""Tables of the paper on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from exitflow.report.terminal import amount, print_table, spread
from paper.figures import TableFigures
from paper.results import Results
from paper.tables import published_gradient_variance


def print_figures(figures: TableFigures, datasets: Sequence[str]) -> None:
    """A table of the paper: what was measured, and in brackets what the paper reports."""
    table = figures.table
    for dataset in (name for name in table.datasets if name in datasets):
        columns = ["", *table.settings]
        rows = [
            [row.label, *(_cell(figures, dataset, row.label, each) for each in table.settings)] for row in table.rows
        ]
        if table.shows_costs:
            columns += ["bytes sent", "multiply-adds"]
            rows = [[*row, *_costs(figures, dataset, row[0])] for row in rows]
        title = f"{table.title}, {dataset}: accuracy as served in %, seeds {_numbers(figures.seeds)}"
        print_table(f"{title} (the paper's)" if table.published else title, columns, rows)


def _costs(figures: TableFigures, dataset: str, label: str) -> list[str]:
    found = figures.costs(dataset, label)
    return [amount(found.bytes_sent), amount(found.multiply_adds)] if found else ["-", "-"]


def _cell(figures: TableFigures, dataset: str, label: str, setting: str) -> str:
    measured, paper = figures.accuracy(dataset, label, setting), figures.table.paper_figure(dataset, label, setting)
    text = spread(measured.mean, measured.std) if measured else "-"
    return f"{text} ({paper['mean']:.1f})" if paper else text


def print_gradient_variance(results: Results, datasets: Sequence[str], seeds: Sequence[int]) -> None:
    """The paper's Table 3."""
    rows = []
    for dataset in datasets:
        for seed in seeds:
            found = results.gradient_variance(dataset, seed)
            if found:
                rows.append([f"{dataset}, seed {seed}", *(f"{value:.2e}" for value in found)])
        rows.append([f"{dataset}, the paper", *(f"{value:.2e}" for value in published_gradient_variance(dataset))])
    exits = [f"exit {exit}" for exit in range(1, 4)]
    print_table("Table 3: mean variance of the gradient's elements, before training", ["", *exits], rows)


def _numbers(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
