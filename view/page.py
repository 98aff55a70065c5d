"""Serves the page of the job from one worker, as long as its agent is there."""

import errno
import ipaddress
import logging
import socket
from typing import TYPE_CHECKING, final

from ..errors import RpcError
from ..rpc.contracts.agent import RpcAgent
from ..rpc.contracts.extension import Extension
from ..rpc.contracts.options import INSTALL_VIEW, View
from .statistics import view_of

if TYPE_CHECKING:  # it needs packages that may not be there
    from .app import PageServer

__all__ = ["Page"]

BACKLOG = 32

log = logging.getLogger("gradwire.view")


@final
class Page(Extension):
    """The page of the job, if the options of the agent want it. It has no hooks on messages."""

    def __init__(self, agent: RpcAgent) -> None:
        super().__init__(agent)
        view = view_of(agent)
        self.server = None if view is None or view.address is None else _start_page(agent, view)
        """Serves the page; None if this worker does not."""

    def close(self) -> None:
        """Stops to serve the page."""
        if self.server is not None:
            self.server.close()


def _start_page(agent: RpcAgent, view: View) -> "PageServer | None":
    """Starts to serve the page of the job at the address of the options, and logs where it is.

    Returns:
        The server; None if another process has the port, and the options allow that.

    Raises:
        RpcError: a package is missing, the address cannot be used, others can reach it without credentials, or
            there is no place for its key that only this user can read.
    """
    host, port = view.host_and_port()
    credentials = agent.options.find_credentials()
    if credentials is None and not agent.options.insecure and not _is_loopback(host):
        raise RpcError(
            f"the view of worker {agent.info.name!r} would be served to other machines, at {host}:{port}, without "
            "encryption: set credentials (docs/security.md), or choose an address of this host only"
        )
    try:
        from .app import PageServer
    except ModuleNotFoundError as error:
        raise RpcError(f"the view needs {error.name}: {INSTALL_VIEW}") from error
    try:
        if port:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        else:
            listener = agent.options.find_listening().ports.listen(host)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and view.may_be_taken:
            log.info("worker %s serves no view: another process has port %d", agent.info.name, port)
            return None
        raise RpcError(f"the view cannot be served at {host}:{port}: {error.strerror}") from error
    try:
        return PageServer(agent, listener, credentials)
    except OSError as error:
        listener.close()
        raise RpcError(f"the key of the view cannot be stored: {error}") from error


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
