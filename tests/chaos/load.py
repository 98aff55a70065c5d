"""What each worker does under chaos: calls, references, streams, backward passes, collectives, changes of stores.

Every operation has a number, and is written down before it begins and after it has ended, with its outcome.
"""

import errno
import itertools
import os
import random
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gradwire import autograd, rpc
from gradwire.c10d import FileStore, TCPStore
from gradwire.errors import (
    GradwireError,
    RemoteError,
    RpcError,
    RRefError,
    SendFailedError,
    SendQueueFullError,
    StoreError,
    StoreNetworkError,
    StoreTimeoutError,
    UnknownWorkerError,
    WorkerLostError,
)

from tests.chaos import callee
from tests.chaos.records import LOST, NOT_SENT, RAN, SUCCEEDED, UNKNOWN, WRONG, Record

__all__ = ["EVICTED", "FAILED", "SIZES", "Load", "Settings"]

EVICTED = 77
"""The exit status of a worker that was told that it has been evicted."""

FAILED = object()
"""The result of an operation that did not succeed."""

TIMEOUT_S = 10.0
"""The timeout of each call."""

MARGIN_S = 20
"""By how much an operation may exceed its timeout before it counts as lost. The machine may be busy."""

STORE_TIMEOUT_S = 60.0
"""How long clients wait for a store process that does not run."""

KEPT = 8
"""References that a worker keeps."""

SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.ENOBUFS})
"""Errors of the system for which some faults are to blame."""

SIZES = (1, 100, 5_000, 40_000, 300_000)
"""Numbers of floats of tensors: they travel within the message, in shared memory, or beside it."""


class WrongError(Exception):
    """A result is not right."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a worker needs to know.

    name: its name.
    incarnation: how often it has been started.
    names: of all workers.
    gather: the workers that call all_gather together.
    folder: of the records.
    store: host and port of the store process.
    file: of the FileStore.
    seed: of its choices.
    pause: seconds between two operations of a thread: the machine is to have time for faults.
    """

    name: str
    incarnation: int
    names: Sequence[str]
    gather: Sequence[str]
    folder: Path
    store: tuple[str, int]
    file: Path
    seed: int
    pause: float = 0.1


class Counted:
    """A counter in a store that this worker alone increments, and what its value may be."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._low = self._high = 0

    def increment(self, store: FileStore | TCPStore) -> None:
        """Adds one. Raises WrongError if one was added more than once, or not at all, before."""
        try:
            value = store.add(self._key, 1)
        except (StoreNetworkError, StoreTimeoutError):
            self._high += 1  # it may have been added
            raise
        if not self._low < value <= self._high + 1:
            raise WrongError(f"{value} is not in {self._low + 1} to {self._high + 1}")
        self._low = self._high = value


class Load:
    """The threads of one worker, and what they have done.

    Args:
        settings: see there.
    """

    def __init__(self, settings: Settings) -> None:
        self.incarnation = f"{settings.name}.{settings.incarnation}"
        self._settings = settings
        self._others = [name for name in settings.names if name != settings.name]
        self._called = Record(settings.folder / f"{self.incarnation}.called")
        self._gathered = Record(settings.folder / f"{self.incarnation}.gathered")
        self._numbers = itertools.count()
        self._running: dict[int, list[Any]] = {}
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        self._kept: list[tuple[rpc.RRef[Any], tuple[str, str], str]] = []
        self._stores: list[tuple[str, FileStore | TCPStore, Counted]] = []
        self._rounds = itertools.count()
        self._evicted = False
        self.successes: Counter[str] = Counter()
        callee.set_up(Record(settings.folder / f"{self.incarnation}.ran"), self)

    # Beginning and end.

    def start(self) -> None:
        """Starts the threads."""
        self._stopped.clear()
        self._threads = [threading.Thread(target=self._watch, name="chaos-watch", daemon=True)]
        roles: dict[str, list[Callable[[random.Random], None]]] = {
            "calls": [self._call, self._call, self._tensor, self._sleep, self._expect_error, self._nested],
            "more-calls": [self._tensor, self._sleep, self._cancel, self._time_out, self._call],
            "references": [self._reference, self._pass_on, self._keep],
            "streams": [self._stream],
            "passes": [self._backward],
            "stores": [self._count],
        }
        if self._settings.name in self._settings.gather:
            roles["collectives"] = [self._all_gather]
        for role, operations in roles.items():
            rng = random.Random(f"{self._settings.seed} {self.incarnation} {role}")
            self._threads.append(
                threading.Thread(target=self._repeat, args=(rng, operations), name=f"chaos-{role}", daemon=True)
            )
        for thread in self._threads:
            thread.start()

    def ask_to_stop(self) -> None:
        """Has each thread end after its operation."""
        self._stopped.set()

    def is_stopped(self) -> bool:
        """Returns whether all threads have ended."""
        return not any(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        """Checks the kept references, and lets go of everything. The threads have ended."""
        while self._kept:
            self._check_kept(self._kept.pop(), must_live=True)
        for _, store, _ in self._stores:
            store.close()
        self._stores.clear()
        self._called.write("stopped", self.incarnation, "-")

    def _repeat(self, rng: random.Random, operations: Sequence[Callable[[random.Random], None]]) -> None:
        while not self._stopped.wait(self._settings.pause * rng.uniform(0.5, 1.5)):
            rng.choice(operations)(rng)

    def _watch(self) -> None:
        """Reports operations that do not end. Counts seconds in which this process has run."""
        while not self._stopped.wait(1) or any(
            each.is_alive() for each in self._threads if each.name != "chaos-watch"
        ):
            if self._stopped.is_set():
                threading.Event().wait(1)
            if self._evicted:
                os._exit(EVICTED)
            for thread, entry in list(self._running.items()):
                entry[2] -= 1
                if entry[2] == 0:
                    stack = sys._current_frames().get(thread)
                    text = "".join(traceback.format_stack(stack)[-6:]) if stack else ""
                    self._called.write("done", entry[0], LOST, entry[1], text)

    # One operation.

    def attempt(self, kind: str, to: str, action: Callable[[str], Any], seconds: float = TIMEOUT_S) -> Any:
        """Runs an operation, and writes it down.

        Args:
            kind: of the operation.
            to: the worker that it is for.
            action: is given the number; raises WrongError if a result is not right.
            seconds: in which it has to end.

        Returns:
            What the action returns, or FAILED.
        """
        number = f"{self.incarnation}.{next(self._numbers)}"
        self._called.write("made", number, kind, to)
        thread = threading.get_ident()
        outer = self._running.get(thread)
        self._running[thread] = [number, kind, int(seconds) + MARGIN_S]
        result: Any = FAILED
        try:
            result = action(number)
        except Exception as error:
            outcome, text = self._classify(kind, error)
        else:
            outcome, text = SUCCEEDED, ""
            self.successes[to] += 1
        finally:
            if outer is None:
                del self._running[thread]
            else:
                self._running[thread] = outer
        self._called.write("done", number, outcome, text)
        return result

    def _classify(self, kind: str, error: Exception) -> tuple[str, str]:
        """Returns the outcome that an error tells, and its text."""
        text = f"{type(error).__name__}: {error}"[:600]
        told = getattr(error, "outcome", None)
        is_short = isinstance(error, MemoryError) or getattr(error, "errno", None) in SHORTAGES
        is_short = is_short or "allocate memory" in text or "Too many open files" in text
        if type(error).__name__ == "EvictedError":
            self._evicted = True
        if isinstance(error, WrongError) or (isinstance(error, RRefError) and kind == "kept"):
            return WRONG, text
        if not isinstance(error, GradwireError) and not is_short:
            return WRONG, text + " | ".join(traceback.format_exception(error)[-4:])
        if told is not None and not isinstance(error.__cause__, RemoteError):
            return {"NOT_SENT": NOT_SENT, "RAN": RAN}.get(told.name, UNKNOWN), text
        if isinstance(error, SendFailedError | SendQueueFullError | UnknownWorkerError):
            return NOT_SENT, text
        return UNKNOWN, text

    def _other(self, rng: random.Random) -> str:
        return rng.choice(self._others)

    # Calls.

    def add(self, to: str) -> None:
        """Calls a worker, and checks the sum."""

        def action(number: str) -> None:
            _expect(rpc.rpc_async(to, callee.add, (number, 2, 3), timeout=TIMEOUT_S).wait(), (number, 5))

        self.attempt("call", to, action)

    def _call(self, rng: random.Random) -> None:
        self.add(self._other(rng))

    def _tensor(self, rng: random.Random) -> None:
        to, size, value = self._other(rng), rng.choice(SIZES), rng.random()

        def action(number: str) -> None:
            given = torch.full((size,), value)
            answered, doubled = rpc.rpc_sync(to, callee.double, (number, given), timeout=TIMEOUT_S)
            _expect(answered, number)
            _require(len(doubled) == size and torch.equal(doubled, given * 2))

        self.attempt("tensor", to, action)

    def _sleep(self, rng: random.Random) -> None:
        to, seconds = self._other(rng), rng.uniform(0, 0.5)

        def action(number: str) -> None:
            _expect(rpc.rpc_sync(to, callee.pause, (number, seconds), timeout=TIMEOUT_S), number)

        self.attempt("slow-call", to, action)

    def _time_out(self, rng: random.Random) -> None:
        to = self._other(rng)

        def action(number: str) -> None:
            rpc.rpc_sync(to, callee.pause, (number, 0.1), timeout=0.02)

        self.attempt("short-timeout", to, action)

    def _cancel(self, rng: random.Random) -> None:
        to, seconds = self._other(rng), rng.choice([0, 0.01])

        def action(number: str) -> None:
            future = rpc.rpc_async(to, callee.pause, (number, 0.05), timeout=TIMEOUT_S)
            self._stopped.wait(seconds)
            future.cancel()
            future.wait()

        self.attempt("cancelled", to, action)

    def _expect_error(self, rng: random.Random) -> None:
        to = self._other(rng)

        def action(number: str) -> None:
            try:
                rpc.rpc_sync(to, callee.fail, (number,), timeout=TIMEOUT_S)
            except callee.ExpectedError as error:
                _expect(error.args, (number,))
            else:
                raise WrongError("no error was raised")

        self.attempt("error", to, action)

    def _nested(self, rng: random.Random) -> None:
        to, third = rng.sample(self._others, 2)

        def action(number: str) -> None:
            _expect(rpc.rpc_sync(to, callee.nest, (number, third), timeout=2 * TIMEOUT_S), number)

        self.attempt("nested", to, action, 2 * TIMEOUT_S)

    # References.

    def _make(self, to: str) -> Any:
        """Makes a value on a worker; returns the reference and its value, or FAILED."""

        def action(number: str) -> Any:
            rref = rpc.remote(to, callee.make, (number,), timeout=TIMEOUT_S)
            rref._get_future().wait()
            return rref, number

        return self.attempt("remote", to, action)

    def _fetch(self, made: tuple["rpc.RRef[Any]", str], to: str) -> Any:
        rref, number = made

        def action(_: str) -> Any:
            value = rref.to_here(TIMEOUT_S)
            _expect(value[0], number)
            return value

        return self.attempt("fetch", to, action)

    def _reference(self, rng: random.Random) -> None:
        to = self._other(rng)
        if (made := self._make(to)) is not FAILED:
            self._fetch(made, to)

    def _pass_on(self, rng: random.Random) -> None:
        owner, third = rng.sample(self._others, 2)
        if (made := self._make(owner)) is FAILED:
            return
        rref, name = made

        def action(number: str) -> None:
            args = number, rref, TIMEOUT_S
            answered, value = rpc.rpc_sync(third, callee.read, args, timeout=2 * TIMEOUT_S)
            _expect(answered, number)
            _require(value is None or value[0] == name)

        self.attempt("pass-on", third, action, 2 * TIMEOUT_S)

    def _keep(self, rng: random.Random) -> None:
        if len(self._kept) == KEPT:
            self._check_kept(self._kept.pop(rng.randrange(KEPT)), must_live=False)
            return
        to = self._other(rng)
        if (made := self._make(to)) is not FAILED and (value := self._fetch(made, to)) is not FAILED:
            self._kept.append((made[0], value, to))

    def _check_kept(self, kept: tuple["rpc.RRef[Any]", tuple[str, str], str], *, must_live: bool) -> None:
        """Reads a reference once more. If the owner was not started again, nothing may have taken it away."""
        rref, value, owner = kept

        def action(_: str) -> None:
            try:
                _expect(rref.to_here(TIMEOUT_S), value)
            except WorkerLostError as error:
                if must_live and rpc.rpc_sync(owner, callee.own_incarnation, timeout=TIMEOUT_S) == value[1]:
                    raise WrongError(f"the owner, {value[1]}, still runs: {error}") from error
                raise

        self.attempt("kept", owner, action, 2 * TIMEOUT_S)

    # All else.

    def _stream(self, rng: random.Random) -> None:
        to, items = self._other(rng), rng.randrange(1, 50)

        def action(number: str) -> None:
            with rpc.rpc_stream(to, callee.count_up, (number, items), timeout=TIMEOUT_S, window_items=8) as stream:
                for index, item in enumerate(stream):
                    _expect(item, (number, index))
            _expect(index, items - 1)

        self.attempt("stream", to, action, 2 * TIMEOUT_S)

    def _backward(self, rng: random.Random) -> None:
        first, second = rng.sample(self._others, 2)
        weight = torch.tensor([rng.uniform(-2, 2), rng.uniform(-2, 2)], requires_grad=True)
        factor = torch.tensor([rng.uniform(-2, 2)])
        try:
            with autograd.context() as context_id:
                once = self._scale(first, weight, factor)
                twice = self._scale(second, once, once) if once is not FAILED else FAILED
                if twice is FAILED:
                    return

                def action(_: str) -> None:
                    autograd.backward(context_id, [twice.sum()], timeout=TIMEOUT_S)
                    found = autograd.get_gradients(context_id)[weight]
                    _require(torch.allclose(found, 2 * weight.detach() * factor**2))

                self.attempt("backward", second, action)
        except RpcError:  # the worker is no worker any more
            self._stopped.wait(1)

    def _scale(self, to: str, a: torch.Tensor, b: torch.Tensor) -> Any:
        def action(number: str) -> torch.Tensor:
            result = rpc.rpc_sync(to, callee.scale, (number, a, b), timeout=TIMEOUT_S)
            _require(torch.allclose(result, a * b))
            return result

        return self.attempt("forward", to, action)

    def _all_gather(self, rng: random.Random) -> None:
        own = f"{self.incarnation}:{next(self._rounds)}"
        names = self._settings.gather

        def action(_: str) -> None:
            gathered = rpc.all_gather(own, names, timeout=TIMEOUT_S)
            _expect(gathered[self._settings.name], own)
            _require(all(value.startswith(f"{name}.") for name, value in gathered.items()))
            _require(gathered.keys() <= set(names))
            self._gathered.write(own, *sorted(gathered.values()))
            if len(gathered) == len(names):
                self.successes["all_gather"] += 1

        self.attempt("all-gather", "all", action)

    def _count(self, rng: random.Random) -> None:
        if not self._stores:
            self._open_stores()
        kind, store, counted = rng.choice(self._stores)
        self.attempt(kind, kind, lambda _: counted.increment(store), STORE_TIMEOUT_S)

    def _open_stores(self) -> None:
        """Opens the stores, or leaves that to the next time."""
        try:
            host, port = self._settings.store
            remote = TCPStore(host, port, is_master=False, timeout=STORE_TIMEOUT_S, insecure=True)
            key = f"chaos {self.incarnation} {next(self._rounds)}"
            self._stores.append(("store", remote, Counted(key)))
            self._stores.append(("file", FileStore(str(self._settings.file)), Counted(key)))
        except (StoreError, OSError) as error:
            print(f"no stores yet: {error}", flush=True)
            for _, store, _ in self._stores:
                store.close()
            self._stores.clear()
            self._stopped.wait(1)


def _expect(value: object, expected: object) -> None:
    if value != expected:
        raise WrongError(f"{value!r} instead of {expected!r}")


def _require(condition: bool) -> None:
    if not condition:
        raise WrongError("not right")
