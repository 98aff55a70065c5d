"""Rendezvous under mpiexec, where MPI connects the processes and no address need be given."""

from datetime import timedelta
from functools import partial

from ...errors import RendezvousError
from ...net.host_identity import HostIdentity, can_share_loopback
from ...net.interfaces import LOOPBACK, address_for_others
from ...net.security import Credentials
from ..engines.mpi.world import MpiWorld
from ..rendezvous.api import Rendezvous
from ..stores.tcp import TCPStore

__all__ = ["rendezvous_under_mpiexec"]


def rendezvous_under_mpiexec(
    timeout: timedelta, *, insecure: bool, credentials: Credentials | None = None
) -> Rendezvous:
    """Opens a TCPStore that rank 0 of MPI's world hosts. All processes of that world must call it together.

    Raises:
        RendezvousError: rank 0 could not host the store. Raised on all ranks.
        ProcessGroupError: MPI cannot be used.
    """
    comm = MpiWorld.from_mpiexec().comm
    rank, size = comm.rank, comm.size
    host = LOOPBACK if can_share_loopback(comm.allgather(HostIdentity.here())) else address_for_others()
    open_store = partial(
        TCPStore, timeout=timeout, wait_for_workers=False, insecure=insecure, credentials=credentials
    )
    store: TCPStore | None = None
    problem = ""
    if rank == 0:
        try:
            store = open_store(host, 0, is_master=True)
        except Exception as error:
            problem = str(error)
    host, port, problem = comm.bcast((host, 0 if store is None else store.port, problem))
    if problem:
        raise RendezvousError(f"rank 0 under mpiexec cannot host the store: {problem}")
    if store is None:
        store = open_store(host, port)
    return Rendezvous(store, rank, size, store.close)
