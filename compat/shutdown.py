"""Leaving the group as torch's callers know it.

torch's `shutdown` goes through other functions of its module, which programs and tests replace. So does this one.
"""

import logging
import sys
from typing import Any

from .. import rpc
from ..errors import RpcTimeoutError
from ..rpc.contracts.agent import current_agent
from ..rpc.contracts.arguments import UNSET_RPC_TIMEOUT
from ..rpc.contracts.worker_end import WorkerEnd
from ..rref.forks import References

__all__ = ["all_gather", "delete_references", "destroy_references", "shutdown", "wait_all_workers"]

GIVE_UP_SECONDS = 100.0
"""How long to wait for the owners of references to confirm that they are gone."""

log = logging.getLogger(__name__)


def shutdown(graceful: bool = True, timeout: float = 0) -> None:
    """Leaves the group: see `gradwire.rpc.shutdown`.

    Raises:
        RuntimeError: other workers did not come in time; or, where `torch.distributed.rpc.api._ignore_rref_leak`
            is False, references are left.
    """
    api: Any = sys.modules["torch.distributed.rpc.api"]
    agent: object = current_agent()
    if not isinstance(agent, rpc.RpcAgent):
        rpc.shutdown(graceful, timeout)  # of another backend, which may know less
        return
    try:
        if graceful and not agent.dynamic:
            api._wait_all_workers(timeout)
            api._delete_all_user_and_unforked_owner_rrefs()
        if graceful:
            agent.join(timeout)
        if graceful and not api._ignore_rref_leak:
            try:
                destroy_references(ignore_leak=False)
            finally:
                agent.join(timeout)  # all look before any leaves, because who leaves drops what it holds
    except KeyboardInterrupt as error:
        agent.leave_at_exit(WorkerEnd.by_error(error))
        raise KeyboardInterrupt from None  # without the frames of the wait
    finally:
        rpc.shutdown(graceful=False)


def wait_all_workers(timeout: float = 0) -> None:
    """Returns when all workers have called it; `timeout` in seconds, 0 for none."""
    sys.modules["torch.distributed.rpc.api"]._all_gather(None, timeout=timeout)


def all_gather(
    obj: Any, worker_names: set[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """Brings the objects of several workers together: see `gradwire.rpc.all_gather`."""
    try:
        return rpc.all_gather(obj, worker_names, timeout)
    except RpcTimeoutError as error:
        raise RuntimeError(f"timed out in _all_gather after {error.seconds:.2f} seconds: {error}") from error


def delete_references() -> None:
    """Gives up the references that this worker holds to values of others; using them afterwards is an error.

    A call that runs keeps those that it uses, for as long as it takes. That is no reason to fail, as shutdown
    waits for calls later on.
    """
    try:
        current_agent().extension(References).give_up_all(GIVE_UP_SECONDS)
    except RpcTimeoutError as error:
        log.warning("%s", error)


def destroy_references(ignore_leak: bool) -> None:
    """Checks that no worker holds a reference to a value here.

    Raises:
        RuntimeError: one does, and `ignore_leak` is False.
    """
    table = current_agent().extension(References).table
    if not ignore_leak and len(table):
        raise RuntimeError(f"Leaking RRef: other workers still hold references to {len(table)} values of this one")
