"""Measures what metrics, the view and OpenTelemetry cost a call.

python -m benchmarks.observability                         # a table on stdout: three minutes
python -m benchmarks.observability --rounds 40             # longer, for less noise
python -m benchmarks.observability --save docs/benchmarks  # also writes it to observability.txt there

Each row has two workers of its own, in alternating rounds of one run; the others are stopped. Where something
asks the workers for their state, it is a third process, which asks once in each round.
"""

import contextlib
import time
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

import torch
from gradwire import rpc
from gradwire.rpc.contracts.agent import current_agent
from gradwire.view.page import Page

from .calls import Noop, noop_times
from .command_line import Report, add_rounds, arguments_of, make_parser
from .harness import RATIO_HEADER, Comparison, measure_rounds
from .systems import worker_name
from .worker_sets import WorkerSet, preload, take_turns

SAVED = "observability.txt"
"""The file that `--save` writes."""

ROUND_S = 2.0
"""Seconds of a round: the page asks for the state of the job every two seconds."""

OFF = "off"
PATHS = {"metrics": "/metrics", "view": "/api/job"}
"""What the third process asks for, by row."""

OPTIONS: dict[str, dict[str, Any]] = {
    OFF: {},
    "off, once more": {},
    "calls counted": {"view": rpc.View()},
    "metrics": {"view": rpc.View(address="0")},
    "view": {"view": rpc.View(address="0")},
    "otel, 1 of 100": {"otel": True},
    "otel, every call": {"otel": True},
}
"""The options of the workers of each row."""

HEADER = f"{'':18}{'calls':>9}{'median':>9}{'p99':>9}{'cpu':>9}{RATIO_HEADER}"

_url = ""
"""What the third process asks."""


def start(name: str, rank: int, size: int, url: str) -> Callable[[], None]:
    """Joins the RPC group of a row; the third process does not."""
    torch.set_num_threads(1)
    if rank == size - 1:
        return lambda: None
    if "otel" in OPTIONS[name]:
        _provide_traces(0.01 if "100" in name else 1.0)
    options = rpc.RpcBackendOptions(init_method=url, **OPTIONS[name])
    rpc.init_rpc(worker_name(rank), rank=rank, world_size=size - 1, rpc_backend_options=options)
    return rpc.shutdown


def _provide_traces(share: float) -> None:
    """Sets a tracer provider that samples a share of the traces, and whose exporter drops them."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
    from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

    class Dropped(SpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:  # noqa: ARG002
            return SpanExportResult.SUCCESS

    provider = TracerProvider(sampler=ParentBasedTraceIdRatio(share))
    provider.add_span_processor(BatchSpanProcessor(Dropped()))
    trace.set_tracer_provider(provider)


def url_of(path: str) -> str:
    """Returns the URL of a path of this worker's page."""
    server = current_agent().extension(Page).server
    base, _, key = server.url.partition("/?")
    return f"{base}{path}?{key}"


def set_url(url: str) -> None:
    """Sets what the third process asks. Nothing on the others."""
    global _url  # noqa: PLW0603
    _url = url


def run_round(seconds: float) -> tuple[list[float], int] | None:
    """Calls for some seconds, on worker 0; asks for the state of the workers meanwhile, in the third process."""
    if rpc.is_initialized():
        return noop_times(seconds) if rpc.get_worker_info().id == 0 else None
    time.sleep(seconds / 2)
    if _url:
        with urllib.request.urlopen(_url, timeout=30) as answer:
            answer.read()
    return None


def measure(names: Sequence[str], rounds: int, seconds: float) -> Comparison:
    """Measures the rows of these names."""
    with contextlib.ExitStack() as stack:
        sets = [stack.enter_context(WorkerSet(name, 3, start)) for name in names]
        for worker_set in take_turns(sets, 1):
            if worker_set.name in PATHS:
                worker_set.ask_all(set_url, worker_set.ask(url_of, PATHS[worker_set.name]))
            worker_set.ask_all(run_round, min(seconds, 0.2))
        return measure_rounds(Noop, sets, rounds, lambda each: each.ask_all(run_round, seconds)[0])


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = make_parser("benchmarks.observability", __doc__, SAVED)
    add_rounds(parser, rounds=12, seconds=ROUND_S)
    rows = list(OPTIONS)
    parser.add_argument(
        "--rows", nargs="+", choices=rows, default=rows, metavar="ROW", help="only these, and the first"
    )
    arguments = arguments_of(parser, argv)
    text = (
        f"Microseconds of a call that carries nothing, in {arguments.rounds} rounds of {arguments.seconds:g} s of "
        "each row; processor time (cpu) is that of both workers together. The ratio is the median of those of the "
        f"medians of single rounds to the row {OFF!r}; in brackets, the lowest and the highest one."
    )
    report = Report(text, HEADER)
    names = [name for name in OPTIONS if name == OFF or name in arguments.rows]
    comparison = measure(names, arguments.rounds, arguments.seconds)
    for name in names:
        ratios = "" if name == OFF else comparison.ratio_columns(name, OFF)
        report.print(f"{name:18}{comparison.time_columns(name)}{ratios}")
        report.measured.append(comparison.figures(name))
    report.close(arguments, SAVED)


if __name__ == "__main__":
    preload()
    main()
