"""The state of a job in the text format of Prometheus. docs/view.md lists the metrics and their labels."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from .statistics import BOUNDS_S

__all__ = ["METRICS_TYPE", "metrics"]

METRICS_TYPE = CONTENT_TYPE_LATEST

Json = Mapping[str, Any]

MAX_SERIES = 2048
"""Series of one metric about calls or links; those with the most calls or bytes."""


def metrics(overview: Json) -> bytes:
    """Returns the metrics of a job.

    Args:
        overview: its state, as `overview_of` returns it.
    """
    return generate_latest(_OverviewCollector(overview))


class _OverviewCollector(Collector):
    def __init__(self, overview: Json) -> None:
        self._overview = overview

    def collect(self) -> Iterator[Metric]:
        """Returns the metrics."""
        states = {each["name"]: each["state"] for each in self._overview["workers"] if each["state"] is not None}
        up = GaugeMetricFamily("gradwire_worker_up", "Whether the worker answers.", labels=["worker"])
        for worker in self._overview["workers"]:
            up.add_metric([worker["name"]], float(worker["state"] is not None))
        yield up
        missing = GaugeMetricFamily(
            "gradwire_collective_missing", "Members that a collective in flight waits for.", labels=["operation"]
        )
        counts: dict[str, int] = {}
        for wait in self._overview["waits"]:
            counts[wait["operation"]] = counts.get(wait["operation"], 0) + len(wait["missing"])
        for operation, count in counts.items():
            missing.add_metric([operation], count)
        yield missing
        yield from _of_workers(states)
        yield from _of_links(states)
        yield from _of_calls(states, "sent", "worker", "callee", "in_flight")
        yield from _of_calls(states, "served", "caller", "caller", "running")


def _of_workers(states: Json) -> Iterable[Metric]:
    for name, text in (
        ("messages_sent", "Messages sent."),
        ("messages_received", "Messages received."),
        ("bytes_sent", "Bytes of bodies and tensors sent."),
        ("bytes_received", "Bytes of bodies and tensors received."),
    ):
        traffic = CounterMetricFamily(f"gradwire_{name}", text, labels=["worker"])
        for worker, state in states.items():
            traffic.add_metric([worker], state["traffic"][name])
        yield traffic
    for name, text, get in (
        ("executor_queued", "Tasks that wait for a thread.", lambda s: s["queues"]["executor"]["queued"]),
        ("unanswered_calls", "Calls without an answer.", lambda s: sum(s["calls"]["unanswered"].values())),
        ("owned_values", "Values that references name.", lambda s: s["references"]["values"]),
        ("autograd_contexts", "Distributed autograd contexts.", lambda s: s["contexts"]["count"]),
        ("lost_workers", "Workers that are lost for this one.", lambda s: len(s["lost"])),
        ("cpu_percent", "Processor time of the process, of one core.", lambda s: s["process"]["cpu_percent"]),
        ("memory_bytes", "Resident memory of the process.", lambda s: s["process"]["memory_bytes"]),
        (
            "gpu_memory_bytes",
            "Device memory that torch has reserved in the process.",
            lambda s: s["process"]["gpu_memory_bytes"],
        ),
        ("start_time_seconds", "When the process started, since 1970.", lambda s: s["process"]["started"]),
    ):
        gauge = GaugeMetricFamily(f"gradwire_{name}", text, labels=["worker"])
        for worker, state in states.items():
            gauge.add_metric([worker], get(state))
        yield gauge


def _of_links(states: Json) -> Iterable[Metric]:
    for side, text in (
        ("sent", "Bytes sent to another worker."),
        ("received", "Bytes received from another worker."),
    ):
        family = CounterMetricFamily(f"gradwire_link_bytes_{side}", text, labels=["worker", "peer", "channel"])
        found = [
            (count, [worker, peer, channel])
            for worker, state in states.items()
            for peer, link in state["traffic"]["by_worker"].items()
            for channel, count in link[f"bytes_{side}"].items()
        ]
        found.sort(key=lambda pair: -pair[0])
        for count, labels in found[:MAX_SERIES]:
            family.add_metric(labels, count)
        yield family


def _of_calls(states: Json, side: str, key: str, label: str, active: str) -> Iterable[Metric]:
    labels = ["worker", label, "function"]
    durations = HistogramMetricFamily(
        f"gradwire_calls_{side}_seconds", f"Durations of calls that were {side}.", labels=labels
    )
    gauge = GaugeMetricFamily(
        f"gradwire_calls_{active}", f"Calls that are {active.replace('_', ' ')}.", labels=labels
    )
    oldest = GaugeMetricFamily(
        "gradwire_calls_oldest_seconds", "For how long the oldest call in flight has lasted.", labels=labels
    )
    failed = CounterMetricFamily(f"gradwire_calls_{side}_failed", "Calls that have failed.", labels=labels)
    found = [(name, each) for name, state in states.items() for each in state["calls"][side]]
    found.sort(key=lambda pair: -pair[1]["count"])
    for worker, each in found[:MAX_SERIES]:
        values = [worker, each[key], each["function"]]
        durations.add_metric(values, _buckets(each), each["duration"]["total_s"])
        gauge.add_metric(values, each[active])
        if side == "sent":
            oldest.add_metric(values, each["oldest_s"] or 0.0)
        failed.add_metric(values, each["failed"] if "failed" in each else sum(each["failures"].values()))
    yield from (durations, gauge, failed, *([oldest] if side == "sent" else []))


def _buckets(calls: Json) -> list[tuple[str, float]]:
    """Returns the upper bounds of the buckets, and how many calls took no longer."""
    within = zip(BOUNDS_S, calls["duration"]["within"], strict=True)
    return [*((str(bound), count) for bound, count in within), ("+Inf", calls["count"])]
