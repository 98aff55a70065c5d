"""The page's requests and answers."""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from importlib.resources import files
from typing import Any, final

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import RpcError, UnknownWorkerError
from ..net.peer_text import printable
from ..rpc.contracts.agent import RpcAgent
from .keys import PageKey
from .metrics import METRICS_TYPE, metrics
from .overview import overview_of, stacks_of

__all__ = ["make_app"]

MIN_INTERVAL_S = 0.5
"""Seconds for which the state of the job is shown again, so that many viewers ask the workers as seldom as one."""

HEADERS = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}


def make_app(agent: RpcAgent, key: PageKey, executor: Executor) -> ASGIApp:
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
