"""Rendezvous under mpiexec, whose processes know each other through MPI and need no address to meet at."""

from datetime import timedelta

from ..errors import RendezvousError
from .engines.mpi.world import MpiWorld
from .host_identity import LOOPBACK, Host, address_for_others, share_network
from .rendezvous import Rendezvous
from .stores.tcp import TCPStore

__all__ = ["meet_under_mpiexec"]


def meet_under_mpiexec(timeout: timedelta, *, insecure: bool) -> Rendezvous:
    """The ranks of MPI's world, and a TCPStore that its rank 0 hosts. All of its processes call this together.

    Raises:
        RendezvousError: no store could be opened; on all ranks alike.
        ProcessGroupError: MPI cannot be used.
    """
    comm = MpiWorld.from_mpiexec().comm
    rank, size = comm.rank, comm.size
    host = LOOPBACK if share_network(comm.allgather(Host.here())) else address_for_others()
    store: TCPStore | None = None
    problem = ""
    if rank == 0:
        try:
            store = TCPStore(host, 0, is_master=True, timeout=timeout, wait_for_workers=False, insecure=insecure)
        except Exception as error:
            problem = str(error)
    host, port, problem = comm.bcast((host, 0 if store is None else store.port, problem))
    if problem:
        raise RendezvousError(f"rank 0 of mpiexec's processes cannot host a store for them: {problem}")
    if store is None:
        store = TCPStore(host, port, timeout=timeout, wait_for_workers=False, insecure=insecure)
    return Rendezvous(store, rank, size, store.close)
