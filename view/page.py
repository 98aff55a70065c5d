"""Serves the page of the job from one worker, as long as its agent is there."""

import asyncio
import errno
import ipaddress
import logging
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import final

from ..errors import RpcError
from ..net.addresses import format_address
from ..net.inheritance import note_listener
from ..net.security.credentials import Credentials
from ..rpc.contracts.agent import RpcAgent
from ..rpc.contracts.extension import Extension
from ..rpc.contracts.options import INSTALL_VIEW, View
from .keys import KEY_PARAMETER, LinkFile, PageKey
from .statistics import view_of

__all__ = ["Page"]

BACKLOG = 32
MAX_REQUEST_BYTES = 16 << 10
"""Bytes of the line and the headers of a request; a body is not read."""

CLOSE_TIMEOUT_S = 5.0

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


def _start_page(agent: RpcAgent, view: View) -> "_Server | None":
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
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
        from prometheus_client import core  # noqa: F401
    except ImportError as error:
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
        return _Server(agent, listener, credentials)
    except OSError as error:
        listener.close()
        raise RpcError(f"the key of the view cannot be stored: {error}") from error


@final
class _Server:
    """Serves the page of one agent until it is closed."""

    def __init__(self, agent: RpcAgent, listener: socket.socket, credentials: Credentials | None) -> None:
        """Starts the thread, and another one when the first request comes. Owns the listener from now on.

        Raises:
            OSError: the link with the key cannot be stored where only this user can read it.
        """
        from uvicorn import Config, Server

        from .app import make_app
        from .connections import BoundedListener, BoundedProtocol

        context = None if credentials is None else credentials.identity().page_context()
        key = PageKey(credentials)
        name = f"gradwire-{agent.info.name}-view"
        self._collector = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-collector")
        self._server = Server(
            Config(
                make_app(agent, key, self._collector),
                http=BoundedProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level=logging.CRITICAL,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                h11_max_incomplete_event_size=MAX_REQUEST_BYTES,
                timeout_graceful_shutdown=1,
                ssl_context_factory=None if context is None else lambda _config, _default: context,
            )
        )
        self._listener = BoundedListener(listener)
        host, port = self._listener.getsockname()[:2]
        note_listener(self, port, host)
        address = f"{'http' if context is None else 'https'}://{format_address(host, port)}/"
        self.url = f"{address}?{KEY_PARAMETER}={key.text}"
        """Where the page is, with its key."""
        self._link = LinkFile(port)
        self._link.write(self.url)
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()
        # Without the key: others may read the log.
        log.warning(
            "the view of the job is at %s: open the link with its key that is in %s, or run: gradwire top %s",
            address,
            self._link.path,
            address,
        )

    def close(self) -> None:
        """Ends the server and its threads."""
        self._server.should_exit = True
        self._thread.join(CLOSE_TIMEOUT_S)
        self._collector.shutdown(wait=False, cancel_futures=True)
        self._listener.close()
        self._link.remove(self.url)

    def _serve(self) -> None:
        from .connections import BoundedLoop

        try:
            with asyncio.Runner(loop_factory=BoundedLoop) as runner:
                runner.run(self._server.serve(sockets=[self._listener]))
        except Exception:
            log.exception("the view ends")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
