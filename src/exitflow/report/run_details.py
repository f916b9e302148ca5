"""What the page of runs says beside its figures: test accuracy, the tree, every node, and what the training took."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from exitflow.report.page import MISSING, Field, PageTable, Section
from exitflow.report.series import Series, Training
from exitflow.report.terminal import amount, percent, rate, spread
from exitflow.report.tree import draw_tree
from exitflow.runs.measured_accuracy import MeasuredAccuracy
from exitflow.runs.spread import Spread
from exitflow.runs.training_costs import TrainingCosts
from exitflow.system.system import System, layers
from exitflow.topology.rates import serving_plan

Measured = Mapping[str, MeasuredAccuracy]  # the name of a run -> what was found on test data
MOST_NODES, MOST_OPEN = 200, 24  # rows of the table of nodes, and of one that is shown without being asked for


def measured_table(series: Sequence[Series], measured: Measured, num_exits: int) -> PageTable:
    """Accuracy on test data of the runs that were evaluated."""
    rows = []
    for each in series:
        found = [measured[run.name] for run in each.trainings if run.name in measured]
        numbers = [[one.accuracy, *_by_layer(one.exit_accuracy, each.trainings[0].system)] for one in found]
        values: list[Spread | None] = [Spread.of(column) for column in zip(*numbers, strict=True)] or [None] * (
            num_exits + 1
        )
        rows.append((each.label, [_field(value) for value in values]))
    columns = ["trained by", "as served", *(f"exit {exit}" for exit in range(1, num_exits + 1))]
    notes = [] if measured else ["`exitflow evaluate RUN` and `exitflow compare` put figures here."]
    return PageTable("Accuracy on test data, in %", columns, rows, [note.replace("`", "") for note in notes])


def _by_layer(values: Sequence[float], system: System) -> list[float]:
    """The mean of all networks that were cut from an exit."""
    numbered = list(zip(layers(system), values, strict=True))
    found = [[value for layer, value in numbered if layer == exit] for exit in range(1, max(layers(system)) + 1)]
    return [statistics.fmean(each) for each in found]


def _field(value: Spread | None) -> Field:
    return Field(spread(value.mean, value.std)) if value else Field(MISSING, missing=True)


def weights_table(series: Sequence[Series], num_exits: int) -> PageTable | None:
    """The weights of the exits where no training changes them; None where one does, and a figure says more."""
    rows = []
    for each in series:
        curves = [each.exit_weight(exit).values for exit in range(1, num_exits + 1)]
        if any(len({value.mean for value in values}) > 1 for values in curves):
            return None
        rows.append((each.label, [_field(values[-1] if values else None) for values in curves]))
    columns = ["trained by", *(f"exit {exit}" for exit in range(1, num_exits + 1))]
    return PageTable("Weights of the exits, the same in every round, in %", columns, rows)


def costs_table(series: Sequence[Series]) -> PageTable | None:
    """What a training took so far; None before the first round."""
    rows = []
    for each in series:
        records = each.trainings[0].records
        if records:
            costs = TrainingCosts.of(records)
            seconds = sum(record.seconds or 0.0 for record in records)
            work = MISSING if costs.multiply_adds is None else amount(costs.multiply_adds)
            fields = [f"{len(records):,}", amount(costs.bytes_sent), work, f"{seconds:,.0f}"]
            rows.append((each.label, [Field(text) for text in fields]))
    columns = ["trained by", "rounds", "bytes sent", "multiply-adds", "seconds"]
    notes = ["Bytes over all links, down and up; multiply-adds of the forward passes. Of several seeds: the first run."]
    return PageTable("What a training took", columns, rows, notes) if rows else None


def tree_section(runs: Sequence[Training], measured: Measured) -> Section:
    """The tree with its rates, and a row for each node where there is one run."""
    system = runs[0].system
    drawing = draw_tree(system.topology, serving_plan(system.topology))
    tables = [_nodes_table(runs[0], measured.get(runs[0].name))] if len(runs) == 1 else []
    text = "What every node answers of what reaches it, and what every link carries, as planned."
    return Section("tree", "The tree", text, tables, drawing=drawing)


def _nodes_table(run: Training, measured: MeasuredAccuracy | None) -> PageTable:
    """What a node holds, answers and sends."""
    topology, plan = run.system.topology, serving_plan(run.system.topology)
    samples = run.profile.node_samples
    link_bytes = run.records[-1].link_bytes if run.records else {}
    rows = []
    for node in topology.nodes[:MOST_NODES]:
        rates = plan.nodes[node.name]
        num_bytes = 2 * sum(link_bytes.get(f"{node.name}->{link.name}", 0) for link in node.parents)
        accuracy = measured.node_accuracy.get(node.name) if measured else None
        texts = [
            str(node.exit),
            f"{samples[node.name]:,}" if node.name in samples else MISSING,
            rate(rates.received_rate),
            percent(rates.serve_fraction),
            rate(sum(rates.parents.values())),
            percent(accuracy) if accuracy is not None else MISSING,
            amount(num_bytes) if num_bytes else MISSING,
        ]
        rows.append((node.name, [Field(text, missing=text == MISSING) for text in texts]))
    columns = ["node", "exit", "samples", "requests/s", "answers, %", "forwards/s", "right on test, %", "bytes a round"]
    left_out = len(topology.nodes) - len(rows)
    notes = ["Bytes a round: the model down and the update up, over the links to its parents."]
    notes += [f"{left_out:,} more nodes are left out."] if left_out else []
    return PageTable("Nodes", columns, rows, notes, closed=len(rows) > MOST_OPEN)
