"""What a system can be expected to do under a plan, and the objectives that its owner may have for it.

`prospect` puts together what is known: rates always, times where the system says how long things take, accuracy where
a run has been measured. `best_kept` looks for the plan that keeps all objectives with the best rest: it scales what the
nodes of each exit send up, beginning with everything, nothing and what lies between, and then goes to ever nearer
neighbours as long as they are better.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from exitflow.config import require
from exitflow.errors import ConfigError, suggestion
from exitflow.evaluation.accuracy import evaluate_plan
from exitflow.evaluation.outputs import ExitOutputs
from exitflow.planning.classes import node_classes
from exitflow.planning.measured import measured_plan
from exitflow.planning.timing import Timing, is_timed, timing
from exitflow.topology.graph import Link, Node, Topology
from exitflow.topology.rates import ServingPlan, serving_plan

MEASURES = {"p50": "ms", "p90": "ms", "p99": "ms", "accuracy": "%", "cost": ""}  # what an objective may bound
FIRST_FACTORS = (1.0, 0.75, 0.5, 0.25, 0.0)  # of what all nodes send up, from which the search begins
STEPS = (0.25, 0.125, 0.0625, 0.03125, 0.015625)  # by which it goes on
GROWS = 1e6  # how badly a queue that grows without end misses any time


@dataclass(frozen=True)
class Prospect:
    """What is expected of a topology whose links carry what its limits allow."""

    topology: Topology
    plan: ServingPlan
    timing: Timing | None  # None where nothing is known of time, bytes and prices
    accuracy: float | None  # share of requests answered right; None where nothing is measured

    @property
    def depth(self) -> float:
        """The mean exit that answers: what problem P2 maximises."""
        return float(sum(exit * share for exit, share in enumerate(self.plan.exit_share, start=1)))

    def value(self, measure: str) -> float | None:
        """One of `MEASURES`: milliseconds, a share or a cost; None where it is not known or without end."""
        if measure == "accuracy":
            return self.accuracy
        if self.timing is None:
            return None
        if measure == "cost":
            return self.timing.cost_per_million
        return getattr(self.timing.latency, measure) if self.timing.latency else None

    def to_json(self) -> dict[str, Any]:
        """The prospect as values that JSON can hold."""
        known = {measure: self.value(measure) for measure in MEASURES}
        bottleneck = self.timing.to_json()["bottleneck"] if self.timing else None
        return {**known, "exit_share": self.plan.exit_share.tolist(), "bottleneck": bottleneck}


def prospect(topology: Topology, outputs: ExitOutputs | None = None) -> Prospect:
    """What is known of `topology`, with the answers of a run where these are given."""
    plan = serving_plan(topology)
    timed = timing(topology, plan) if is_timed(topology) else None
    return Prospect(topology, plan, timed, None if outputs is None else evaluate_plan(outputs, topology, plan).accuracy)


def best_prospect(topology: Topology, outputs: ExitOutputs | None = None, *, price: float = 0.0) -> Prospect:
    """The prospect of the best plan: P1 with the answers of a run, P2 without."""
    best = topology if outputs is None else measured_plan(outputs, topology, price=price).topology
    return prospect(best, outputs)


@dataclass(frozen=True)
class Objective:
    """A bound that a system shall keep, such as p99=50ms."""

    text: str  # as the user gave it
    measure: str
    bound: float  # milliseconds, a share, or what a million requests may cost

    def missed(self, found: Prospect) -> float:
        """By which part of the bound it is missed; 0 where it is kept."""
        value = found.value(self.measure)
        if value is None:
            assert found.timing is not None
            return GROWS * found.timing.bottleneck[1]
        beyond = self.bound - value if self.measure == "accuracy" else value - self.bound
        return max(beyond, 0.0) / self.bound

    def reached(self, found: Prospect) -> str:
        """The value that is reached, in words."""
        value = found.value(self.measure)
        if value is None:
            return f"no {self.measure}, as a queue grows without end"
        return (
            f"{self.measure} {100 * value:.1f} %"
            if self.measure == "accuracy"
            else (f"{self.measure} {value:.1f}{' ms' if MEASURES[self.measure] else ''}")
        )


def parse_objective(text: str) -> Objective:
    """`p99=50ms`, `accuracy=93%` or `cost=20`, of a million requests."""
    measure, _, amount = text.partition("=")
    if measure not in MEASURES:
        problem = f"there is no objective {measure!r}{suggestion(measure, MEASURES)}"
        raise ConfigError(problem, key="--slo")
    unit = MEASURES[measure]
    try:
        bound = float(amount.strip().removesuffix(unit)) / (100 if unit == "%" else 1)
    except ValueError:
        bound = float("nan")
    most = 1.0 if measure == "accuracy" else float("inf")
    example = {"ms": f"{measure}=50ms", "%": "accuracy=93%", "": "cost=20"}[unit]
    require(0 < bound <= most and bound < float("inf"), "--slo", f"expected a bound such as {example}, got {text!r}")
    return Objective(text, measure, bound)


def check_measurable(objectives: Sequence[Objective], found: Prospect) -> None:
    """Refuse an objective of which nothing is known."""
    for objective in objectives:
        if objective.measure == "accuracy":
            require(found.accuracy is not None, "--slo", "accuracy is only known of a run: add --run RUN")
        else:
            problem = "says nothing of time, bandwidth or prices: give nodes service_ms, links round_trip_ms or price"
            require(found.timing is not None, "--slo", f"{objective.text} cannot be judged, as the system {problem}")


def best_kept(
    topology: Topology, objectives: Sequence[Objective], outputs: ExitOutputs | None = None, *, price: float = 0.0
) -> Prospect:
    """The plan that keeps all objectives with the best rest, or a ConfigError with what would help first."""
    found = _search(topology, objectives, outputs, price)
    if not _missed(objectives, found):
        return found
    worst = max(objectives, key=lambda each: each.missed(found))
    problem = f"no plan keeps {worst.text}: the nearest has {worst.reached(found)}"
    helped = [(what, _search(better, objectives, outputs, price)) for what, better in _improvements(topology)]
    what, nearest = min(helped, key=lambda each: _missed(objectives, each[1]), default=("", found))
    if _missed(objectives, nearest) < _missed(objectives, found):
        problem += f"; what would help first is {what}, for {worst.reached(nearest)}"
    raise ConfigError(problem, key="--slo")


def _search(topology: Topology, objectives: Sequence[Objective], outputs: ExitOutputs | None, price: float) -> Prospect:
    """Pattern search over the factors by which the nodes of each exit send up less."""
    base = best_prospect(topology, outputs, price=price)
    check_measurable(objectives, base)
    exits = sorted({node.exit for node in topology.nodes if node.parents})
    rank = _rank(objectives)

    def at(factors: tuple[float, ...]) -> Prospect:
        return prospect(_scaled(base, dict(zip(exits, factors, strict=True))), outputs)

    starts = [(factor,) * len(exits) for factor in FIRST_FACTORS]
    found = {factors: at(factors) for factors in starts}
    best = max(starts, key=lambda factors: rank(found[factors]))
    for step in STEPS:
        while True:
            near = [factors for factors in _neighbours(best, step) if factors not in found]
            found |= {factors: at(factors) for factors in near}
            better = max((best, *near), key=lambda factors: rank(found[factors]))
            if better == best:
                break
            best = better
    return found[best]


def _neighbours(factors: tuple[float, ...], step: float) -> Iterator[tuple[float, ...]]:
    for place, factor in enumerate(factors):
        for other in {min(factor + step, 1.0), max(factor - step, 0.0)}:
            yield (*factors[:place], other, *factors[place + 1 :])


def _rank(objectives: Sequence[Objective]) -> Callable[[Prospect], tuple[float, ...]]:
    """Larger is better: first what is missed least, then most right answers, or least cost and time for enough."""
    accuracy_is_bounded = any(objective.measure == "accuracy" for objective in objectives)

    def rank(found: Prospect) -> tuple[float, ...]:
        right = found.depth if found.accuracy is None else found.accuracy
        cost, late = (found.value(measure) or 0.0 for measure in ("cost", "p99"))
        rest = (-cost, -late, right) if accuracy_is_bounded else (right, -cost, -late)
        return (-_missed(objectives, found), *rest)

    return rank


def _missed(objectives: Sequence[Objective], found: Prospect) -> float:
    return sum(objective.missed(found) for objective in objectives)


def _scaled(base: Prospect, factors: Mapping[int, float]) -> Topology:
    """`base` whose nodes send up so much of what they did, by their exits; those with all of it keep their limits."""

    def scaled(node: Node) -> Node:
        factor = factors.get(node.exit, 1.0)
        if factor == 1.0:
            return node
        sent = base.plan.nodes[node.name].parents
        links = tuple(replace(link, max_transfer_rate=factor * sent[link.name]) for link in node.parents)
        return replace(node, parents=links)

    return Topology(tuple(map(scaled, base.topology.nodes)))


def _improvements(topology: Topology) -> Iterator[tuple[str, Topology]]:
    """Each class of nodes or links with twice of what it has: cores, limit, bandwidth, or half of its round trip."""
    classes = node_classes(topology)

    def changed(name: str, change: Callable[[Node], Node]) -> Topology:
        alike = (change(node) if classes.class_of[node.name] == name else node for node in topology.nodes)
        return Topology(tuple(alike))

    for node in classes.representatives:
        number = classes.size[node.name]
        where = node.name if number == 1 else f"each of the {number} nodes like {node.name}"
        if node.service_ms:
            yield f"twice the cores at {where}", changed(node.name, _with_twice_the_cores)
        for what, key, factor in (
            ("twice the limit", "max_transfer_rate", 2.0),
            ("twice the bandwidth", "bandwidth_mbps", 2.0),
            ("half the round trip", "round_trip_ms", 0.5),
        ):
            if any(getattr(link, key) for link in node.parents):
                yield f"{what} of the links of {where}", changed(node.name, _with_links(key, factor))


def _with_twice_the_cores(node: Node) -> Node:
    return replace(node, cores=2 * (node.cores or 1))


def _with_links(key: str, factor: float) -> Callable[[Node], Node]:
    def change(node: Node) -> Node:
        return replace(node, parents=tuple(replace(link, **_times(link, key, factor)) for link in node.parents))

    return change


def _times(link: Link, key: str, factor: float) -> dict[str, Any]:
    value = getattr(link, key)
    return {key: factor * value} if value else {}
