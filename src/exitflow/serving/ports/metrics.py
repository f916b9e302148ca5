"""The node's counts for Prometheus, read when they are asked for, so that counting costs nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from exitflow.serving.node.counts import Histogram
from exitflow.serving.node.node import Node
from exitflow.serving.ports.description import problems, status


def prometheus_text(node: Node) -> bytes:
    """The text format, version 0.0.4."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_NodeCollector(node))
    return generate_latest(registry)


class _NodeCollector(Collector):
    def __init__(self, node: Node) -> None:
        self._node = node

    def collect(self) -> Iterator[Metric]:
        """Samples are requests of one input; a request of several counts as several."""
        node, counts, found = self._node, self._node.counts, status(self._node)
        info = {"node": node.name, "exit": str(node.exit), "bundle": node.current.bundle.version}
        yield _gauge("exitflow_node", "Which node this is and which bundle it serves.", info, 1)
        yield _gauge("exitflow_ready", "1 if it takes requests.", {}, float(not node.draining))
        yield _gauge("exitflow_problems", "How many things are wrong; /readyz says which.", {}, len(problems(node)))
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
        if found["threshold"] is not None:
            yield _gauge("exitflow_threshold", "The confidence from which it answers.", {}, found["threshold"])
        yield _gauge("exitflow_queued", "Samples waiting to be computed.", {}, node.queued)
        yield _gauge("exitflow_in_flight", "Samples waiting for an answer.", {}, node.in_flight)
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
        up = GaugeMetricFamily("exitflow_link_up", "0 while the circuit breaker is open.", labels=["parent"])
        for name, link in self._node.links.items():
            up.add_metric([name], float(link.state.open))
        yield up
        tokens = GaugeMetricFamily("exitflow_link_tokens", "What the link may carry at once.", labels=["parent"])
        for name, value in self._node.control.tokens(self._node.now).items():
            if value is not None:
                tokens.add_metric([name], value)
        yield tokens


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
    buckets, total = [], 0
    for bound, count in zip((*map(str, histogram.bounds), "+Inf"), histogram.counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=histogram.total)
