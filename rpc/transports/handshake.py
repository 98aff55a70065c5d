"""The hello with which a worker begins each connection, and whom this worker accepts."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, final

import grpc
from google.protobuf.message import DecodeError

from ...net.security import printable
from ...proto.v1 import agent_pb2
from ..contracts.worker import RosterVersion, WorkerInfo
from ..wire.parsing import parse_hello
from .base import TransportListener
from .grpc_endpoint import GrpcEndpoint
from .settings import HELLO_TIMEOUT_S, aio

__all__ = ["MAX_CONNECTION", "PROTOCOL", "Handshake", "RefusedError"]

PROTOCOL = 1
"""The version of the protocol. Workers of another one are refused."""

MAX_HELLO_BYTES = 4 << 10
"""Bytes of the first message of a stream: two names and some numbers."""

MAX_SILENT = 64
"""Streams whose hello is awaited at a time; those after them wait for their turn."""

MAX_UNADMITTED = 1024
"""Streams that may wait to be admitted; further ones are turned away, and may try again."""

MAX_CONNECTION = 1 << 40
"""The greatest number of a connection: no two workers count so far, and counting on from it cannot overflow."""

MAX_REASON = 500
"""Characters of the text with which a peer is refused."""


class RefusedError(Exception):
    """A peer is not accepted. The text is sent to it, and has what it says of itself.

    Attributes:
        code: the status of its stream; UNAVAILABLE if it may try again.
    """

    def __init__(self, text: str, code: grpc.StatusCode = grpc.StatusCode.FAILED_PRECONDITION) -> None:
        super().__init__(printable(text, MAX_REASON))
        self.code = code


class _LeftError(RefusedError):
    """A peer has ended its stream before it has said anything."""


@final
class Handshake:
    """Makes the hello of this worker, and checks the hellos of peers. Used on the event loop only."""

    def __init__(
        self,
        group: str,
        me: WorkerInfo,
        members: Mapping[int, TransportListener],
        on_roster: Callable[[RosterVersion], Awaitable[None]],
        endpoint: GrpcEndpoint,
    ) -> None:
        """Accepts nobody before `open`.

        Args:
            group: the name of the job, the same at all of its workers.
            me: this worker.
            members: by worker id. Others may come.
            on_roster: awaited with what the sender of a hello knows of the group's log, if it is more than this
                worker does; calls `open` if there are new members. Raises RefusedError if the log is another one.
            endpoint: makes channels to peers, and knows who they are by their certificates.
        """
        self.me = me
        self.endpoint = endpoint
        self.audit = endpoint.audit
        """Records who is let in."""
        self._on_roster = on_roster
        self._reads: dict[RosterVersion, asyncio.Task[None]] = {}
        """The reads of the log that no admission waits for, by what a member has said."""
        self.hello = agent_pb2.Hello(protocol=PROTOCOL, group=group, worker_id=me.wire_id, worker_name=me.name)
        self._members = members
        self._is_open = asyncio.Event()
        self._silent = asyncio.Semaphore(MAX_SILENT)
        self._unadmitted = 0

    def open(self, version: RosterVersion) -> None:
        """Accepts the members from now on, those included whose hello has been waiting.

        This worker's hellos say the version of the log that they are known from.
        """
        if version.length:
            self.hello.roster.length, self.hello.roster.digest = version.length, version.digest
        self._is_open.set()

    async def receive(self, context: Any) -> tuple[WorkerInfo, agent_pb2.Hello]:
        """Reads the hello of a stream, and nothing else; returns it, and the worker that sent it.

        Raises RefusedError if the worker is not accepted, or says no hello in time.
        """
        peer, claimed = self.endpoint.on_stream(context), ""
        if self._unadmitted >= MAX_UNADMITTED:
            self.audit.limit("agent", f"MAX_UNADMITTED={MAX_UNADMITTED}", "streams without a hello", peer=peer)
            raise RefusedError(f"worker {self.me.name!r} is busy with others", grpc.StatusCode.UNAVAILABLE)
        self._unadmitted += 1
        try:
            hello = await self._read_hello(context)
            claimed = hello.worker_name
            worker = await self.admit(hello, context)
        except RefusedError as refusal:
            if not isinstance(refusal, _LeftError):
                self.audit.deny("agent", refusal, peer=peer, worker=claimed)
            raise
        finally:
            self._unadmitted -= 1
        self.audit.authenticate("agent", peer, worker.name)
        return worker, hello

    async def _read_hello(self, context: Any) -> agent_pb2.Hello:
        try:
            async with self._silent, asyncio.timeout(HELLO_TIMEOUT_S):
                first = await context.read()
        except TimeoutError:
            raise RefusedError(f"no hello within {HELLO_TIMEOUT_S:g} s", grpc.StatusCode.UNAVAILABLE) from None
        if first is aio.EOF:
            raise _LeftError("the stream ended without a hello")
        if len(first) > MAX_HELLO_BYTES:
            raise RefusedError(f"the hello has {len(first)} bytes, of {MAX_HELLO_BYTES} at most")
        try:
            return parse_hello(first)
        except DecodeError:
            raise RefusedError("the first message is no hello") from None

    async def admit(self, hello: agent_pb2.Hello, context: Any) -> WorkerInfo:
        """Returns the worker that sent a hello, once `open` has been called.

        Raises RefusedError if its certificate is for another worker, or it has another version of the protocol,
        belongs to another job, or is no member, or says that it is this worker.
        """
        name = f"'{printable(hello.worker_name)}'"
        if reason := self.endpoint.why_refused(context, hello.worker_name):
            raise RefusedError(f"worker {self.me.name!r} does not admit {name}: {reason}")
        if hello.protocol != PROTOCOL:
            raise RefusedError(
                f"worker {self.me.name!r} speaks protocol {PROTOCOL}, {name} speaks {hello.protocol}; "
                "install the same gradwire on both"
            )
        if hello.group != self.hello.group:
            raise RefusedError(f"worker {self.me.name!r} belongs to another job than {name}")
        if hello.connection > MAX_CONNECTION:
            raise RefusedError(
                f"worker {self.me.name!r} refuses {name}: its connection has number {hello.connection}"
            )
        if (hello.worker_id, hello.worker_name) == (self.me.wire_id, self.me.name):
            raise RefusedError(f"worker {self.me.name!r} does not admit {name}: that is itself")
        await self._is_open.wait()
        version = RosterVersion(hello.roster.length, hello.roster.digest)
        if hello.worker_id not in self._members and version.length:
            await self._on_roster(version)
        member = self._members.get(hello.worker_id)
        if member is None or member.info.name != hello.worker_name:
            raise RefusedError(f"worker {self.me.name!r} knows no {name} with id {hello.worker_id}")
        if version.length > self.hello.roster.length and version not in self._reads:
            # Not awaited: it is a member, even if the store does not answer.
            self._reads[version] = asyncio.ensure_future(self._read_roster(self._on_roster(version), version))
        return member.info

    async def _read_roster(self, reading: Awaitable[None], version: RosterVersion) -> None:
        try:
            with suppress(RefusedError):  # of a log that the store does not have, or cannot tell
                await reading
        finally:
            del self._reads[version]
