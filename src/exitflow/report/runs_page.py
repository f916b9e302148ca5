"""The report on one run, or on the runs of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from exitflow.data.data_spec import DataSpec
from exitflow.errors import RunError
from exitflow.federated.training_spec import TrainingSpec
from exitflow.report.page import MISSING, Field, Page, PageTable, Section
from exitflow.report.plots import ERROR_TERMS_MEANING, WEIGHT_LIMITS, Plot, curves_plot, error_terms_plot
from exitflow.report.run_details import Measured, costs_table, measured_table, tree_section, weights_table
from exitflow.report.series import Series, by_kind
from exitflow.report.terminal import percent, spread
from exitflow.runs.runs import Run
from exitflow.runs.spread import Spread
from exitflow.system.system import System, layers
from exitflow.topology.rates import serving_plan


def runs_page(folder: Path, runs: Sequence[Run], measured: Measured | None = None) -> Page:
    """A page on what the records of these runs say, and on what was found on test data."""
    measured = measured or {}
    series = by_kind(runs)
    _check_comparable(series)
    system = series[0].trainings[0].system
    what = "weightings" if all(each.weighting for each in series) else "ways to train"
    title = system.name if len(runs) == 1 else f"{system.name}: {len(series)} {what}"
    if len(runs) > 1 and len(series) == 1:
        title = f"{system.name}: {len(runs)} runs"
    tables = [_accuracy_table(series), measured_table(series, measured, _num_exits(series)), *_unfinished(runs)]
    sections = [Section("accuracy", "Accuracy", tables=tables)]
    if any(run.records for run in runs):
        sections.append(_training_section(series, system))
    sections.append(tree_section(runs, measured))
    terms = {each.label: each.error_terms for each in series if each.error_terms}
    if terms:
        plot = error_terms_plot("error-terms", f"{_where(system)}: what the weights cost by the error bound", terms)
        text = (
            f"{ERROR_TERMS_MEANING} Of the trainings that measured gradients, which only some weightings need; "
            "exitflow explain has all of them."
        )
        sections.append(Section("error-terms", "The error bound", text, plots=[plot]))
    lead = "How accurately it answers, how it was trained, and what every node does."
    return Page(title, lead, _facts(folder, system, runs), sections)


def _training_section(series: Sequence[Series], system: System) -> Section:
    """Figures of what changes over the rounds, and tables of what does not."""
    weights = weights_table(series, _num_exits(series))
    tables = [table for table in (costs_table(series), weights) if table]
    plots = _plots(series, system)
    return Section("training", "Training", tables=tables, plots=plots[:1] if weights else plots)


def _check_comparable(series: Sequence[Series]) -> None:
    """Refuse to average or to set side by side what was trained on different systems."""
    weighted = [each for each in series if each.weighting]  # a method may change anything
    pairs = [(each.trainings[0], other, _but_for_seed) for each in series for other in each.trainings[1:]]
    pairs += [(weighted[0].trainings[0], each.trainings[0], _but_for_training) for each in weighted[1:]]
    for one, other, what in pairs:
        if what(one.system) != what(other.system):
            advice = "report on one of them, or on the folder of one `exitflow compare`"
            raise RunError(f"{one.name} and {other.name} are runs of different systems; {advice}")


def _but_for_seed(system: System) -> System:
    return replace(system, data=replace(system.data, dir=None), training=replace(system.training, seed=0))


def _but_for_training(system: System) -> System:
    return replace(system, data=replace(system.data, dir=None), training=TrainingSpec())


def _facts(folder: Path, system: System, runs: Sequence[Run]) -> dict[str, str]:
    """The facts that all runs share, which differ at most in how they train `system`."""
    share = np.bincount(layers(system), weights=serving_plan(system.topology).exit_share)[1:]  # of each layer
    data, training = system.data, system.training
    seeds = sorted({run.system.training.seed for run in runs})
    steps = list(dict.fromkeys(run.system.training.server_step for run in runs))
    return {
        "Folder": folder.name or str(folder),
        "System": f"{len(system.topology.nodes):,} nodes, {len(share)} exits",
        "Exits answer": ", ".join(f"{percent(each)} %" for each in share),
        "Data": f"{data.name}, {_partition(data)}",
        "Training": f"{training.rounds:,} rounds, server step {', '.join(steps)}",
        "Seeds" if len(seeds) > 1 else "Seed": ", ".join(map(str, seeds)),
    }


def _partition(data: DataSpec) -> str:
    shares = ":".join(f"{share:g}" for share in data.layer_shares)
    text = f"{shares} over the layers" if shares else f"{data.partition} partition"
    return text if data.dirichlet_alpha is None else f"{text}, labels by Dirichlet({data.dirichlet_alpha:g})"


def _accuracy_table(series: Sequence[Series]) -> PageTable:
    num_exits = _num_exits(series)
    rows = []
    for each in series:
        curves = [each.accuracy(), *(each.exit_accuracy(exit) for exit in range(1, num_exits + 1))]
        rows.append((each.label, [_field(curve.values[-1] if curve.values else None) for curve in curves]))
    columns = ["trained by", "as served", *(f"exit {exit}" for exit in range(1, num_exits + 1))]
    caption = "After the last round that was validated: accuracy on validation data, in %"
    return PageTable(caption, columns, rows)


def _num_exits(series: Sequence[Series]) -> int:
    return max(max(layers(each.trainings[0].system)) for each in series)


def _field(value: Spread | None) -> Field:
    return Field(spread(value.mean, value.std)) if value else Field(MISSING, missing=True)


def _unfinished(runs: Sequence[Run]) -> list[PageTable]:
    rows = []
    for run in runs:
        done, rounds = run.records[-1].round if run.records else 0, run.system.training.rounds
        if done < rounds:
            rows.append((run.name, [Field(f"{done:,}"), Field(f"{rounds:,}")]))
    return [PageTable("Not finished yet", ["run", "rounds done", "of"], rows)] if rows else []


def _where(system: System) -> str:
    return f"{system.name}, {system.data.name}"


def _plots(series: Sequence[Series], system: System) -> list[Plot]:
    exits = range(1, _num_exits(series) + 1)
    learned = {f"exit {exit}": (lambda each, exit=exit: each.exit_accuracy(exit)) for exit in exits}
    weights = {f"exit {exit}": (lambda each, exit=exit: each.exit_weight(exit)) for exit in exits}
    panels = {"as served": Series.accuracy, **learned}
    return [
        curves_plot("learning", f"{_where(system)}: learning", "validation accuracy, %", panels, series),
        curves_plot(
            "weights", f"{_where(system)}: weights of the exits", "weight, %", weights, series, limits=WEIGHT_LIMITS
        ),
    ]
