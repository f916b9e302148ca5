"""What a load showed, beside what was planned and predicted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from exitflow.evaluation.accuracy import evaluate_plan
from exitflow.planning.simulation import simulate
from exitflow.planning.timing import timing
from exitflow.serving.traffic.load import Measured, right_answers
from exitflow.topology.rates import NodeRates, serving_plan

DEVIATIONS = 3.0  # standard deviations within which a figure counts as planned ...
NORMAL_95 = 1.959963984540054  # standard deviations around the mean of a normal distribution that hold 95 % of it
SLACK = 0.02  # ... and this much of everything on top, for buckets that fill at the start


@dataclass(frozen=True)
class NodeFigures:
    """The requests/s of a node, measured and planned."""

    exit: int
    received: float
    served: float
    forwarded: float
    planned_received: float
    planned_served: float
    planned_forwarded: float
    fallbacks: Mapping[str, int]
    out_of_tokens: int
    rejected: int


@dataclass(frozen=True)
class LinkFigures:
    """What one link has carried, and how much it may."""

    forwarded: float  # requests/s, audits too
    limit: float | None  # requests/s
    over_limit: bool  # in all of the time; its burst may go besides
    audited: int
    bytes_sent: int
    bytes_received: int


@dataclass(frozen=True)
class LoadReport:
    """Figures that can be printed and compared."""

    seconds: float
    sent: int
    answered: int
    failures: Mapping[str, int]
    requests_per_second: float
    milliseconds: Mapping[str, float | None]  # p50, p90, p99
    accuracy: float | None  # as served
    accuracy_interval: tuple[float, float] | None  # within which it is with 95 % confidence, by chance of the samples
    predicted_accuracy: float
    exit_share: tuple[float, ...]
    planned_exit_share: tuple[float, ...]
    nodes: Mapping[str, NodeFigures]
    links: Mapping[str, LinkFigures]  # child -> parent
    audit_agreement: float | None
    verdicts: tuple[tuple[str, bool], ...]  # sentence, and whether it is as planned
    rehearsed: Mapping[str, Mapping[str, float | None]] | None = None  # "measured", "plan", "simulation" -> figures

    @property
    def as_planned(self) -> bool:
        """Whether everything is as planned."""
        return all(good for _, good in self.verdicts)

    def to_json(self) -> dict[str, Any]:
        """The report as values that JSON can hold."""
        found = asdict(self)
        found["verdicts"] = [{"text": text, "as_planned": good} for text, good in self.verdicts]
        return found | {"as_planned": self.as_planned}


def report(measured: Measured) -> LoadReport:
    """What a finished load comes to, beside the plan."""
    plan, outcomes = measured.plan, measured.outcomes
    rates = serving_plan(plan.topology)
    evaluation = evaluate_plan(plan.samples.outputs, plan.topology, rates, confidence_kind=plan.confidence)
    right, count = right_answers(measured), len(outcomes.rows)
    exits = np.bincount(outcomes.exits, minlength=len(rates.exit_share) + 1)[1 : len(rates.exit_share) + 1]
    lasting = measured.lasting
    nodes = {name: _node_figures(measured, name, rates.nodes[name]) for name in lasting if name in rates.nodes}
    links = _link_figures(measured)
    shares = tuple((exits / count).tolist()) if count else (0.0,) * len(exits)
    accuracy = float(right.mean()) if count else None
    audited = sum(_change(measured, name, "audited") for name in lasting)
    agreed = sum(_change(measured, name, "agreed") for name in lasting)
    return LoadReport(
        seconds=measured.seconds,
        sent=outcomes.sent,
        answered=count,
        failures=dict(outcomes.failures),
        requests_per_second=count / measured.seconds,
        milliseconds=_percentiles(outcomes.latencies),
        accuracy=accuracy,
        accuracy_interval=wilson_interval(accuracy, count) if accuracy is not None else None,
        predicted_accuracy=evaluation.accuracy,
        exit_share=shares,
        planned_exit_share=tuple(rates.exit_share.tolist()),
        nodes=nodes,
        links=links,
        audit_agreement=agreed / audited if audited else None,
        verdicts=_verdicts(count, shares, rates.exit_share.tolist(), accuracy, evaluation.accuracy, links, measured),
        rehearsed=_rehearsed(measured, accuracy, shares, evaluation.accuracy) if plan.rehearsal and count else None,
    )


def _rehearsed(
    measured: Measured, accuracy: float | None, shares: tuple[float, ...], planned_accuracy: float
) -> Mapping[str, Mapping[str, float | None]]:
    """What was measured, beside what `plan` and `simulate` say about the times that nodes were told to take."""
    plan = measured.plan
    assert plan.rehearsal is not None
    topology = plan.rehearsal.topology(plan.topology)
    rates = serving_plan(topology)
    latency = timing(topology, rates).latency
    workload = replace(plan.workload, topology=topology)
    kind = plan.confidence
    found = simulate(workload, plan.samples.outputs, plan.calibrations, settings=plan.settings, confidence_kind=kind)
    simulated = np.bincount(found.exits, minlength=len(shares) + 1)[1:] / max(len(found.exits), 1)
    return {
        "measured": _figures(shares, accuracy, _percentiles(measured.outcomes.latencies)),
        "plan": _figures(rates.exit_share.tolist(), planned_accuracy, asdict(latency) if latency else {}),
        "simulation": _figures(simulated.tolist(), float(found.right.mean()), _percentiles(found.latency.tolist())),
    }


def _figures(
    shares: Sequence[float], accuracy: float | None, times: Mapping[str, float | None]
) -> Mapping[str, float | None]:
    exits = {f"exit {exit} %": 100 * share for exit, share in enumerate(shares, start=1)}
    right = None if accuracy is None else 100 * accuracy
    seconds = {f"{key} ms": times.get(key) for key in ("p50", "p90", "p99")}
    return {**exits, "right %": right, **seconds}


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """The 95 % confidence interval of a share that was found in `count` trials, after Wilson (1927)."""
    factor = 1 + NORMAL_95**2 / count
    centre = (share + NORMAL_95**2 / (2 * count)) / factor
    half = NORMAL_95 / factor * math.sqrt(share * (1 - share) / count + (NORMAL_95 / (2 * count)) ** 2)
    return max(centre - half, 0.0), min(centre + half, 1.0)


def _percentiles(latencies: list[float]) -> dict[str, float | None]:
    points = (50, 90, 99)
    if not latencies:
        return {f"p{point}": None for point in points}
    return {f"p{point}": 1e3 * float(np.percentile(latencies, point)) for point in points}


def _change(measured: Measured, name: str, key: str) -> int:
    return int(getattr(measured.after[name], key) - getattr(measured.before[name], key))


def _node_figures(measured: Measured, name: str, planned: NodeRates) -> NodeFigures:
    before, after, seconds = measured.before[name], measured.after[name], measured.seconds
    fallbacks = {
        reason: count - before.fallbacks.get(reason, 0)
        for reason, count in after.fallbacks.items()
        if count > before.fallbacks.get(reason, 0)
    }
    forwarded = sum(
        (link.forwarded - link.audited) - (before.links[parent].forwarded - before.links[parent].audited)
        for parent, link in after.links.items()
    )
    return NodeFigures(
        exit=after.exit,
        received=_change(measured, name, "received") / seconds,
        served=_change(measured, name, "served") / seconds,
        forwarded=forwarded / seconds,
        planned_received=planned.received_rate,
        planned_served=planned.serve_rate,
        planned_forwarded=planned.transfer_rate,
        fallbacks=fallbacks,
        out_of_tokens=_change(measured, name, "out_of_tokens"),
        rejected=_change(measured, name, "rejected"),
    )


def _link_figures(measured: Measured) -> dict[str, LinkFigures]:
    figures = {}
    for name in measured.lasting:
        limits = {link.name: link.max_transfer_rate for link in measured.plan.topology.by_name[name].parents}
        window = measured.after[name].time - measured.before[name].time
        for parent, after in measured.after[name].links.items():
            before = measured.before[name].links[parent]
            forwarded = after.forwarded - before.forwarded
            figures[f"{name} -> {parent}"] = LinkFigures(
                forwarded / measured.seconds,
                limits.get(parent),
                _is_over(forwarded, limits.get(parent), after.burst, window),
                after.audited - before.audited,
                after.bytes_sent - before.bytes_sent,
                after.bytes_received - before.bytes_received,
            )
    return figures


def _is_over(forwarded: int, limit: float | None, burst: float | None, seconds: float) -> bool:
    """`burst` is None where no limit is kept; then it is judged by one second's worth. Clocks are out by a request."""
    return limit is not None and forwarded > limit * seconds + (limit if burst is None else burst) + 1


def _verdicts(
    count: int,
    shares: tuple[float, ...],
    planned: list[float],
    accuracy: float | None,
    predicted: float,
    links: Mapping[str, LinkFigures],
    measured: Measured,
) -> tuple[tuple[str, bool], ...]:
    """Sentences that a person can believe: within what chance explains, or not."""
    failed = sum(measured.outcomes.failures.values())
    answered = (f"{count:,} of {measured.outcomes.sent:,} requests were answered", failed == 0)
    off = [abs(found - share) <= _tolerance(share, count) for found, share in zip(shares, planned, strict=True)]
    served, planned_text = ("-".join(f"{100 * share:.0f}" for share in each) for each in (shares, planned))
    rates = (f"exits served {served} % (n = {count:,}), planned {planned_text} %", all(off))
    full = [name for name, link in links.items() if link.over_limit]
    limits = (f"links over their limit: {', '.join(full) or 'none'}", not full)
    found = "no accuracy as served"
    if accuracy is not None:
        low, high = wilson_interval(accuracy, count)
        chance = f"{100 * low:.1f} to {100 * high:.1f} % with 95 % confidence, n = {count:,}"
        found = f"{100 * accuracy:.1f} % accuracy as served ({chance})"
    right = (
        f"{found}, {100 * predicted:.1f} % predicted",
        accuracy is not None and abs(accuracy - predicted) <= _tolerance(predicted, count),
    )
    gone = [name for name in measured.plan.addresses if name not in measured.lasting]
    lost = [(f"nodes that were not there all the time: {', '.join(gone)}", False)] if gone else []
    remark = [(measured.plan.remark, False)] if measured.plan.remark else []
    return (answered, rates, limits, right, *remark, *lost)


def _tolerance(share: float, count: int) -> float:
    return DEVIATIONS * math.sqrt(max(share * (1 - share), 0.01) / max(count, 1)) + SLACK
