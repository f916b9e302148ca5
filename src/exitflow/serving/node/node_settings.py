"""How a node serves: what `exitflow serve --set KEY=VALUE` may change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from exitflow.config import assign, check_fields, decode, encode, located, parse_changes, require
from exitflow.routing.decisions import Rules
from exitflow.routing.queueing import QueueLimits
from exitflow.serving.bundle.bundle import MAX_SAMPLES, Bundle

if TYPE_CHECKING:
    from exitflow.planning.simulation import NodeSettings

CodecName = Literal["fp32", "fp16", "u8", "u4"]
ForwardWhat = Literal["auto", "feature", "input"]


@dataclass(frozen=True)
class LinkSpec:
    """What is different on one link."""

    forward: ForwardWhat | None = None
    codec: CodecName | None = None
    compress: bool | None = None
    link_megabits: float | None = None


@dataclass(frozen=True)
class ServingSpec:
    """The settings of one node; the defaults hold for all."""

    control: Literal["rate", "threshold"] = "rate"  # threshold: the calibrated cut alone, no limit is kept
    forward: ForwardWhat = "auto"  # what goes to the parent
    codec: CodecName = "fp32"  # of features on their way
    compress: bool = False  # with zlib, on top of the codec
    link_megabits: float = 100.0  # per second; what `auto` reckons with
    burst_seconds: float = 1.0  # of the link's limit, that may go at once
    max_batch: int = 32  # samples computed together
    queue_size: int = 256  # samples waiting; more are rejected at once
    queue_seconds: float = 5.0  # that those waiting will take; beyond, more are rejected at once
    forward_timeout: float = 1.0  # seconds until the local answer is given instead
    wait: Literal["parent", "never"] = "parent"  # never: the own answer at once; parents are asked nevertheless
    audit_share: float = 0.01  # of the confident answers, forwarded as well when the link has room
    threads: int = 1  # of the engine
    service_ms: float = 0.0  # for rehearsals: a request takes at least so long, and they are computed one at a time
    round_trip_ms: float = 0.0  # for rehearsals: every answer of a parent takes so much longer
    links: dict[str, LinkSpec] = field(default_factory=dict)  # by parent

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("link_megabits", "forward_timeout", "queue_seconds"):
            value = getattr(self, name)
            require(math.isfinite(value) and value > 0, name, f"must be above 0, got {value}")
        require(
            math.isfinite(self.burst_seconds) and self.burst_seconds >= 0,
            "burst_seconds",
            f"must be 0 or more, got {self.burst_seconds}",
        )
        for name in ("service_ms", "round_trip_ms"):
            value = getattr(self, name)
            require(0 <= value <= 60_000, name, f"must be from 0 to 60000 milliseconds, got {value}")
        for name in ("max_batch", "queue_size", "threads"):
            require(getattr(self, name) >= 1, name, f"must be at least 1, got {getattr(self, name)}")
        require(self.max_batch <= MAX_SAMPLES, "max_batch", f"must be at most {MAX_SAMPLES}, got {self.max_batch}")
        require(0 <= self.audit_share <= 1, "audit_share", f"must be between 0 and 1, got {self.audit_share}")
        for parent in self.links:
            located(f"links.{parent}", self.link, parent)

    def link(self, parent: str) -> ServingSpec:
        """As it holds for the link to `parent`."""
        return replace(self, **encode(self.links[parent]), links={}) if parent in self.links else self


def check_links(spec: ServingSpec, bundle: Bundle) -> None:
    """A tree's nodes are all told the same: what is named need not be a parent of each, but a node of the bundle."""
    for name in spec.links:
        bundle.node(name, key=f"links.{name}")


def serving_spec(overrides: Sequence[str] = ()) -> ServingSpec:
    """The defaults, changed by texts such as "codec=u8"."""
    table: dict[str, Any] = {}
    for key, value in parse_changes(overrides, example="codec=u8").items():
        assign(table, key, value)
    return decode(ServingSpec, table)


def simulated(spec: ServingSpec, *, max_batch: int = 1) -> NodeSettings:
    """The same settings for `planning.simulation`, whose cores work on one sample after another."""
    from exitflow.planning.simulation import NodeSettings  # which a node does without

    limited = spec.control == "rate"
    rules = Rules(spec.forward_timeout, spec.audit_share if limited else 0.0)
    limits = QueueLimits(spec.queue_size, spec.queue_seconds)
    return NodeSettings(rules, spec.burst_seconds, limited, limits, max_batch)
