"""Peers of workers that are not there: what is sent to them goes to a transport of the test."""

import threading
from collections.abc import Callable, Collection, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn, Self

from gradwire.rpc.contracts.options import FlowControlOptions
from gradwire.rpc.contracts.worker import Member, WorkerEnd, WorkerInfo, WorkerWatcher
from gradwire.rpc.peers.flow_control import FlowControl
from gradwire.rpc.peers.peer import MessageListener, Peer, PeerParts, Peers
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

    def renewed(self) -> Self:
        return self

    refuse = break_off


def simulated_parts(
    make_transport: Callable[[Peer, str], Any],
    messages: MessageListener | None = None,
    links: Any = None,
    make_channels: Callable[[Peer], Any] | None = None,
) -> PeerParts:
    """Returns what peers share.

    Args:
        make_transport: makes the transport to a peer, given its address, too.
        messages: handles what arrives; None if nothing does.
        links: see PeerParts; None if nobody is told what becomes of the peer.
        make_channels: makes the channels to a peer; None if all payloads are small.
    """
    parts: Any = SimpleNamespace(
        channels=SimpleNamespace(to=make_channels or _refuse_large),
        links=links or simulated_links(),
    )
    return PeerParts(
        parts.links,
        make_transport,
        lambda transport, _worker: transport,
        parts.channels,
        messages,  # type: ignore[arg-type]
        FlowControlOptions(),
    )


def simulated_links(watchers: Sequence[WorkerWatcher] = (), executor: Any = None) -> Any:
    """Returns what links share; the executor runs what the watchers do."""
    return SimpleNamespace(
        add=lambda _link: None,
        loop=None,
        lock=threading.Lock(),
        watchers=watchers,
        executor=executor or SimpleNamespace(submit=lambda _task: None),
    )


def _refuse_large(peer: Peer) -> NoReturn:
    raise AssertionError(f"a message to worker {peer.info.name} is too large for its envelope")


def silent_peer(
    worker: WorkerInfo, watchers: Sequence[WorkerWatcher] = (), executor: Any = None, transport: Any = None
) -> Peer:
    """Returns a peer that sends nothing, unless a transport is given; `watchers` are told what becomes of it."""
    return Peer(
        Member(worker, ADDRESS, device_count=0, network="simulated"),
        simulated_parts(
            lambda _peer, _address: transport or SilentTransport(),
            links=simulated_links(watchers, executor),
        ),
    )


def suspect(peer: Peer, end: WorkerEnd, unsent: Collection[bytes] = (), *, waits: bool) -> None:
    """Has a worker be suspect, as its link does."""
    assert peer.link is not None
    peer.suspect(end, unsent, waits=waits)
    peer.link.tell_suspect(end.reason)


def bring_back(peer: Peer) -> None:
    """Has a suspect worker answer again."""
    assert peer.link is not None
    peer.reconnect()
    peer.link.tell_back()


def lose(peer: Peer, end: WorkerEnd) -> None:
    """Has a worker be lost."""
    assert peer.link is not None
    peer.lose(end, ())
    peer.link.tell_lost(end)


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
