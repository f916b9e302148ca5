"""The node's counts for Prometheus, read when they are asked for, so that counting costs nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from exitflow.serving.node.counts import Histogram
from exitflow.serving.node.node import Node
from exitflow.serving.node.status import problems
from exitflow.serving.ports.description import Surroundings
from exitflow.serving.ports.limits import open_connections


def prometheus_text(node: Node, around: Surroundings) -> bytes:
    """The text format, version 0.0.4."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Labelled(node.name, [_NodeCollector(node, around), ProcessCollector(registry=None)]))
    return generate_latest(registry)


class _Labelled(Collector):
    """Each series with the node's name, so that those of a tree can be told apart whatever scrapes them."""

    def __init__(self, node: str, collectors: Sequence[Collector]) -> None:
        self._node, self._collectors = node, collectors

    def collect(self) -> Iterator[Metric]:
        """Everything that the collectors say at this moment."""
        for collector in self._collectors:
            for metric in collector.collect():
                labels = {"node": self._node}
                metric.samples = [sample._replace(labels=labels | sample.labels) for sample in metric.samples]
                yield metric


class _NodeCollector(Collector):
    def __init__(self, node: Node, around: Surroundings) -> None:
        self._node, self._around = node, around

    def collect(self) -> Iterator[Metric]:
        """Samples are requests of one input; a request of several counts as several."""
        node, counts, threshold = self._node, self._node.counts, self._node.control.threshold
        info = {"exit": str(node.exit), "bundle": node.current.bundle.version}
        yield _gauge("exitflow_node", "Which node this is and which bundle it serves.", info, 1)
        yield _gauge("exitflow_ready", "1 if it takes requests.", {}, float(not node.draining))
        wrong = problems(node, self._around.certificate)
        yield _gauge("exitflow_problems", "How many things are wrong; /readyz says which.", {}, len(wrong))
        if self._around.certificate:
            text, shown = "Until when it is believed, in seconds since 1970.", self._around.certificate.shown
            ends = GaugeMetricFamily("exitflow_certificate_expiry_timestamp_seconds", text, labels=["certificate"])
            ends.add_metric(["node"], shown.expires)
            ends.add_metric(["authority"], shown.authority_expires)
            yield ends
        yield _counter("exitflow_arrived", "Samples from clients.", "", {"": counts.arrived})
        yield _counter("exitflow_from_children", "Samples that children forwarded.", "child", counts.from_children)
        text = "Samples refused: a child sent more than the limit of its link."
        yield _counter("exitflow_over_limit", text, "child", counts.over_limit)
        yield _counter("exitflow_served", "Samples answered by this node's own exit.", "", {"": counts.served})
        text = "Samples answered here because a parent failed."
        yield _counter("exitflow_fallbacks", text, "reason", counts.fallbacks)
        text = "Samples answered here because the link was at its limit."
        yield _counter("exitflow_out_of_tokens", text, "", {"": counts.out_of_tokens})
        yield _counter("exitflow_rejected", "Requests refused: the queue was full.", "", {"": counts.rejected})
        yield _counter("exitflow_invalid", "Requests that made no sense.", "", {"": counts.invalid})
        yield _counter("exitflow_expired", "Requests whose deadline passed.", "", {"": counts.expired})
        text = "Calls given up: their message did not come, or their answer was not taken."
        yield _counter("exitflow_abandoned", text, "", {"": counts.abandoned})
        yield _counter("exitflow_failed", "Requests on which the engine failed.", "", {"": counts.failed})
        yield _counter("exitflow_audited", "Confident answers that a parent was asked about.", "", {"": counts.audited})
        yield _counter("exitflow_audits_agreed", "Of these, the parent said the same.", "", {"": counts.agreed})
        if counts.audited:
            share = counts.agreed / counts.audited
            yield _gauge("exitflow_audit_agreement", "An estimate of the accuracy as served.", {}, share)
        yield _gauge("exitflow_arrival_rate", "Samples/s of late.", {}, node.control.arrival_rate(node.now))
        if math.isfinite(threshold):
            yield _gauge("exitflow_threshold", "The confidence from which it answers.", {}, threshold)
        yield _gauge("exitflow_queued", "Samples waiting to be computed.", {}, node.queued)
        yield _gauge("exitflow_in_flight", "Samples waiting for an answer.", {}, node.in_flight)
        yield self._requests()
        text = "When a bundle was last loaded, in seconds since 1970."
        yield _gauge("exitflow_last_reload_success_timestamp_seconds", text, {}, node.loaded_at)
        text = "0 if the last attempt to load a bundle failed."
        yield _gauge("exitflow_last_reload_successful", text, {}, float(not node.reload_failed))
        connections = GaugeMetricFamily("exitflow_connections", "Open connections.", labels=["port"])
        for kind, count in open_connections(self._around.ports).items():
            connections.add_metric([kind], count)
        yield connections
        yield _histogram("exitflow_request_seconds", "From arrival to answer.", counts.request_seconds)
        sizes = Histogram(tuple(float(2**power) for power in range(11)))
        for size, times in counts.batches.items():
            sizes.add(size, times)
        yield _histogram("exitflow_batch_size", "Samples computed together.", sizes)
        yield from self._links()

    def _links(self) -> Iterator[Metric]:
        links = {name: link.counts for name, link in self._node.links.items()}
        for field, text in (
            ("forwarded", "Samples sent to the parent, audits too."),
            ("audited", "Audits sent to the parent."),
            ("answered", "Samples that the parent answered, without audits."),
            ("bytes_sent", "Bytes sent to the parent."),
            ("bytes_received", "Bytes received from the parent."),
        ):
            values = {name: getattr(counts, field) for name, counts in links.items()}
            yield _counter(f"exitflow_link_{field}", text, "parent", values)
        failures = CounterMetricFamily("exitflow_link_failures", "Samples lost on a link.", labels=["parent", "reason"])
        for name, counts in links.items():
            for reason, count in counts.failures.items():
                failures.add_metric([name, reason], count)
        yield failures
        node, states = self._node, {name: link.state for name, link in self._node.links.items()}
        cuts = {name: state.times_cut for name, state in states.items()}
        yield _counter("exitflow_link_cuts", "Times the link was cut.", "parent", cuts)
        limits = {link.name: link.max_transfer_rate for link in node.current.bundle.node(node.name).parents}
        for field, text, gauges in (
            ("up", "0 while the link is cut.", {name: float(state.open) for name, state in states.items()}),
            ("tokens", "What the link may carry at once.", node.control.tokens(node.now)),
            ("limit", "What the link may carry, in samples/s.", {name: limits[name] for name in states}),
            ("burst", "What the link may carry at once at most.", node.control.bursts),
        ):
            family = GaugeMetricFamily(f"exitflow_link_{field}", text, labels=["parent"])
            for name, value in gauges.items():
                if value is not None:
                    family.add_metric([name], value)
            yield family
        seconds = HistogramMetricFamily("exitflow_link_seconds", "From a forward to its answer.", labels=["parent"])
        for name, counts in links.items():
            seconds.add_metric([name], *_buckets(counts.seconds))
        yield seconds

    def _requests(self) -> Metric:
        text = "Requests: the deepest exit that answered, or why they were refused."
        metric = CounterMetricFamily("exitflow_requests", text, labels=["status", "exit"])
        for exit, count in self._node.counts.answered.items():
            metric.add_metric(["ok", str(exit)], count)
        for reason, count in self._node.counts.refused.items():
            metric.add_metric([reason, ""], count)
        return metric


def _gauge(name: str, text: str, labels: Mapping[str, str], value: float) -> Metric:
    metric = GaugeMetricFamily(name, text, labels=list(labels))
    metric.add_metric(list(labels.values()), value)
    return metric


def _counter(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    metric = CounterMetricFamily(name, text, labels=[label] if label else [])
    for key, value in values.items():
        metric.add_metric([key] if label else [], value)
    return metric


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    metric = HistogramMetricFamily(name, text, labels=[])
    metric.add_metric([], *_buckets(histogram))
    return metric


def _buckets(histogram: Histogram) -> tuple[list[tuple[str, float]], float]:
    """(how many lie at or below each bound, the sum of all)."""
    bounds = [*map(str, histogram.bounds), "+Inf"]
    return list(zip(bounds, map(float, accumulate(histogram.counts)), strict=True)), histogram.total
