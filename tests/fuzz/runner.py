"""Fuzzes the parsers of bytes that others send: `make fuzz`, or `python -m tests.fuzz --inputs 100000 pmi`.

Each parser runs in a process of its own. An input is a finding if the parser raises what it does not promise,
hangs, takes more memory than it may, or ends its process. It is written to the folder `tests/fuzz/cases/PARSER`,
whose files `make test` runs from then on.
"""

import argparse
import concurrent.futures
import hashlib
import importlib
import logging
import mmap
import multiprocessing
import os
import random
import resource
import shutil
import struct
import tempfile
import time
import traceback
import tracemalloc
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.mutation import MAX_INPUT_BYTES, mutate
from tests.fuzz.target import Target, run

__all__ = ["CASES", "fuzz", "main"]

MODULE = "tests.fuzz.targets"
"""Has all parsers. Imported only where they are needed: it takes seconds."""

CASES = Path(__file__).parent / "cases"

CORPUS_SIZE = 400
"""Inputs that a parser's strategy makes; all others are changes of these."""

PROCESS_TIMEOUT_S = 3600.0
"""Seconds that all inputs of one parser may take: one of them blocks if they take longer."""

MAX_GROWTH_BYTES = 256 * 2**20
"""By how much the process of a parser may grow, with what extensions in C allocate."""

MEMORY = "/dev/shm"
"""Where `make fuzz` has its files, if there is such a folder: those of FileStore are synchronized often."""

FOLDER_PREFIX = "fuzz-parser-"
"""Other tests look for what has gradwire in its name."""

LATEST = "latest-input"

_LENGTH = struct.Struct("<I")


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzzes the parsers that the command line names, or all. Returns the exit code: 1 if there are findings."""
    targets: Sequence[Target] = importlib.import_module(MODULE).TARGETS
    names = [target.name for target in targets]
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="PARSER", help=f"by default all: {', '.join(names)}")
    parser.add_argument("--inputs", type=int, default=1_000_000, help="number of inputs of all parsers together")
    parser.add_argument("--seed", type=int, default=None, help="random by default")
    given_values = parser.parse_args(arguments)
    if unknown := set(given_values.names) - set(names):
        parser.error(f"there is no parser {', '.join(sorted(unknown))}: choose from {', '.join(names)}")
    chosen = [target for target in targets if not given_values.names or target.name in given_values.names]
    if Path(MEMORY).is_dir():
        tempfile.tempdir = MEMORY
    remove_leftovers()
    start = random.SystemRandom().randrange(2**32) if given_values.seed is None else given_values.seed
    shares = {target.name: 1 if target.is_slow else 2 for target in chosen}
    share = -(-given_values.inputs // sum(shares.values()))
    print(
        f"{2 * share} inputs for each of {len(chosen)} parsers, half of it for slow ones, seed {start}", flush=True
    )
    failed = False
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        pending = [pool.submit(fuzz, target.name, share * shares[target.name], start) for target in chosen]
        for each in concurrent.futures.as_completed(pending):
            finding, report = each.result()
            failed |= finding
            print(report, flush=True)
    return int(failed)


def fuzz(name: str, count: int, start: int, cases: Path = CASES, module: str = MODULE) -> tuple[bool, str]:
    """Runs a parser on random inputs, in a new process.

    Args:
        name: of the parser.
        count: of the inputs.
        start: the seed.
        cases: the folder for findings.
        module: whose TARGETS has the parser.

    Returns:
        Whether there is a finding, and a report.
    """
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix=f"{FOLDER_PREFIX}{os.getpid()}-") as folder:
        latest = Path(folder, LATEST)
        latest.write_bytes(bytes(_LENGTH.size + MAX_INPUT_BYTES))
        process = context.Process(target=_try_inputs, args=(module, name, count, start, folder, sending))
        process.start()
        sending.close()
        try:
            problem, seconds = receiving.recv() if receiving.poll(PROCESS_TIMEOUT_S) else ("it blocks", 0.0)
        except EOFError:
            process.join()
            problem, seconds = f"its process ended with exit code {process.exitcode}", 0.0
        process.kill()
        process.join()
        content = latest.read_bytes()
    if not problem:
        return False, f"{name}: {count} inputs in {seconds:.0f} s"
    (length,) = _LENGTH.unpack_from(content)
    path = keep(name, content[_LENGTH.size : _LENGTH.size + length], cases)
    return True, f"{name}: FAILED on an input that is kept as {path}\n{problem}"


def keep(name: str, data: bytes, cases: Path) -> Path:
    """Writes a finding to the folder of its parser, and returns its path."""
    path = cases / name / hashlib.sha256(data).hexdigest()[:16]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def draw(target: Target, count: int, start: int) -> list[bytes]:
    """Returns inputs from a parser's strategy, and one that is empty."""
    found = [b""]

    @seed(start)
    @settings(
        max_examples=count,
        database=None,
        phases=[Phase.generate],
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],  # on a machine that is busy
    )
    @given(target.inputs)
    def collect(data: bytes) -> None:
        found.append(data)

    collect()
    return found


def remove_leftovers() -> None:
    """Removes the folders of runs that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        process = folder.name.removeprefix(FOLDER_PREFIX).partition("-")[0]
        if not Path("/proc", process).exists():
            shutil.rmtree(folder, ignore_errors=True)


def _try_inputs(module: str, name: str, count: int, start: int, folder: str, answer: Connection) -> None:
    """Sends the first problem that an input causes, and how long all have taken. The latest input is in a file."""
    tempfile.tempdir = folder
    logging.disable(logging.CRITICAL)
    (target,) = (each for each in importlib.import_module(module).TARGETS if each.name == name)
    source = random.Random(f"{start} {name}")
    corpus = draw(target, CORPUS_SIZE, start)
    known = sorted((CASES / name).glob("*"))
    fixed = [*(each.read_bytes() for each in known), *corpus]
    began, size = time.monotonic(), _peak_memory()
    tracemalloc.start()
    with open(Path(folder, LATEST), "r+b") as file, mmap.mmap(file.fileno(), 0) as latest:
        for number in range(count):
            data = fixed[number] if number < len(fixed) else mutate(source.choice(corpus), corpus, source)
            data = data[:MAX_INPUT_BYTES]
            latest[: _LENGTH.size + len(data)] = _LENGTH.pack(len(data)) + data
            try:
                run(target, data)
                grown = _peak_memory() - size
                assert grown <= MAX_GROWTH_BYTES, f"the process has grown by {grown} bytes"
            except Exception:
                answer.send((traceback.format_exc(), 0.0))
                return
    answer.send(("", time.monotonic() - began))


def _peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
