"""How faults are done to a cluster, and healed."""

import resource
import signal
import threading
from collections.abc import Callable
from contextlib import suppress

import psutil

from tests.chaos.cluster import Cluster
from tests.chaos.plan import Fault

__all__ = ["begin"]

Heal = Callable[[], None]

DELAY_S = 0.1
FLAP_S = 0.05

SPARE_BYTES = 16 << 20
"""Address space that a process may still take when its memory is short."""


def begin(cluster: Cluster, fault: Fault) -> Heal:
    """Does a fault to a cluster; returns what heals it."""
    return _FAULTS[fault.kind](cluster, fault)


def _kill(cluster: Cluster, fault: Fault) -> Heal:
    member = cluster.members[fault.target]
    cluster.kill(member)
    return lambda: cluster.release(member)


def _stop(cluster: Cluster, fault: Fault) -> Heal:
    pid = cluster.members[fault.target].pid
    cluster.signal(pid, signal.SIGSTOP)
    return lambda: cluster.signal(pid, signal.SIGCONT)


def _short_of_fds(cluster: Cluster, fault: Fault) -> Heal:
    member = cluster.members[fault.target]
    pid = member.pid
    member.may_die = "fds short"
    if pid is not None:
        with suppress(psutil.NoSuchProcess, FileNotFoundError):
            cluster.limit(pid, resource.RLIMIT_NOFILE, psutil.Process(pid).num_fds())
    return lambda: cluster.limit(pid, resource.RLIMIT_NOFILE, None)


def _short_of_memory(cluster: Cluster, fault: Fault) -> Heal:
    member = cluster.members[fault.target]
    pid = member.pid
    member.may_die = "memory short"
    if pid is not None:
        with suppress(psutil.NoSuchProcess):
            cluster.limit(pid, resource.RLIMIT_AS, psutil.Process(pid).memory_info().vms + SPARE_BYTES)
    return lambda: cluster.limit(pid, resource.RLIMIT_AS, None)


def _unplug(cluster: Cluster, fault: Fault) -> Heal:
    cluster.net.unplug(fault.target)
    return lambda: cluster.net.plug(fault.target)


def _flap(cluster: Cluster, fault: Fault) -> Heal:
    ended = threading.Event()

    def flap() -> None:
        while not ended.wait(FLAP_S):
            cluster.net.unplug(fault.target)
            ended.wait(FLAP_S)
            cluster.net.plug(fault.target)

    thread = threading.Thread(target=flap, name="chaos-flap")
    thread.start()

    def heal() -> None:
        ended.set()
        thread.join()

    return heal


def _delay(cluster: Cluster, fault: Fault) -> Heal:
    cluster.net.delay(fault.target, DELAY_S)
    return lambda: cluster.net.end_delay(fault.target)


def _half_open(cluster: Cluster, fault: Fault) -> Heal:
    """The first worker of a host is killed while nobody can be told."""
    member = next(each for each in cluster.members if each.host == fault.target)
    cluster.net.unplug(fault.target)
    cluster.kill(member)

    def heal() -> None:
        cluster.net.plug(fault.target)
        cluster.release(member)

    return heal


def _part(cluster: Cluster, fault: Fault) -> Heal:
    ways = ((fault.target, fault.other), (fault.other, fault.target))
    for way in ways:
        cluster.net.block(*way)

    def heal() -> None:
        for way in ways:
            cluster.net.unblock(*way)

    return heal


def _one_way(cluster: Cluster, fault: Fault) -> Heal:
    cluster.net.block(fault.target, fault.other)
    return lambda: cluster.net.unblock(fault.target, fault.other)


def _kill_store(cluster: Cluster, _: Fault) -> Heal:
    cluster.signal_store(signal.SIGKILL)
    if cluster.store is not None:
        cluster.store.wait(20)
    return cluster.start_store


def _stop_store(cluster: Cluster, _: Fault) -> Heal:
    cluster.signal_store(signal.SIGSTOP)
    return lambda: cluster.signal_store(signal.SIGCONT)


def _fill_disk(cluster: Cluster, _: Fault) -> Heal:
    cluster.fill_disk()
    return cluster.empty_disk


_FAULTS: dict[str, Callable[[Cluster, Fault], Heal]] = {
    "kill": _kill,
    "stop": _stop,
    "stop-suspect": _stop,
    "stop-lost": _stop,
    "fds": _short_of_fds,
    "memory": _short_of_memory,
    "unplug": _unplug,
    "unplug-lost": _unplug,
    "flap": _flap,
    "delay": _delay,
    "half-open": _half_open,
    "part": _part,
    "one-way": _one_way,
    "store-kill": _kill_store,
    "store-stop": _stop_store,
    "disk": _fill_disk,
}
