"""What serves the page: its requests and answers, and its connections, which are bounded in number and time."""

import asyncio
import contextlib
import logging
import secrets
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from importlib.resources import files
from typing import Any, final

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import RpcError, UnknownWorkerError
from ..net.addresses import format_address
from ..net.inheritance import note_listener
from ..net.peer_text import printable
from ..net.security.credentials import Credentials
from ..rpc.contracts.agent import RpcAgent
from .access import KEY_PARAMETER, LinkFile, PageKey
from .metrics import METRICS_TYPE, metrics
from .overview import overview_of, stacks_of

__all__ = ["PageServer"]

MAX_CONNECTIONS = 64
"""Connections that are open at the same time. A further one takes the place of the oldest one."""

HANDSHAKE_TIMEOUT_S = 5.0
"""Seconds that TLS may take to begin."""

REQUEST_TIMEOUT_S = 5.0
"""Seconds within which the line and the headers of a request, the next one too, must have arrived completely."""

MIN_INTERVAL_S = 0.5
"""Seconds for which the state of the job is shown again, so that many viewers ask the workers as seldom as one."""

MAX_REQUEST_BYTES = 16 << 10
"""Bytes of the line and the headers of a request; a body is not read."""

CLOSE_TIMEOUT_S = 5.0

HEADERS = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}


log = logging.getLogger("gradwire.view")


@final
class PageServer:
    """Serves the page of one agent until it is closed."""

    def __init__(self, agent: RpcAgent, listener: socket.socket, credentials: Credentials | None) -> None:
        """Starts the thread, and another one when the first request comes. Owns the listener from now on.

        Raises:
            OSError: the link with the key cannot be stored where only this user can read it.
        """
        context = None if credentials is None else credentials.identity().page_context()
        key = PageKey(credentials)
        name = f"gradwire-{agent.info.name}-view"
        self._collector = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-collector")
        self._server = Server(
            Config(
                _make_app(agent, key, self._collector),
                http=_BoundedProtocol,
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
        self._listener = _BoundedListener(listener)
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
        try:
            with asyncio.Runner(loop_factory=_BoundedLoop) as runner:
                runner.run(self._server.serve(sockets=[self._listener]))
        except Exception:
            log.exception("the view ends")


@final
class _BoundedListener(socket.socket):
    """A listening socket. Those who connect and say nothing keep nobody out, and take few file descriptors."""

    def __init__(self, listener: socket.socket) -> None:
        """Args: listener: the socket that this one takes the place of."""
        super().__init__(listener.family, listener.type, listener.proto, listener.detach())
        self._accepted: deque[weakref.ref[socket.socket]] = deque()

    def accept(self) -> tuple[socket.socket, Any]:
        """Accepts a connection; ends the oldest one first if there are MAX_CONNECTIONS."""
        connection, address = super().accept()
        is_open = ((each, found) for each in self._accepted if (found := each()) is not None)
        self._accepted = deque(each for each, found in is_open if found.fileno() != -1)
        while len(self._accepted) >= MAX_CONNECTIONS:
            oldest = self._accepted.popleft()()
            with contextlib.suppress(OSError):  # the peer has ended it
                if oldest is not None:
                    oldest.shutdown(socket.SHUT_RDWR)
        self._accepted.append(weakref.ref(connection))
        return connection, address


@final
class _BoundedLoop(asyncio.SelectorEventLoop):
    """An event loop whose servers wait HANDSHAKE_TIMEOUT_S for TLS."""

    async def create_server(self, factory: Callable[[], Any], *args: Any, **options: Any) -> asyncio.Server:  # type: ignore[override]
        """Returns a server as `asyncio` does."""
        if options.get("ssl") is not None:
            options["ssl_handshake_timeout"] = HANDSHAKE_TIMEOUT_S
        return await super().create_server(factory, *args, **options)


@final
class _BoundedProtocol(H11Protocol):
    """A connection that is closed if its next request does not arrive in time, whatever arrives instead."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins to wait for the first request."""
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Waits no more."""
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Handles bytes, with which a request may be complete."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Begins to wait for the next request, if it has not arrived already."""
        super().on_response_complete()
        self._watch()

    def _watch(self) -> None:
        is_waiting = self.cycle is None or self.cycle.response_complete
        if is_waiting and self._timer is None:
            self._timer = self.loop.call_later(REQUEST_TIMEOUT_S, self.transport.abort)
        elif not is_waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _make_app(agent: RpcAgent, key: PageKey, executor: Executor) -> ASGIApp:
    """Returns the application that serves the page; the executor has one thread, which asks the other workers."""
    views = _Views(agent, executor)
    routes = [
        Route("/", views.page),
        Route("/api/job", views.overview),
        Route("/api/stacks/{worker}", views.stacks),
        Route("/metrics", views.metrics),
    ]
    return Starlette(routes=routes, middleware=[Middleware(_KeyCheck, key=key)])


@final
class _KeyCheck:
    """Refuses requests without the key, whatever they ask for."""

    def __init__(self, app: ASGIApp, key: PageKey) -> None:
        self._app = app
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        authorization = dict(scope.get("headers", ())).get(b"authorization", b"")
        try:
            is_admitted = scope["type"] == "http" and self._key.admits(scope["query_string"], authorization)
        except ValueError:  # too many parameters
            is_admitted = False
        if is_admitted:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            text = "This page needs a key: open the link in the file that the worker has logged.\n"
            await PlainTextResponse(text, 403, HEADERS)(scope, receive, send)


@final
class _Views:
    """What the page answers."""

    def __init__(self, agent: RpcAgent, executor: Executor) -> None:
        self._agent = agent
        self._executor = executor
        self._html = files(__package__).joinpath("page.html").read_text()
        self._overview: asyncio.Future[dict[str, Any]] | None = None
        self._asked = 0.0
        """The time of `time.monotonic` at which the workers were asked last."""

    async def page(self, _request: Request) -> Response:
        nonce = secrets.token_hex(8)
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; "
            "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        headers = {**HEADERS, "Content-Security-Policy": policy}
        return HTMLResponse(self._html.replace("{{nonce}}", nonce), headers=headers)

    async def overview(self, _request: Request) -> Response:
        return JSONResponse(await self._current(), headers=HEADERS)

    async def stacks(self, request: Request) -> Response:
        name = request.path_params["worker"]
        try:
            found = await self._run(lambda: stacks_of(self._agent, name))
        except UnknownWorkerError:
            return JSONResponse({"error": f"there is no worker {printable(name)!r}"}, 404, HEADERS)
        except RpcError as error:
            return JSONResponse({"error": printable(error, 500)}, 504, HEADERS)
        return JSONResponse({"worker": name, "threads": found}, headers=HEADERS)

    async def metrics(self, _request: Request) -> Response:
        text = metrics(await self._current())
        return Response(text, media_type=METRICS_TYPE, headers=HEADERS)

    async def _current(self) -> dict[str, Any]:
        """Returns the state of the job. Requests that come at the same time share it."""
        is_old = time.monotonic() - self._asked > MIN_INTERVAL_S
        if self._overview is None or (
            self._overview.done() and (is_old or self._overview.exception() is not None)
        ):
            self._asked = time.monotonic()
            self._overview = asyncio.ensure_future(self._run(lambda: overview_of(self._agent)))
        return await asyncio.shield(self._overview)

    def _run(self, function: Callable[[], Any]) -> Awaitable[Any]:
        return asyncio.get_running_loop().run_in_executor(self._executor, function)
