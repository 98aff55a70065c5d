"""The hello with which a worker begins each connection, and whom this worker accepts."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import final

from ...proto.v1 import agent_pb2
from ..contracts.worker import WorkerInfo

__all__ = ["PROTOCOL_MAJOR", "PROTOCOL_MINOR", "Handshake", "RefusedError"]

PROTOCOL_MAJOR = 1
"""Workers of another major version are refused."""

PROTOCOL_MINOR = 0


class RefusedError(Exception):
    """A peer is not accepted. The text is sent to it."""


@final
class Handshake:
    """Makes the hello of this worker, and checks the hellos of peers. Used on the event loop only."""

    def __init__(self, group: str, me: WorkerInfo, on_roster: Callable[[Sequence[str]], None]) -> None:
        """Accepts nobody before `open`.

        Args:
            group: the name of the job, the same at all of its workers.
            me: this worker.
            on_roster: called with the roster in the hello of an unknown worker of a dynamic group; calls `open` if
                the roster names new members.
        """
        self.me = me
        self._on_roster = on_roster
        self.hello = agent_pb2.Hello(
            protocol_major=PROTOCOL_MAJOR,
            protocol_minor=PROTOCOL_MINOR,
            group=group,
            worker_id=me.id,
            worker_name=me.name,
        )
        self._members: Mapping[int, WorkerInfo] = {}
        self._is_open = asyncio.Event()

    def open(self, members: Mapping[int, WorkerInfo], roster: Sequence[str]) -> None:
        """Accepts these members from now on, those included whose hello has been waiting.

        Args:
            members: by worker id.
            roster: what this worker's hello says of a dynamic group; empty in a static one.
        """
        self._members = members
        self.hello.roster[:] = roster
        self._is_open.set()

    async def admit(self, hello: agent_pb2.Hello) -> WorkerInfo:
        """Returns the worker that sent a hello, once `open` has been called.

        Raises:
            RefusedError: it has another major version of the protocol, belongs to another job, or is no member.
        """
        if hello.protocol_major != PROTOCOL_MAJOR:
            raise RefusedError(
                f"worker {self.me.name!r} speaks protocol {PROTOCOL_MAJOR}.{PROTOCOL_MINOR}, "
                f"{hello.worker_name!r} speaks {hello.protocol_major}.{hello.protocol_minor}; "
                "install the same gradwire on both"
            )
        if hello.group != self.hello.group:
            raise RefusedError(f"worker {self.me.name!r} belongs to another job than {hello.worker_name!r}")
        await self._is_open.wait()
        if hello.worker_id not in self._members and hello.roster:
            self._on_roster(hello.roster)
        worker = self._members.get(hello.worker_id)
        if worker is None or worker.name != hello.worker_name:
            raise RefusedError(f"worker {self.me.name!r} knows no {hello.worker_name!r} with id {hello.worker_id}")
        return worker
