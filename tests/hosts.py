"""Simulated hosts: worker processes in network namespaces of their own, joined by a virtual switch.

    def test_a_sum(hosts):
        net = hosts(2, 1)                        # two workers on the first host, one on the second
        a, b, c = net.workers
        net.unplug(1)                            # the second host can no longer be reached

A host has its own network, host name, /dev/shm and boot id. Its name resolves to its loopback address and is
unknown on the others, as on a fresh Debian. All hosts share the PID namespace, /tmp, and the user.

The kernel removes a namespace with the last process in it, so nothing is left however a test ends.
"""

import contextlib
import ctypes
import fcntl
import math
import os
import queue
import socket
import struct
import subprocess
import threading
import time
from pathlib import Path

from tests.workers import Worker, Workers

__all__ = ["MEMORY", "NETWORK", "Network", "separate", "why_unavailable"]

_NEW = {"net": 0x40000000, "mnt": 0x00020000, "uts": 0x04000000, "ipc": 0x08000000}
"""The flags of unshare(2) and setns(2), by the names in /proc/self/ns."""

NETWORK = frozenset({"net", "uts"})
MEMORY = frozenset({"mnt", "ipc"})
"""Namespaces that containers of one machine may each have of their own, or share."""

_BIND, _REC, _PRIVATE = 0x1000, 0x4000, 0x40000
"""Flags of mount(2)."""

_SET_INTERFACE, _TAP = 0x400454CA, 0x1002
"""TUNSETIFF, and IFF_TAP with IFF_NO_PI, of linux/if_tun.h."""

NOBODY = "02:00:00:00:00:99"
"""An address of the link layer that no host has."""

Frames = queue.SimpleQueue[tuple[float, bytes] | None]
"""Frames and when they are due; None at the end."""

MAX_QUEUE_S = 0.5
"""Seconds for which a packet waits at most for a slow line."""

_BOOT_ID = "/proc/sys/kernel/random/boot_id"


class Network:
    """Hosts with the addresses 10.91.0.1, 10.91.0.2, and so on.

    Args:
        workers: starts the workers, and one more process for the switch.
        counts: the number of workers on each host.
        own: the namespaces that hosts do not share; `NETWORK` alone makes them containers of one machine.
    """

    def __init__(self, workers: Workers, counts: tuple[int, ...], own: frozenset[str] = NETWORK | MEMORY) -> None:
        self.hosts: list[list[Worker]] = []
        self._own = own
        (self._switch,) = workers(1)
        self._switch.ends_last = True  # without it, goodbyes between hosts would get lost
        made = [self._switch.start(separate, "switch", workers.folder, NETWORK)]
        self.hosts.extend(workers(count) for count in counts)
        made += [host[0].start(separate, f"host{n}", workers.folder, own) for n, host in enumerate(self.hosts)]
        for pending in made:
            pending.result()
        for first, *others in self.hosts:
            workers.each(others, _enter, first.pid, own)
        cables = []
        for number, (first, *_) in enumerate(self.hosts):
            cables += [
                f"link add port{number} type veth peer name eth0 netns {first.pid}",
                f"link set port{number} master bridge up",
            ]
        _ip(self._switch, "link add bridge up type bridge", *cables)
        for number in range(len(self.hosts)):
            address = f"addr add {self.address(number)}/24 dev eth0"
            self.ip(number, address, "link set lo up", "link set eth0 up")

    @property
    def workers(self) -> list[Worker]:
        """All workers, in the order of their hosts."""
        return [worker for host in self.hosts for worker in host]

    def address(self, host: int) -> str:
        """Returns the address of a host's only interface, eth0."""
        return f"10.91.0.{host + 1}"

    def unplug(self, host: int) -> None:
        """Cuts the host off: from now on all packets to it and from it are lost."""
        _ip(self._switch, f"link set port{host} down")

    def plug(self, host: int) -> None:
        """Connects a host again that was cut off."""
        _ip(self._switch, f"link set port{host} up")

    def block(self, source: int, target: int) -> None:
        """Loses all packets from one host to another; those in the other direction arrive."""
        neighbour = f"{self.address(target)} lladdr {NOBODY} nud permanent"
        self.ip(source, f"neigh replace {neighbour} dev eth0")

    def unblock(self, source: int, target: int) -> None:
        """Has packets from one host to another arrive again."""
        self.ip(source, f"neigh del {self.address(target)} dev eth0")

    def delay(self, host: int, seconds: float, bytes_per_s: float = math.inf) -> None:
        """Adds a latency, in seconds, to each packet to the host and to each from it.

        Args:
            host: its number.
            seconds: of each packet; a round trip takes twice that.
            bytes_per_s: in each direction. Packets that would have to wait for more than `MAX_QUEUE_S` are lost.
        """
        self._switch.run(_add_latency, f"port{host}", seconds, bytes_per_s)

    def end_delay(self, host: int) -> None:
        """Removes the latency of a host. Packets that are on their way are lost."""
        self._switch.run(_remove_latency, f"port{host}")

    def enter(self, host: int, worker: Worker) -> None:
        """Moves a worker to a host, before it does anything else."""
        worker.run(_enter, self.hosts[host][0].pid, self._own)

    def add_route(self, host: int) -> None:
        """Gives a host a default route."""
        self.ip(host, "route add default dev eth0")

    def ip(self, host: int, *commands: str) -> None:
        """Runs commands of ip(8) on a host. Raises at the first that fails, and leaves out the rest."""
        _ip(self.hosts[host][0], *commands)


def why_unavailable() -> str:
    """Returns why hosts cannot be simulated on this machine; empty if they can."""
    try:
        made = subprocess.run(
            ["unshare", "--net", "--mount", "--uts", "--ipc", "ip", "tuntap", "add", "end0", "mode", "tap"],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as error:
        return f"ip and unshare are needed (Debian: iproute2, util-linux): {error}"
    return f"no network namespaces may be made here: {made.stderr.strip()}" if made.returncode else ""


def _ip(worker: Worker, *commands: str) -> None:
    """Runs commands of ip(8) in the network of a worker, which may be busy. Raises at the first that fails."""
    batch = ["nsenter", "--net", f"--target={worker.pid}", "ip", "-batch", "-"]
    subprocess.run(batch, input="\n".join(commands), text=True, check=True, timeout=20)


# The functions below run on workers, before anything else does.


def separate(name: str, folder: Path, own: frozenset[str]) -> None:
    """Moves this process to a new host, as its first."""
    _call("unshare", sum(_NEW[each] for each in own))
    if "uts" in own:
        socket.sethostname(name)
    if "mnt" not in own:
        return
    _call("mount", None, b"/", None, _REC | _PRIVATE, None)
    _call("mount", b"tmpfs", b"/dev/shm", b"tmpfs", 0, None)
    if "net" not in own:
        return
    boot_id, names = Path(folder, f"boot-id-{name}"), Path(folder, f"hosts-{name}")
    boot_id.write_text(f"boot of {name}\n")
    names.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
    _call("mount", os.fsencode(boot_id), _BOOT_ID.encode(), None, _BIND, None)
    _call("mount", os.fsencode(names), b"/etc/hosts", None, _BIND, None)


def _enter(pid: int, own: frozenset[str]) -> None:
    """Moves this process to the host of process `pid`."""
    for name in own:
        namespace = os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY)
        _call("setns", namespace, _NEW[name])
        os.close(namespace)


def _add_latency(port: str, seconds: float, bytes_per_s: float) -> None:
    """Puts two interfaces between a port and the bridge, with threads that carry frames between them, delayed."""
    near, far = _tap(f"{port}-near"), _tap(f"{port}-far")
    _ip_here(f"link add {port}-slow up type bridge")
    _ip_here(f"link set {port} master {port}-slow")
    _ip_here(f"link set {port}-near master {port}-slow up")
    _ip_here(f"link set {port}-far master bridge up")
    for source, target in ((near, far), (far, near)):
        frames: Frames = queue.SimpleQueue()
        threading.Thread(target=_read_frames, args=(source, frames, seconds, bytes_per_s), daemon=True).start()
        threading.Thread(target=_write_frames, args=(target, frames), daemon=True).start()


def _remove_latency(port: str) -> None:
    """Puts a port to the bridge again. The threads end, since their interfaces are gone."""
    _ip_here(f"link set {port} master bridge")
    for suffix in ("near", "far"):  # the threads close one when the other is gone, which removes it too
        _ip_here(f"link del {port}-{suffix}", may_fail=True)
    _ip_here(f"link del {port}-slow")


def _ip_here(command: str, *, may_fail: bool = False) -> None:
    subprocess.run(["ip", *command.split()], check=not may_fail)


def _tap(name: str) -> int:
    """Creates a TAP interface; returns the file descriptor for its frames."""
    tap = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tap, _SET_INTERFACE, struct.pack("16sH", name.encode(), _TAP))
    return tap


def _read_frames(source: int, frames: Frames, seconds: float, bytes_per_s: float) -> None:
    line_is_free = 0.0
    try:
        while True:
            frame = os.read(source, 2**17)
            now = time.monotonic()
            if line_is_free < now + MAX_QUEUE_S:
                line_is_free = max(now, line_is_free) + len(frame) / bytes_per_s
                frames.put((line_is_free + seconds, frame))
    except OSError:
        frames.put(None)


def _write_frames(target: int, frames: Frames) -> None:
    """Writes frames when they are due. Closes the interface when the other one is gone, since it writes last."""
    while (entry := frames.get()) is not None:
        due, frame = entry
        time.sleep(max(0.0, due - time.monotonic()))
        with contextlib.suppress(OSError):
            os.write(target, frame)
    os.close(target)


def _call(name: str, *arguments: object) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}{arguments}: {os.strerror(number)}")
