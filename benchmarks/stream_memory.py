"""Measures the memory and the throughput of a stream.

    python benchmarks/stream_memory.py [--mebibytes 1024] [--pause 0.02]

One process streams tensors of 1 to 16 MiB to another, once to a slow consumer and once to a fast one. For both
ends it prints the peak of the bytes that were sent and not consumed, as gradwire counts them, and the peak
growth of the process's memory (RSS). The C library is told to return freed blocks to the system, so that RSS is
the memory in use.
"""

import argparse
import ctypes
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from gradwire import rpc

MIB = 1 << 20
SIZES = [1, 2, 4, 8, 16]
"""Sizes of the items in MiB; they repeat."""

PAGE = os.sysconf("SC_PAGE_SIZE")


def rss() -> int:
    """Returns the resident memory of this process, in bytes."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * PAGE


class MemoryWatch:
    """Samples the memory of this process from a thread, until `stop`."""

    def __init__(self) -> None:
        self.before = self.rss = rss()
        self.buffered = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def sample(self) -> None:
        """Takes a sample."""
        info = rpc.debug_info()
        self.buffered = max(self.buffered, info["stream_bytes_received"], info["stream_bytes_sent"])
        self.rss = max(self.rss, rss())

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


def work(rank: int, url: str, mebibytes: int, pause: float) -> None:
    """Runs in each of the two processes."""
    mmap_threshold = -3
    ctypes.CDLL(None).mallopt(mmap_threshold, 256 * 1024)
    options = rpc.RpcBackendOptions(init_method=url)
    rpc.init_rpc(["consumer", "producer"][rank], rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        consume(64, 0.0)  # what connections and threads take once
        print(f"{mebibytes} MiB in tensors of {SIZES} MiB, window 16 MiB; peaks in MiB")
        print(f"{'consumer':16} {'MiB/s':>8} {'producer: buffered':>20} {'memory':>8}", end="")
        print(f" {'consumer: buffered':>20} {'memory':>8}")
        for name, seconds in ((f"{pause * 1e3:g} ms an item", pause), ("at once", 0.0)):
            took, theirs, mine = consume(mebibytes, seconds)
            print(f"{name:16} {mebibytes / took:8.0f} {theirs[0]:20.1f} {theirs[1]:8.1f}", end="")
            print(f" {mine[0]:20.1f} {mine[1]:8.1f}")
    rpc.shutdown()


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=1024, help="of tensors altogether (1024)")
    parser.add_argument(
        "--pause", type=float, default=0.02, help="seconds for each item of a slow consumer (0.02)"
    )
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=work, args=(rank, f"file://{folder}/rendezvous", arguments.mebibytes, arguments.pause)
            )
            for rank in range(2)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    raise SystemExit(max(abs(process.exitcode or 0) for process in processes))


if __name__ == "__main__":
    main()
