"""`exitflow load` from its arguments to a report: find or start the nodes, send, compare."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exitflow.addresses import parse_address
from exitflow.config import parse_toml
from exitflow.errors import ConfigError, ServingError
from exitflow.planning.arrivals import load_trace
from exitflow.planning.rehearsal import rehearsal
from exitflow.serving.bundle.bundle import MANIFEST, Bundle, Samples, load_bundle
from exitflow.serving.node.node_settings import check_links, serving_spec, simulated
from exitflow.serving.node.status import NodeStatus
from exitflow.serving.traffic.client import NodeClient, ask_each
from exitflow.serving.traffic.cluster import LocalCluster, running_tree
from exitflow.serving.traffic.load import LoadGenerator, LoadPlan, Watcher, scaled, statuses
from exitflow.serving.traffic.load_report import LoadReport, report
from exitflow.serving.wire.security import Security
from exitflow.topology.graph import Topology, decode_topology
from exitflow.topology.rates import serving_plan

Show = Callable[[str, Sequence[str], Sequence[Sequence[str]]], None]  # title, columns, rows


@dataclass(frozen=True)
class LoadOptions:
    """What the command was told."""

    targets: Sequence[str]  # a bundle, or addresses
    total_rate: float | None = None
    concurrency: int | None = None
    duration: float = 10.0
    drift: Any = None
    seed: int = 0
    remote: bool = False
    settings: Sequence[str] = ()  # of a tree that is started for the load
    trace: str | None = None  # a file that gives the rate its shape over time
    services: Sequence[str] = ()  # milliseconds that nodes of such a tree shall take, such as "device-*=20"
    trips: Sequence[str] = ()  # and the links above them
    token: str | None = None
    certs: str | None = None

    def __post_init__(self) -> None:
        if not 0 < self.duration <= 86400:
            raise ConfigError(f"must be above 0 seconds and at most a day, got {self.duration:g}", key="--duration")
        if self.total_rate is not None and not 0 < self.total_rate <= 1e6:
            raise ConfigError(f"must be above 0 requests/s, got {self.total_rate:g}", key="--rate")
        if self.total_rate is not None and self.concurrency is not None:
            raise ConfigError("give --rate or --concurrency, not both", key="load")
        if self.concurrency is not None and self.trace is not None:
            raise ConfigError("says when requests arrive, which --concurrency leaves to the answers", key="--trace")
        if self.concurrency is not None and self.drift in ("traffic", "burst"):
            problem = f"{self.drift!r} changes when requests arrive, which --concurrency leaves to the answers"
            raise ConfigError(f"{problem}; give --rate instead, or --drift difficulty", key="--drift")


def run_load(options: LoadOptions, *, show: Show | None = None) -> LoadReport:
    """Send and compare; meanwhile, `show` is given a table every second."""
    security = Security(options.certs, options.token)
    trace = load_trace(options.trace) if options.trace else None
    calibrations = {}
    if options.services or options.trips:
        calibrations = dict(load_bundle(options.targets[0], max_exit=0).manifest.nodes)
    with _nodes(options, security) as target:
        plan = LoadPlan(
            target.addresses,
            scaled(target.topology, options.total_rate),
            target.samples,
            target.status.model,
            confidence=target.status.confidence,
            remark=target.remark,
            duration=options.duration,
            concurrency=options.concurrency,
            drift=options.drift,
            trace=trace,
            seed=options.seed,
            rehearsal=rehearsal(target.topology, options.services, options.trips),
            calibrations=calibrations,
            settings=simulated(serving_spec(options.settings)),
            security=security,
        )
        return report(asyncio.run(LoadGenerator(plan).run(_shower(show, plan) if show else None)))


@dataclass(frozen=True)
class _Target:
    """Nodes, and what they serve."""

    addresses: Mapping[str, str]
    topology: Topology
    samples: Samples
    status: NodeStatus  # of one of them
    remark: str = ""


@contextlib.contextmanager
def _nodes(options: LoadOptions, security: Security) -> Iterator[_Target]:
    """Where the nodes are and what they serve; those that were started for this are stopped again."""
    first, *others = options.targets
    if not Path(first).is_dir():
        _refuse_settings(options)
        yield _of_addresses(options, security)
        return
    if not (Path(first) / MANIFEST).is_file() or others:
        load_bundle(first)
        raise ConfigError("give one BUNDLE, or ADDRESSES, not both", key="load")
    bundle = load_bundle(first)
    check_links(serving_spec(options.settings), bundle)
    if tree := running_tree(bundle.path):
        _refuse_settings(options)
        yield _of_bundle(bundle, {name: place.grpc for name, place in tree.items()}, security)
        return
    settings = [f"--set={text}" for text in options.settings]
    slowed = rehearsal(bundle.topology, options.services, options.trips)
    names = [node.name for node in bundle.topology.nodes] if slowed else []
    of_node = {name: [f"--set={text}" for text in slowed.settings(name)] for name in names} if slowed else {}
    with (
        tempfile.TemporaryDirectory() as logs,
        LocalCluster(bundle, options=settings, options_of=of_node, logs=Path(logs)) as cluster,
    ):
        yield _of_bundle(bundle, {name: place.grpc for name, place in cluster.places.items()}, security)


def _of_bundle(bundle: Bundle, addresses: Mapping[str, str], security: Security) -> _Target:
    """The nodes of this bundle's tree, which may still serve what was there before it."""
    found = asyncio.run(statuses(addresses, security))
    if not found:
        raise ServingError(f"none of the nodes of {bundle.path} answers")
    old = {name: status.bundle[:12] for name, status in found.items() if status.bundle != bundle.hash}
    remark = ""
    if old:
        served, places = ", ".join(sorted(set(old.values()))), " ".join(addresses[name] for name in old)
        remark = (
            f"{', '.join(old)} serve bundle {served}, and are compared with what {bundle.path} is by now, "
            f"{bundle.version}; let them load that with: exitflow reload {places}"
        )
    return _Target(addresses, bundle.topology, bundle.samples(), next(iter(found.values())), remark)


def _refuse_settings(options: LoadOptions) -> None:
    for key, given in (("--set", options.settings), ("--service", options.services), ("--rtt", options.trips)):
        if given:
            raise ConfigError("these nodes run already, and keep the settings that they have", key=key)


def _of_addresses(options: LoadOptions, security: Security) -> _Target:
    for address in options.targets:
        if ":" not in address:
            raise ConfigError(f"there is no such bundle, and it is no HOST:PORT, got {address!r}", key="BUNDLE|ADDRESS")
        if not parse_address(address, "BUNDLE|ADDRESS").is_loopback and not options.remote:
            raise ConfigError(f"{address} is not of this machine: give --remote to load it all the same", key="load")
    found = asyncio.run(ask_each(options.targets, security, NodeClient.status))
    if len({status.bundle for status in found}) > 1:
        raise ServingError("the nodes serve different bundles; load nodes of one")
    first = options.targets[:1]
    (system,) = asyncio.run(ask_each(first, security, NodeClient.system))
    (samples,) = asyncio.run(ask_each(first, security, NodeClient.samples))
    topology = decode_topology(parse_toml(system.decode()))
    addresses = {status.node: address for status, address in zip(found, options.targets, strict=True)}
    return _Target(addresses, topology, Samples.from_bytes(samples), found[0])


def _shower(show_table: Show, plan: LoadPlan) -> Watcher:
    planned = serving_plan(plan.topology).nodes
    previous: dict[str, NodeStatus] = {}

    def show(generator: LoadGenerator, statuses: Mapping[str, NodeStatus], elapsed: float) -> None:
        outcomes = generator.outcomes
        title = f"{elapsed:.0f} of {plan.duration:g} s: {outcomes.sent:,} sent, {len(outcomes.rows):,} answered"
        rows = []
        for name, status in statuses.items():
            old = previous.get(name, status)
            seconds = max(status.time - old.time, 1e-9)
            received, served = (
                f"{change / seconds if old is not status else 0:.1f}"
                for change in (status.received - old.received, status.served - old.served)
            )
            fallbacks = str(sum(status.fallbacks.values()))
            rows.append([name, received, served, f"{planned[name].serve_rate:.1f}", fallbacks])
        previous.update(statuses)
        show_table(title, ["node", "received/s", "served/s", "planned", "fallbacks"], rows)

    return show
