"""How long answers take, how busy nodes and links are, and what a million requests cost, under a plan.

A node is a queue of requests before `cores` workers that take `service_ms` each; a link of limited bandwidth is one
before a wire. Requests that arrive independently of each other wait in an M/D/c queue:

    busy = rate * service / cores                        utilisation; from 1 on the queue grows without end
    wait = 0 with probability 1 - C(cores, busy)         Erlang's C
    wait = a geometric sum of what is left of services   (Pollaczek-Khinchine; exact for one core; for more, the queue
                                                          of one core that is as fast as all of them)

What leaves one queue is taken to arrive at the next independently of all else, with one exception: a child with one
core, or behind a wire, sends its requests spaced, so that they rarely wait for one another; only the rest of a queue's
load is load that a request can meet. Times are distributions on a grid; along a path they are convolved, and where
paths meet, mixed by their rates. So the time of an answer from a node is the mixture over all ways to it: waiting,
service, wire and round trip of every hop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from exitflow.planning.classes import NodeClasses, node_classes
from exitflow.topology.graph import Link, Node, Topology
from exitflow.topology.rates import ServingPlan

FloatArray = npt.NDArray[np.float64]

GRID = 4096  # points of time
TAIL = 14.0  # the grid reaches so many times the mean busy period beyond what the longest path takes without waiting
FULL = 1 - 1e-9  # utilisation from which a queue is taken to grow without end


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Milliseconds from a request's arrival until its answer is back."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class LinkUse:
    """What a link carries, and how busy that keeps it."""

    bytes_per_second: float | None  # None where it is not known how large a request is
    utilisation: float  # of its bandwidth; 0 where that has no limit


@dataclass(frozen=True)
class Timing:
    """What a plan means in time, bytes and money."""

    latency: Percentiles | None  # of all requests; None where a queue grows without end
    exit_latency: tuple[Percentiles | None, ...]  # of what each exit answers; None also where it answers nothing
    utilisation: Mapping[str, float]  # of each node's cores
    links: Mapping[tuple[str, str], LinkUse]  # by child and parent
    cost_per_million: float  # requests, in the currency of the links' prices

    @property
    def bottleneck(self) -> tuple[str, float]:
        """The busiest node or link, in words, and how busy it is."""
        busy = {f"node {name}": value for name, value in self.utilisation.items()}
        busy |= {f"link {child} -> {parent}": use.utilisation for (child, parent), use in self.links.items()}
        name = max(busy, key=busy.__getitem__)
        return name, busy[name]

    def to_json(self) -> dict[str, Any]:
        """Plain values, as `exitflow plan --json` prints them."""
        name, busy = self.bottleneck
        links = [{"from": child, "to": parent, **asdict(use)} for (child, parent), use in self.links.items()]
        return {
            "latency_ms": self.latency and asdict(self.latency),
            "exit_latency_ms": [each and asdict(each) for each in self.exit_latency],
            "utilisation": dict(self.utilisation),
            "links": links,
            "cost_per_million": self.cost_per_million,
            "bottleneck": {"where": name, "utilisation": busy},
        }


def is_timed(topology: Topology) -> bool:
    """Whether anything is known of time, bytes or prices."""
    links = [link for node in topology.nodes for link in node.parents]
    known = ("round_trip_ms", "bandwidth_mbps", "request_bytes", "price")
    timed = any(node.service_ms is not None for node in topology.nodes)
    return timed or any(getattr(link, key) is not None for link in links for key in known)


def timing(topology: Topology, plan: ServingPlan) -> Timing:
    """Latencies, utilisation, bytes and cost of `topology` under `plan`."""
    utilisation = {node.name: _busy(node, plan) for node in topology.nodes}
    links = {
        (node.name, link.name): _use(link, plan.nodes[node.name].parents[link.name])
        for node in topology.nodes
        for link in node.parents
    }
    sent = sum(
        plan.nodes[node.name].parents[link.name] * (link.price or 0.0)
        for node in topology.nodes
        for link in node.parents
    )
    cost = sent / float(plan.exit_serve_rate.sum())
    if max((*utilisation.values(), *(use.utilisation for use in links.values()))) >= FULL:
        nothing = (None,) * topology.num_exits
        return Timing(None, nothing, utilisation, links, cost)
    overall, exits = _latencies(topology, plan, utilisation, links)
    return Timing(overall, exits, utilisation, links, cost)


def _busy(node: Node, plan: ServingPlan) -> float:
    return plan.nodes[node.name].received_rate * (node.service_ms or 0.0) / 1e3 / (node.cores or 1)


def _use(link: Link, rate: float) -> LinkUse:
    if link.request_bytes is None:
        return LinkUse(None, 0.0)
    return LinkUse(rate * link.request_bytes, rate * _wire_ms(link) / 1e3)


def _wire_ms(link: Link) -> float:
    """How long a request takes to be sent."""
    if link.bandwidth_mbps is None:
        return 0.0
    assert link.request_bytes is not None
    return link.request_bytes * 8 / link.bandwidth_mbps / 1e3


def _latencies(
    topology: Topology,
    plan: ServingPlan,
    utilisation: Mapping[str, float],
    links: Mapping[tuple[str, str], LinkUse],
) -> tuple[Percentiles, tuple[Percentiles | None, ...]]:
    """The mixture of all ways to each exit, children first; distributions are weighted by their rates."""
    clock = _Clock(_horizon(topology, utilisation, links) / GRID)
    classes = node_classes(topology)
    arriving = {node.name: np.zeros(GRID) for node in classes.representatives}
    answered = np.zeros((topology.num_exits, GRID))
    for node in classes.representatives:
        rates = plan.nodes[node.name]
        begun = arriving.pop(node.name)
        begun[0] += rates.arrival_rate
        service, cores = node.service_ms or 0.0, node.cores or 1
        met = 1 - _spaced(classes, plan, node)
        done = clock.after(begun, clock.queue(service, cores, utilisation[node.name], met))
        answered[node.exit - 1] += classes.size[node.name] * rates.serve_fraction * done
        for link in {classes.kind(link): link for link in node.parents}.values():
            if rate := rates.parents[link.name]:
                wire = _wire_ms(link)
                busy, met = links[node.name, link.name].utilisation, 1 - _share(_gap(node), wire)
                hop = clock.shifted(clock.queue(wire, 1, busy, met), link.round_trip_ms or 0.0)
                kind = classes.kind(link)
                share = classes.incoming[node.name, kind] * rate / rates.received_rate
                arriving[kind.name] += share * clock.after(done, hop)
    overall = clock.percentiles(answered.sum(axis=0))
    assert overall is not None
    return overall, tuple(clock.percentiles(each) for each in answered)


def _gap(node: Node) -> float:
    """Milliseconds that lie at least between two requests that a node is done with."""
    return (node.service_ms or 0.0) if (node.cores or 1) == 1 else 0.0


def _share(gap: float, service: float) -> float:
    """How much of a service is over before the next request comes, if requests come at least `gap` apart."""
    return min(1.0, gap / service) if service else 1.0


def _spaced(classes: NodeClasses, plan: ServingPlan, node: Node) -> float:
    """The share of a node's load that a request cannot meet, as it came from the same child before it."""
    service = (node.service_ms or 0.0) / (node.cores or 1)
    total = plan.nodes[node.name].received_rate
    spaced = 0.0
    for (name, link), number in classes.incoming.items():
        if link.name == node.name and total:
            child = classes.topology.by_name[name]
            rate = next(plan.nodes[name].parents[own.name] for own in child.parents if classes.kind(own) == link)
            spaced += number * (rate / total) ** 2 * _share(max(_gap(child), _wire_ms(link)), service)
    return spaced


def _horizon(topology: Topology, utilisation: Mapping[str, float], links: Mapping[tuple[str, str], LinkUse]) -> float:
    """Milliseconds that hardly any answer exceeds: the longest path, with long waits on it."""
    longest: dict[str, float] = {}
    for node in reversed(topology.children_first):
        hops = (
            (link.round_trip_ms or 0.0)
            + _long(_wire_ms(link), links[node.name, link.name].utilisation)
            + longest[link.name]
            for link in node.parents
        )
        longest[node.name] = _long(node.service_ms or 0.0, utilisation[node.name]) + max(hops, default=0.0)
    return max(max(longest.values()), 1e-6)


def _long(service: float, busy: float) -> float:
    return service * (1 + TAIL * busy / (1 - busy) / 2 + TAIL * busy / 2)


@dataclass(frozen=True)
class _Clock:
    """Distributions over (GRID,) points of time that are `step` milliseconds apart; what is later is at the last."""

    step: float

    def queue(self, service: float, cores: int, busy: float, met: float) -> FloatArray:
        """Waiting and service, where a request can meet the share `met` of the load."""
        waits = met * erlang_c(cores, busy)
        if service == 0 or waits < 1e-12:
            return self.shifted(_at_once(), service)
        left = self._uniform(service / cores)
        transform = np.fft.rfft(left, 2 * GRID)
        some = np.fft.irfft((1 - busy) * transform / (1 - busy * transform), 2 * GRID)[:GRID].clip(min=0.0)
        wait: FloatArray = waits * some / some.sum()
        wait[0] += 1 - waits
        return self.shifted(wait, service)

    def _uniform(self, length: float) -> FloatArray:
        """What is left of a service that is met at any time: anything up to all of it."""
        edges = (np.arange(GRID + 1) - 0.5) * self.step
        density: FloatArray = np.diff(edges.clip(0.0, length))
        shares: FloatArray = density / density.sum()
        return shares

    def shifted(self, times: FloatArray, by: float) -> FloatArray:
        """All of it so much later; between two points of the grid it is split."""
        whole, part = divmod(by / self.step, 1.0)
        first = min(int(whole), GRID - 1)
        later = np.zeros(GRID)
        later[first:] = (1 - part) * times[: GRID - first]
        if first + 1 < GRID:
            later[first + 1 :] += part * times[: GRID - first - 1]
        later[-1] += times.sum() - later.sum()
        return later

    def after(self, first: FloatArray, second: FloatArray) -> FloatArray:
        """The sum of two independent times."""
        size = 2 * GRID
        both = np.fft.irfft(np.fft.rfft(first, size) * np.fft.rfft(second, size), size).clip(min=0.0)
        result: FloatArray = both[:GRID].copy()
        result[-1] += both[GRID:].sum()
        return result

    def percentiles(self, rates: FloatArray) -> Percentiles | None:
        """None where nothing is answered."""
        if not rates.sum() > 0:
            return None
        reached = np.cumsum(rates) / rates.sum()
        times = np.arange(GRID) * self.step
        return Percentiles(*(float(np.interp(share, reached, times)) for share in (0.5, 0.9, 0.99)))


def _at_once() -> FloatArray:
    times = np.zeros(GRID)
    times[0] = 1.0
    return times


def erlang_c(servers: int, busy: float) -> float:
    """How often all of `servers` are busy, each with utilisation `busy`, when a request arrives."""
    offered = servers * busy  # in Erlang
    blocked = 1.0  # Erlang's B, by its recurrence
    for count in range(1, servers + 1):
        blocked = offered * blocked / (count + offered * blocked)
    return blocked / (1 - busy * (1 - blocked)) if busy < 1 else 1.0
