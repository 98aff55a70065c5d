"""The workers of a chaos run: processes on simulated hosts, started again when they die, and their store."""

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.chaos import member
from tests.chaos.load import EVICTED, Settings
from tests.hosts import Network
from tests.workers import Pending, Worker, WorkerDiedError, Workers

__all__ = ["Cluster", "Deaths", "Member"]

DISK_BYTES = 64 << 20
STORE_PORT = 29500

JOIN_TIMEOUT_S = 100.0
RESTART_PAUSE_S = 0.5
EXIT_TIMEOUT_S = 5.0

PAUSE_S = 0.017
"""The pause of a thread after an operation, times the number of workers: the load is the same however many."""

_PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class Member:
    """One worker of the group, through all its incarnations.

    number: its number, from 0.
    host: the number of its host.
    incarnation: how often its process has been started.
    worker: the process; None if there is none.
    joining: the result of its joining; None once it has joined.
    is_held: whether a fault keeps it from being started again.
    start_at: when it is started, on the monotonic clock, if there is no process.
    may_die: why the process may die by itself; empty if it may not.
    pending: what the process was asked last.
    """

    number: int
    host: int
    incarnation: int = 0
    worker: Worker | None = None
    joining: Pending[None] | None = None
    is_held: bool = False
    start_at: float = 0.0
    may_die: str = ""

    @property
    def name(self) -> str:
        """The name of the worker in its group."""
        return f"worker{self.number}"

    @property
    def has_joined(self) -> bool:
        """Whether its process runs and is a member."""
        return self.worker is not None and self.joining is None

    @property
    def pid(self) -> int | None:
        """The process id; None if there is no process."""
        return self.worker.pid if self.worker is not None and self.worker.process.is_alive() else None


@dataclass(slots=True)
class Deaths:
    """What has become of processes.

    restarts: how often processes were started again, by reason.
    crashes: how processes ended that nothing had killed.
    failed_joins: errors of processes that could not join.
    """

    restarts: Counter[str] = field(default_factory=Counter)
    crashes: list[str] = field(default_factory=list)
    failed_joins: list[str] = field(default_factory=list)


class Cluster:
    """Hosts with workers, and one more host with the store process.

    Args:
        workers: starts processes.
        folder: for logs and records.
        seed: of the choices that the load makes.
        hosts: the number of hosts.
        per_host: the number of workers on each.
        is_static: whether the group has a fixed size.
    """

    def __init__(
        self, workers: Workers, folder: Path, seed: int, hosts: int, per_host: int, *, is_static: bool
    ) -> None:
        self.folder, self.seed, self.is_static = folder, seed, is_static
        self.hosts = hosts
        self.disk = folder / "disk"
        self.disk.mkdir()
        self.records = folder / "records"
        self.records.mkdir()
        own_mounts()
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "chaos", str(self.disk)], check=True, timeout=20
        )
        # The first process of each host does nothing, so that the host outlives its workers.
        self.net = Network(workers, (1,) * (hosts + 1))
        self.members = [Member(number, number // per_host) for number in range(hosts * per_host)]
        self.collective_members = (0, len(self.members) // 2, len(self.members) - 1)
        self.deaths = Deaths()
        self.store: subprocess.Popen[bytes] | None = None

    # The store.

    def start_store(self) -> None:
        """Starts the store process, with the log that there is."""
        command = [sys.executable, "-m", "gradwire", "store", "--log", str(self.disk / "store.log")]
        command += ["--host", self.net.address(self.hosts), "--port", str(STORE_PORT), "--insecure"]
        inside = ["nsenter", "--net", f"--target={self.net.hosts[self.hosts][0].pid}", *command]
        with (self.folder / "store-process.log").open("ab") as log:
            self.store = subprocess.Popen(inside, stdout=log, stderr=log, preexec_fn=_die_with_parent)

    def signal_store(self, number: signal.Signals) -> None:
        """Sends a signal to the store process."""
        if self.store is not None and self.store.poll() is None:
            self.store.send_signal(number)

    def fill_disk(self) -> None:
        """Writes to the small disk until it is full."""
        with (self.disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 16))
        with (self.disk / "filler").open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"0")

    def empty_disk(self) -> None:
        """Makes space on the small disk again."""
        (self.disk / "filler").unlink(missing_ok=True)

    # Workers.

    def supervise(self) -> None:
        """Starts those whose time has come, and notices who has died or joined. Called again and again."""
        for each in self.members:
            if each.worker is None:
                if not each.is_held and each.start_at <= time.monotonic():
                    self._start(each)
            elif not each.worker.process.is_alive():
                self._bury(each)
            elif each.joining is not None:
                self._look_at_joining(each)

    def kill(self, each: Member) -> None:
        """Kills a worker, which is not started again before `release`."""
        each.is_held = True
        each.may_die = "killed"
        if each.worker is not None:
            each.worker.process.kill()

    def release(self, each: Member) -> None:
        """Lets a killed worker be started again."""
        each.is_held = False

    def signal(self, pid: int | None, number: signal.Signals) -> None:
        """Sends a signal to a process, if it is still there."""
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def limit(self, pid: int | None, what: int, soft: int | None) -> None:
        """Sets a soft limit of a process; None for the highest that it may have."""
        if pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            _, hard = resource.prlimit(pid, what)
            resource.prlimit(pid, what, (hard if soft is None else soft, hard))

    def on_all(self, function: Callable[..., Any], *args: Any, seconds: float = 60.0) -> list[Any]:
        """Runs a function on all workers at once. All of them have joined."""
        pending = [each.worker.start(function, *args) for each in self.members if each.worker is not None]
        return [each.result(seconds) for each in pending]

    def _start(self, each: Member) -> None:
        name = f"{each.name}.{each.incarnation}"
        each.worker = Worker(name, self.folder / f"{name}.log")
        each.may_die = ""
        self.net.enter(each.host, each.worker)
        settings = Settings(
            name=each.name,
            incarnation=each.incarnation,
            names=[other.name for other in self.members],
            gather=[self.members[number].name for number in self.collective_members],
            folder=self.records,
            store=(self.net.address(self.hosts), STORE_PORT),
            file=self.disk / "file-store",
            seed=self.seed,
            pause=PAUSE_S * len(self.members),
        )
        size = len(self.members) if self.is_static else None
        each.joining = each.worker.start(member.begin, settings, each.number, size, JOIN_TIMEOUT_S)
        each.incarnation += 1

    def _look_at_joining(self, each: Member) -> None:
        assert each.worker is not None
        assert each.joining is not None
        try:
            if each.joining.done():
                each.joining.result()
                each.joining = None
        except WorkerDiedError:
            self._bury(each)
        except Exception as error:
            self.deaths.failed_joins.append(f"{each.worker.name}: {type(error).__name__}: {error}"[:500])
            each.may_die = "could not join"
            each.worker.kill()

    def _bury(self, each: Member) -> None:
        assert each.worker is not None
        each.worker.process.join()
        status = each.worker.process.exitcode
        reason = each.may_die
        if status == EVICTED:
            reason = "evicted"
        elif not reason:
            reason = "crashed"
            self.deaths.crashes.append(f"{each.worker.name}: exit status {status}; see {each.worker.log}")
        self.deaths.restarts[reason] += 1
        each.worker.stop(time.monotonic())
        each.worker = each.joining = None
        each.start_at = time.monotonic() + RESTART_PAUSE_S

    def close(self) -> None:
        """Ends all processes, and unmounts the disk."""
        for each in self.members:  # a stopped process cannot exit
            self.signal(each.pid, signal.SIGCONT)
            if each.worker is not None:
                each.worker.ask_to_exit()
                each.worker.stop(time.monotonic() + EXIT_TIMEOUT_S)
        if self.store is not None:
            self.store.kill()
            self.store.wait(20)
        subprocess.run(["umount", "--lazy", str(self.disk)], check=False, timeout=20)

    def processes(self) -> list[psutil.Process]:
        """Returns the processes of this run that are still there, but for those of the hosts."""
        kept = {os.getpid(), *(host[0].pid for host in self.net.hosts)}
        return [each for each in psutil.Process().children(recursive=True) if each.pid not in kept]


def own_mounts() -> None:
    """Moves this process to a mount namespace of its own, so that nobody else sees its mounts."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.unshare(0x00020000) or library.mount(None, b"/", None, 0x4000 | 0x40000, None):
        raise OSError(ctypes.get_errno(), "no mount namespace of its own")


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
