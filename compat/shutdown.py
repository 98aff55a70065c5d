"""Replaces torch's `shutdown` and the functions it calls.

torch's `shutdown` calls other functions through their module, where programs and tests replace them. So does this
one.
"""

import logging
import sys
from typing import Any

from .. import rpc
from ..errors import RpcTimeoutError
from ..rpc.api import leave
from ..rpc.contracts.agent import current_agent, holder
from ..rpc.contracts.messages import UNSET_RPC_TIMEOUT
from ..rref.forks import References

__all__ = ["all_gather", "delete_references", "destroy_references", "shutdown", "wait_all_workers"]

RELEASE_TIMEOUT_S = 100.0
"""How long to wait until the owners of references have confirmed their release, in seconds."""

log = logging.getLogger(__name__)


def shutdown(graceful: bool = True, timeout: float = 0) -> None:
    """Leaves the group: see `gradwire.rpc.shutdown`.

    Raises:
        RuntimeError: not all workers called shutdown within the timeout; or other workers still hold references to
            values of this one, and `torch.distributed.rpc.api._ignore_rref_leak` is False.
    """
    api: Any = sys.modules["torch.distributed.rpc.api"]
    agent: object = holder.get()
    if not isinstance(agent, rpc.RpcAgent):
        rpc.shutdown(graceful, timeout)  # of another backend, which may lack the methods used below
        return
    worker = agent

    def join() -> None:
        if not worker.dynamic:
            api._wait_all_workers(timeout)
            api._delete_all_user_and_unforked_owner_rrefs()
        worker.join(timeout)
        if not api._ignore_rref_leak:
            try:
                destroy_references(ignore_leak=False)
            finally:
                worker.join(timeout)  # no worker leaves before all have checked: leaving releases its references

    leave(graceful, timeout, join)


def wait_all_workers(timeout: float = 0) -> None:
    """Waits until all workers have called it; `timeout` in seconds, 0 for none."""
    sys.modules["torch.distributed.rpc.api"]._all_gather(None, timeout=timeout)


def all_gather(
    obj: Any, worker_names: set[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """Gathers one object from each of several workers: see `gradwire.rpc.all_gather`."""
    try:
        return rpc.all_gather(obj, worker_names, timeout)
    except RpcTimeoutError as error:
        raise RuntimeError(f"timed out in _all_gather after {error.seconds:.2f} seconds: {error}") from error


def delete_references() -> None:
    """Releases all references of this worker to values of others. Using them afterwards is an error.

    Logs a warning if some cannot be released in time: a running call keeps those that it uses.
    """
    try:
        current_agent().extension(References).release_all(RELEASE_TIMEOUT_S)
    except RpcTimeoutError as error:
        log.warning("%s", error)


def destroy_references(ignore_leak: bool) -> None:
    """Raises RuntimeError if other workers hold references to values of this one, unless `ignore_leak`."""
    table = current_agent().extension(References).table
    if not ignore_leak and len(table):
        raise RuntimeError(f"Leaking RRef: other workers still hold references to {len(table)} values of this one")
