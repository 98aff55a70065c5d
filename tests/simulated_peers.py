"""Peers of workers that are not there: what is sent to them goes to a transport of the test."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

from gradwire.rpc.contracts.member import Member
from gradwire.rpc.contracts.options import FlowControlOptions
from gradwire.rpc.contracts.watcher import WorkerWatcher
from gradwire.rpc.contracts.worker import WorkerInfo
from gradwire.rpc.peers.changes import Changes
from gradwire.rpc.peers.flow_control import FlowControl
from gradwire.rpc.peers.link import Links
from gradwire.rpc.peers.peer import MessageListener, Peer, PeerParts
from gradwire.rpc.peers.peers import Peers
from gradwire.rpc.requests.call import CallCounter, CallParts
from gradwire.rpc.requests.codec import Extensions

ADDRESS = "simulated"


class SilentTransport:
    """Sends nothing, and never ends."""

    name = "silent"
    queued_bytes = 0
    read_answer = None
    """No thread waits for an answer."""

    def connect(self) -> None:
        pass

    def send(self, _envelope: bytes, _attached: object = ()) -> None:
        pass

    def withdraw(self, _beginning: bytes) -> bool:
        return False

    def break_off(self, _reason: str) -> None:
        pass

    refuse = break_off


def simulated_parts(
    make_transport: Callable[[Peer, str], Any],
    messages: MessageListener | None = None,
    make_changes: Callable[[WorkerInfo], Changes] | None = None,
    links: Links | None = None,
    make_channels: Callable[[Peer], Any] | None = None,
) -> PeerParts:
    """Returns what peers share.

    Args:
        make_transport: makes the transport to a peer, given its address, too.
        messages: handles what arrives; None if nothing does.
        make_changes: see PeerParts; None if nobody is told.
        links: see PeerParts; None if none of them ever changes.
        make_channels: makes the channels to a peer; None if all payloads are small.
    """
    parts: Any = SimpleNamespace(
        streams=SimpleNamespace(
            make=make_transport,
            renew=lambda ended: ended,
        ),
        channels=SimpleNamespace(to=make_channels or _refuse_large),
        links=links if links is not None else SimpleNamespace(add=lambda _link: None, loop=None),
    )
    return PeerParts(
        parts.links,
        parts.streams,
        lambda transport, _worker: transport,
        parts.channels,
        messages,  # type: ignore[arg-type]
        make_changes or (lambda worker: Changes(worker, (), SimpleNamespace(submit=lambda _task: None))),  # type: ignore[arg-type]
    )


def _refuse_large(peer: Peer) -> NoReturn:
    raise AssertionError(f"a message to worker {peer.info.name} is too large for its envelope")


def silent_peer(
    worker: WorkerInfo, watchers: Sequence[WorkerWatcher] = (), executor: Any = None, transport: Any = None
) -> Peer:
    """Returns a peer that sends nothing, unless a transport is given; `watchers` are told what becomes of it."""
    executor = executor or SimpleNamespace(submit=lambda _task: None)
    return Peer(
        Member(worker, ADDRESS, device_count=0, network="simulated"),
        simulated_parts(
            lambda _peer, _address: transport or SilentTransport(),
            make_changes=lambda info: Changes(info, watchers, executor),
        ),
    )


def call_parts(
    peer: Peer,
    extensions: Extensions,
    executor: Any,
    counter: CallCounter,
    options: FlowControlOptions,
    call_soon: Callable[..., None] = lambda *_: None,
) -> CallParts:
    """Returns what the calls of an agent share that has one peer."""
    peers = Peers(peer.info, dynamic=True)
    peers.add(peer)
    return CallParts(peers, extensions, executor, call_soon, counter, FlowControl(options))
