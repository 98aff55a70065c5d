"""Who may talk to this worker."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import final

from ...proto.v1 import agent_pb2
from ..contracts.worker import WorkerInfo

__all__ = ["PROTOCOL_MAJOR", "PROTOCOL_MINOR", "Handshake", "RefusedError"]

PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 0


class RefusedError(Exception):
    """A peer is not let in; the text goes back to it."""


@final
class Handshake:
    """Says hello for this worker, and checks the hellos of others. Lives on the event loop."""

    def __init__(self, group: str, me: WorkerInfo, learn: Callable[[Sequence[str]], None]) -> None:
        """What a hello tells of a dynamic group goes to `learn`, which calls `open` with all members."""
        self.me = me
        self._learn = learn
        self.hello = agent_pb2.Hello(
            protocol_major=PROTOCOL_MAJOR,
            protocol_minor=PROTOCOL_MINOR,
            group=group,
            worker_id=me.id,
            worker_name=me.name,
        )
        self._members: Mapping[int, WorkerInfo] = {}
        self._known = asyncio.Event()

    def open(self, members: Mapping[int, WorkerInfo], roster: Sequence[str]) -> None:
        """From now on these are let in. Who said hello before has been waiting."""
        self._members = members
        self.hello.roster[:] = roster
        self._known.set()

    async def admit(self, hello: agent_pb2.Hello) -> WorkerInfo:
        """The worker that says this hello.

        Raises:
            RefusedError: another protocol version or job, or nobody this worker knows.
        """
        if hello.protocol_major != PROTOCOL_MAJOR:
            raise RefusedError(
                f"worker {self.me.name!r} speaks protocol {PROTOCOL_MAJOR}.{PROTOCOL_MINOR}, "
                f"{hello.worker_name!r} speaks {hello.protocol_major}.{hello.protocol_minor}; "
                "install the same gradwire on both"
            )
        if hello.group != self.hello.group:
            raise RefusedError(f"worker {self.me.name!r} belongs to another job than {hello.worker_name!r}")
        await self._known.wait()
        if hello.worker_id not in self._members and hello.roster:
            self._learn(hello.roster)
        worker = self._members.get(hello.worker_id)
        if worker is None or worker.name != hello.worker_name:
            raise RefusedError(f"worker {self.me.name!r} knows no {hello.worker_name!r} with id {hello.worker_id}")
        return worker
