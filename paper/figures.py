"""The figures of a table, from results on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from exitflow.runs.spread import Spread
from exitflow.runs.training_costs import TrainingCosts
from paper.results import Result, Results
from paper.tables import DATASETS, GRADIENT_VARIANCE, Cell, Table, published_gradient_variance


@dataclass(frozen=True)
class TableFigures:
    """A table as far as its trainings have results."""

    table: Table
    results: Results
    seeds: tuple[int, ...]

    def found(self, cell: Cell) -> list[Result]:
        """The results that a cell rests on, one for each seed that has one."""
        own = cell.row.shows_own_answers
        results = (self.results.get(cell.training(seed), own_answers=own) for seed in self.seeds)
        return [result for result in results if result is not None]

    def accuracy(self, dataset: str, label: str, setting: str) -> Spread | None:
        """As served; None before the first result."""
        found = self.found(self.table.cell(dataset, label, setting))
        return Spread.of([result.accuracy(setting) for result in found]) if found else None

    def costs(self, dataset: str, label: str) -> TrainingCosts | None:
        """What a training of the row took, of the first setting and seed that has a result."""
        cells = (self.table.cell(dataset, label, setting) for setting in self.table.settings)
        found = next((results[0] for cell in cells if (results := self.found(cell))), None)
        return found.costs if found else None

    def _costs_json(self, cell: Cell) -> dict[str, Any] | None:
        found = self.found(cell)
        return asdict(found[0].costs) if found else None

    def to_json(self, datasets: Sequence[str] = DATASETS) -> dict[str, Any]:
        """Everything, beside what the paper reports; accuracies are fractions."""
        cells = []
        for cell in self.table.cells(datasets):
            place = (cell.dataset, cell.row.label, cell.setting)
            measured = self.accuracy(*place)
            cells.append(
                {
                    "dataset": cell.dataset,
                    "training": cell.row.label,
                    "setting": cell.setting,
                    "accuracy": asdict(measured) if measured else None,
                    "seeds": len(self.found(cell)),
                    "paper": _as_fractions(self.table.paper_figure(*place)),
                    "costs": self._costs_json(cell),
                }
            )
        return {"table": self.table.name, "title": self.table.title, "seeds": list(self.seeds), "cells": cells}


def _as_fractions(figure: Mapping[str, float] | None) -> dict[str, float] | None:
    return None if figure is None else {name: value / 100 for name, value in figure.items()}


def gradient_variance_json(results: Results, datasets: Sequence[str], seeds: Sequence[int]) -> dict[str, Any]:
    """The paper's Table 3: the mean variance of the gradient's elements at each exit, by data set and seed."""
    measured = {
        dataset: {str(seed): results.gradient_variance(dataset, seed) for seed in seeds} for dataset in datasets
    }
    paper = {dataset: published_gradient_variance(dataset) for dataset in datasets}
    return {"table": GRADIENT_VARIANCE, "seeds": list(seeds), "variance": measured, "paper": paper}
