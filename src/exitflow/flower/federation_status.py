"""How a federation is: who is connected, how far its training is, how long its certificate lasts.

Who is connected the SuperLink says itself, over its open interface, without a secret: that is a roll call. What the
training does stands in the journal.
"""

from __future__ import annotations

import datetime
import ssl
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from exitflow.files import read_file
from exitflow.flower.journal import Event, is_being_kept, read_journal
from exitflow.flower.keys import CA, node_keys, valid_until

if TYPE_CHECKING:
    from flwr.supercore.control import ControlHttpClient

PATIENCE = 5.0  # seconds


@dataclass(frozen=True)
class Present:
    """A node as the SuperLink sees it."""

    name: str
    public_key: str  # hexadecimal
    connected: bool
    since: str | None  # when that began, in ISO 8601; None where it has never been connected


@dataclass(frozen=True)
class RollCall:
    """A connection to a SuperLink."""

    client: ControlHttpClient

    def __call__(self) -> list[Present] | None:
        """All nodes whose keys are registered; None where nobody answers who can be believed."""
        from flwr.proto.control_pb2 import ListNodesRequest

        try:
            found = self.client.ListNodes(ListNodesRequest()).nodes_info
        except (httpx.HTTPError, ValueError):
            return None
        return [
            Present(
                node.name,
                node.public_key.hex(),
                node.status == "online",
                (node.last_activated_at if node.status == "online" else node.last_deactivated_at) or None,
            )
            for node in found
            if node.status != "unregistered"
        ]


@contextmanager
def calling(address: str, authority: Path) -> Iterator[RollCall]:
    """A connection to the SuperLink at `address`, whose certificate that authority must have signed."""
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=read_file(authority).decode("ascii"))
    version = RuntimeVersionHttpInterceptor(component_name="exitflow")
    client = ControlHttpClient(f"https://{address}", interceptors=[version], verify=context, timeout=PATIENCE)
    try:
        yield RollCall(client)
    finally:
        client.close()


@dataclass(frozen=True)
class NodeStatus:
    """What is known of a node."""

    connected: bool | None  # None: the SuperLink does not answer
    since: str | None  # when that began
    round: int | None = None  # of its last update; None: it has sent none
    loss: float | None = None  # in that update, on its own data
    bytes: int | None = None  # of that update
    seconds: float | None = None  # from when it got its task until the update was there
    problem: str | None = None  # why its last update is missing, or was refused


@dataclass(frozen=True)
class TrainingStatus:
    """The training that goes on, or the last one."""

    run: str
    rounds: int
    began: str
    going_on: bool
    round: int | None = None  # whose tasks are with the nodes, or were last
    round_began: str | None = None
    problem: str | None = None  # why it ended before its last round


@dataclass(frozen=True)
class FederationStatus:
    """Times are in ISO 8601, and UTC."""

    superlink: str
    answers: bool
    certificate_until: str
    certificate_days: float
    nodes: Mapping[str, NodeStatus]
    training: TrainingStatus | None

    def to_json(self) -> dict[str, Any]:
        """The status as values that JSON can hold."""
        return asdict(self)


def federation_status(folder: Path, address: str) -> FederationStatus:
    """How the federation is that meets at `address` and whose server has that folder."""
    with calling(address, folder / CA) as roll_call:
        present = roll_call()
    until = valid_until(folder)
    return FederationStatus(
        address,
        present is not None,
        until.isoformat(),
        round(days_until(until), 1),
        *added_up(read_journal(folder), node_keys(folder), present, going_on=is_being_kept(folder)),
    )


def days_until(time: datetime.datetime) -> float:
    """From now on; below 0 where it has passed."""
    return (time - datetime.datetime.now(datetime.UTC)) / datetime.timedelta(days=1)


def added_up(
    events: Sequence[Event], keys: Mapping[str, str], present: Iterable[Present] | None, *, going_on: bool
) -> tuple[dict[str, NodeStatus], TrainingStatus | None]:
    """What a journal and a roll call come to: each node, and the last training."""
    seen = {each.name: each for each in present or () if keys.get(each.name) == each.public_key}
    nodes = {}
    for name in keys:
        found = seen.get(name)
        connected = None if present is None else bool(found and found.connected)
        nodes[name] = NodeStatus(connected, found.since if found else None, **_last_answer(events, name))
    begun = [index for index, event in enumerate(events) if event.get("event") == "training"]
    return nodes, _training(events[begun[-1] :], going_on) if begun else None


def _last_answer(events: Sequence[Event], node: str) -> dict[str, Any]:
    """The last update of a node, and the problem if none came after that when one was asked for."""
    found: dict[str, Any] = {}
    for event in events:
        if event.get("node") != node:
            continue
        if event["event"] == "update":
            found = {key: event.get(key) for key in ("round", "loss", "seconds")} | {"bytes": event.get("bytes_up")}
        else:
            found["problem"] = event.get("reason")
    return found


def _training(events: Sequence[Event], going_on: bool) -> TrainingStatus:
    begin, rounds = events[0], [event for event in events if event["event"] == "round"]
    ends = [event for event in events if event["event"] == "end"]
    return TrainingStatus(
        str(begin.get("run")),
        int(begin.get("rounds", 0)),
        str(begin.get("time")),
        going_on,
        rounds[-1].get("round") if rounds else None,
        rounds[-1].get("time") if rounds else None,
        ends[-1].get("problem") if ends else None if going_on else "it was killed",
    )
