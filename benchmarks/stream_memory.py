"""Measures the memory and the throughput of a stream.

    python -m benchmarks.stream_memory [--mebibytes 1024] [--pause 0.02]

One process streams tensors of 1 to 16 MiB to another, once to a slow consumer and once to a fast one. For both
ends it prints the peak of the bytes that were sent and not consumed, as gradwire counts them, and the peak
growth of the process's memory (RSS). The C library is told to return freed blocks to the system, so that RSS is
the memory in use.
"""

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from gradwire import rpc

from .calls import KIB, MIB
from .command_line import Report, arguments_of, make_parser, resident_bytes
from .worker_sets import WorkerSet, preload

SIZES = [1, 2, 4, 8, 16]
"""Sizes of the items in MiB; they repeat."""

PEAKS = "".join(f" {end + ': buffered':>20} {'memory':>8}" for end in ("producer", "consumer"))


class MemoryWatch:
    """Samples the memory of this process from a thread, until `stop`."""

    def __init__(self) -> None:
        self.before = self.rss = resident_bytes()
        self.buffered = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def sample(self) -> None:
        """Takes a sample."""
        info = rpc.debug_info()
        self.buffered = max(self.buffered, info["stream_bytes_received"], info["stream_bytes_sent"])
        self.rss = max(self.rss, resident_bytes())

    def _watch(self) -> None:
        while not self._stopped.wait(0.01):
            self.sample()

    def stop(self) -> tuple[float, float]:
        """Returns the peaks of buffered bytes and of the growth of memory, in MiB."""
        self._stopped.set()
        self._thread.join()
        return self.buffered / MIB, (self.rss - self.before) / MIB


def tensors(mebibytes: int) -> Iterator[Any]:
    """Yields tensors of `mebibytes` MiB in all, and last this worker's peaks."""
    peaks = MemoryWatch()
    try:
        sent = count = 0
        while sent < mebibytes:
            size = min(SIZES[count % len(SIZES)], mebibytes - sent)
            sent, count = sent + size, count + 1
            yield torch.full((size * MIB,), size, dtype=torch.uint8)
    finally:
        figures = peaks.stop()
    yield figures


def consume(mebibytes: int, pause: float) -> tuple[float, tuple[float, float], tuple[float, float]]:
    """Consumes the stream, with a pause in seconds after each tensor.

    Returns:
        The seconds that it took, and the peaks of producer and consumer.
    """
    peaks = MemoryWatch()
    start = time.perf_counter()
    theirs = (0.0, 0.0)
    for item in rpc.rpc_stream("producer", tensors, (mebibytes,)):
        if isinstance(item, torch.Tensor):
            time.sleep(pause)
        else:
            theirs = item
    return time.perf_counter() - start, theirs, peaks.stop()


def start(_: str, rank: int, size: int, url: str) -> Callable[[], None]:
    """Joins the RPC group."""
    mmap_threshold = -3
    ctypes.CDLL(None).mallopt(mmap_threshold, 256 * KIB)
    options = rpc.RpcBackendOptions(init_method=url)
    rpc.init_rpc(["consumer", "producer"][rank], rank=rank, world_size=size, rpc_backend_options=options)
    return rpc.shutdown


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = make_parser("benchmarks.stream_memory", __doc__)
    parser.add_argument("--mebibytes", type=int, default=1024, help="of tensors altogether (1024)")
    parser.add_argument(
        "--pause", type=float, default=0.02, help="seconds for each item of a slow consumer (0.02)"
    )
    arguments = arguments_of(parser, argv)
    text = f"{arguments.mebibytes} MiB in tensors of {SIZES} MiB, window 16 MiB; peaks in MiB."
    report = Report(text, f"{'consumer':16} {'MiB/s':>8}{PEAKS}")
    with WorkerSet("gradwire", 2, start) as workers, workers.running():
        workers.ask(consume, 64, 0.0)  # what connections and threads take once
        for pause in (arguments.pause, 0.0):
            took, theirs, mine = workers.ask(consume, arguments.mebibytes, pause)
            name = f"{pause * 1e3:g} ms an item" if pause else "at once"
            peaks = "".join(f" {buffered:20.1f} {memory:8.1f}" for buffered, memory in (theirs, mine))
            report.print(f"{name:16} {arguments.mebibytes / took:8.0f}{peaks}")
            report.measured.append({"pause": pause, "seconds": took, "producer": theirs, "consumer": mine})
    report.close(arguments)


if __name__ == "__main__":
    preload()
    main()
