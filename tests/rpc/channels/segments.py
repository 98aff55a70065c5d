"""Functions that the tests of shared memory call on workers."""

import contextlib
import gc
import os
from pathlib import Path

from gradwire.rpc.agent.grpc_agent import GrpcAgent
from gradwire.rpc.contracts.agent import current_agent

MIB = 1 << 20

kept = []


def network():
    agent = current_agent()
    assert isinstance(agent, GrpcAgent)
    return agent._network


def memory():
    return network().channels.memory


def channels_to(worker_id):
    """Returns this worker's channels to another."""
    return network().peers.by_id[worker_id].channels


def used_bytes():
    return memory().limit.used


def segments_by_peer():
    """Returns the segments between this worker and each that it has a socket to."""
    channels = [peer.used_channels for peer in network().peers.all()]
    found = [each.shared_memory.segments for each in channels if each is not None]
    return [each for each in found if each.is_connected]


def segments_in_use():
    """Returns how many segments the peers of this worker have not given back, and how many it has leased."""
    peers = segments_by_peer()
    pools = [peer.pool for peer in peers]
    lent = [number for pool in pools for number in pool._in_use if number not in pool._ended_here]
    return len(lent), sum(len(peer.mapped._in_use) for peer in peers)


def keep(tensor):
    kept.append(tensor)


def release_kept(count=0):
    """Releases what is kept, except for the first `count` tensors."""
    del kept[count:]
    gc.collect()


def kept_sums():
    return [tensor.sum().item() for tensor in kept]


def write_to_all():
    for tensor in kept:
        tensor.add_(1)


def mapped_files():
    """Returns how many segments this process has mapped, and how many it has opened."""
    return len(mapped_in("self")), len(opened_in("self"))


def mapped_in(process):
    """Returns the inodes of the segments that a process has mapped, each as often as it is mapped."""
    lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    return [int(line.split()[4]) for line in lines if "memfd:gradwire" in line]


def opened_in(process):
    """Returns the inodes of the segments that a process has opened."""
    found = []
    for name in os.listdir(f"/proc/{process}/fd"):
        path = f"/proc/{process}/fd/{name}"
        with contextlib.suppress(OSError):  # it has been closed
            if "memfd:gradwire" in os.readlink(path):
                found.append(os.stat(path).st_ino)
    return found


def segments_of(processes=None):
    """Returns the inodes of all segments that processes have mapped or opened. Their memory lives that long.

    Args:
        processes: their ids; None for all processes of this machine.
    """
    found = set()
    for process in processes or filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            found.update(mapped_in(process), opened_in(process))
    return found
