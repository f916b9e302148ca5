"""How long nodes and links shall take in a rehearsal: what a real tree on one machine is slowed down to.

`exitflow load --service 'device-*=20' --rtt 'device-*=30'` makes every node sleep so long for each request, one at a
time, and every link take a round trip, as the same keys of a system file say to `plan` and `simulate`. So what these
predict and what a tree of real processes does can be set side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from exitflow.config import require
from exitflow.errors import ConfigError
from exitflow.topology.graph import MAX_MILLISECONDS, Node, Topology

DECLARED = "declared"  # as the system says


@dataclass(frozen=True)
class Rehearsal:
    """Milliseconds by node: of its service, and of the round trip of its links upwards."""

    service: Mapping[str, float]
    round_trip: Mapping[str, float]

    def topology(self, topology: Topology) -> Topology:
        """The system with these times and no others, and with one core each, as it is rehearsed."""

        def timed(node: Node) -> Node:
            trip = self.round_trip.get(node.name)
            links = tuple(
                replace(link, round_trip_ms=trip, bandwidth_mbps=None, request_bytes=None) for link in node.parents
            )
            return replace(node, service_ms=self.service.get(node.name), cores=None, parents=links)

        return Topology(tuple(map(timed, topology.nodes)))

    def settings(self, node: str) -> list[str]:
        """What `exitflow serve --set` tells this node."""
        found = []
        if node in self.service:
            found.append(f"service_ms={self.service[node]!r}")
        if node in self.round_trip:
            found.append(f"round_trip_ms={self.round_trip[node]!r}")
        return found


def rehearsal(topology: Topology, services: Sequence[str], trips: Sequence[str]) -> Rehearsal | None:
    """From texts such as `device-*=20` or `declared`; None where there are none."""
    if not services and not trips:
        return None
    declared_service = {node.name: node.service_ms for node in topology.nodes if node.service_ms}
    declared_trip = {
        node.name: max(link.round_trip_ms or 0.0 for link in node.parents)
        for node in topology.nodes
        if any(link.round_trip_ms for link in node.parents)
    }
    return Rehearsal(
        _times(topology, services, declared_service, "--service"), _times(topology, trips, declared_trip, "--rtt")
    )


def _times(topology: Topology, texts: Sequence[str], declared: Mapping[str, float], key: str) -> dict[str, float]:
    times: dict[str, float] = {}
    for text in texts:
        if text == DECLARED:
            require(bool(declared), key, "nothing of that kind is declared in the system")
            times |= declared
            continue
        pattern, _, amount = text.partition("=")
        names = [node.name for node in topology.nodes if fnmatchcase(node.name, pattern.strip())]
        try:
            value = float(amount.strip().removesuffix("ms"))
        except ValueError:
            value = -1.0
        valid = 0 <= value <= MAX_MILLISECONDS
        require(valid, key, f"expected NODE=MILLISECONDS, such as 'device-*=20', or {DECLARED}, got {text!r}")
        if not names:
            raise ConfigError(f"no node has a name like {pattern!r}", key=key)
        times |= dict.fromkeys(names, value)
    return times
