"""Every socket on which a running job listens, attacked by those who must not get in.

The sockets are found in /proc, so that one that is added to gradwire is attacked too. To each, strangers say what
every listener of gradwire expects, with pickles wherever one can be: without credentials, with those of another
job, with expired ones, with those of another worker, and as another user of the host.
"""

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
from cryptography import x509
from gradwire.c10d import Credentials
from gradwire.net.security.issuing import Authority, TokenSource, Validity
from gradwire.proto.v1 import agent_pb2

from tests.certificates import EXPIRED, OTHER_TOKEN, TOKEN, make_authority, write
from tests.hostile.attacks import (
    Attempt,
    Outcome,
    TlsClient,
    attempt_all,
    become,
    openings,
    served_serial_number,
)
from tests.hostile.workload import AGENT, ENGINE, FAILURE_DETECTOR, PMI, SOCKETS, STORE, UNKNOWN, Place, Workload
from tests.ports import free_port
from tests.workers import Worker

HAS_MPI = find_spec("mpi4py") is not None
"""Whether the extra `mpi` is installed. Without it, there is no PMI."""

BACKEND = "mpi" if HAS_MPI else "shm"
LISTENING = [AGENT, SOCKETS, STORE, FAILURE_DETECTOR] + [PMI] * HAS_MPI
"""What is to be found in a workload."""

SECURITY = (Path(__file__).parent.parent.parent / "docs" / "security.md").read_text()

MAX_GROWTH_MIB = 64
MAX_NEW_DESCRIPTORS = 30
"""By how much a worker may grow while it makes its own calls, and refuses some hundred connections besides."""

CLEAR, BARE = "in the clear", "no certificate"
"""Ways to connect without credentials."""

MEMBER = "another worker's certificate"

IN_HANDSHAKE = frozenset({BARE, "another CA", "another token", "expired"})
"""Ways that TLS refuses before it has read anything of what is said, so a few openings stand for all."""

FEW = frozenset({"nothing", "stream", "store", "socket", "failure detector"})

HTTP2 = frozenset({"HTTP/2", "stream", "payloads", "question", "store", "queue"})
"""What a gRPC server takes for the beginning of a connection."""

NOT_PROTECTED = {
    ENGINE: "**Gloo, MPI and NCCL** make connections of their own",
    (STORE, CLEAR): "on this host only, unless `insecure=True`",
    (STORE, MEMBER): "Stores and process groups look at the first name only",
}
"""What is open by design, and where docs/security.md says so."""


def test_what_is_not_protected_is_documented():
    text = " ".join(SECURITY.split())
    assert [key for key, words in NOT_PROTECTED.items() if words not in text] == []


class Strangers:
    """Attacks a workload.

    Args:
        workload: the job.
        ways: how connections are made, by name.
        folder: where canaries are to be made.
    """

    def __init__(self, workload: Workload, ways: Mapping[str, TlsClient | None], folder: Path) -> None:
        self._workload = workload
        self._ways = ways
        self._canary = folder / "canary"
        self._hellos = [agent_pb2.Hello.FromString(workload.hello(rank)) for rank in range(len(workload.members))]

    def attack(self, stranger: Worker, places: Iterable[Place], *, group: str | None = None) -> list[Outcome]:
        """Tries to get in at all places in all ways. Fails if one lets in or stays open, or if the job stops.

        Args:
            stranger: the process that does it.
            places: where.
            group: the name of the group to which the stranger says that he belongs; the job's by default.
        """
        attempts = [
            Attempt((place.kind, way, name), place.listener.address, tls, said)
            for place in places
            if place.kind != ENGINE
            for way, tls in self._ways.items()
            for name, said in openings(self._pose(place.rank, group), str(self._canary)).items()
            if name in FEW or way not in IN_HANDSHAKE
            if not (name in HTTP2 and (place.kind, way) in NOT_PROTECTED)
        ]
        outcomes = stranger.start(attempt_all, attempts).result(100)
        self._workload.wait_for_calls(1)
        assert len(outcomes) == len(attempts) > 0
        assert [each for each in outcomes if each.answer] == []
        assert [each for each in outcomes if not each.is_closed] == []
        assert not self._canary.exists()
        self._check_names(
            stranger, [each for each in attempts if each.label == (AGENT, MEMBER, "stream")], outcomes
        )
        return outcomes

    def _check_names(self, stranger: Worker, posing: Sequence[Attempt], outcomes: Sequence[Outcome]) -> None:
        """Checks that who poses as another worker is told so. On a busy machine it may try again: it has 2 s."""
        for _ in range(8):
            told = {each.address for each in outcomes if b"its certificate is not for worker" in each.received}
            posing = [each for each in posing if each.address not in told]
            if not posing:
                return
            outcomes = stranger.run(attempt_all, posing)
        raise AssertionError(f"none of these has been told that the certificate is of another worker: {outcomes}")

    def _pose(self, victim: int, group: str | None) -> bytes:
        """Returns a hello in the name of a worker that is neither the victim nor certified in `MEMBER`."""
        hello = agent_pb2.Hello()
        hello.CopyFrom(self._hellos[0 if victim else 1])
        hello.group = group or hello.group
        return hello.SerializeToString()


def check_silence(outcomes: Sequence[Outcome]) -> None:
    """Checks that those who say nothing are given some time: 2 s, of which the clocks may differ a bit."""
    silent = [each for each in outcomes if each.label[1:] == (CLEAR, "nothing")]
    assert [each for each in silent if each.seconds < 1 or each.reason] == []


def check_places(workload: Workload, expected: Iterable[str]) -> list[Place]:
    """Returns where the job listens. Fails if something listens there that is not expected, or does not."""
    places = workload.places()
    assert [each for each in places if each.kind == UNKNOWN] == []
    assert kinds(places) - {ENGINE} == set(expected)
    assert {each.rank for each in places if each.kind == AGENT} == set(range(len(workload.members)))
    return places


def kinds(places: Iterable[Place]) -> set[str]:
    return {each.kind for each in places}


def urls(address: str) -> tuple[str, str]:
    return f"tcp://{address}:{free_port()}", f"tcp://{address}:{free_port()}"


def of_unix(places: Iterable[Place]) -> list[Place]:
    return [each for each in places if each.listener.family == "unix"]


def of_tcp(places: Iterable[Place]) -> list[Place]:
    return [each for each in places if each.listener.family == "tcp"]


def growth(before: Sequence[int], now: Sequence[int]) -> int:
    """Returns by how much the number of the worker has grown that has grown most."""
    return max(after - then for then, after in zip(before, now, strict=True))


class Health:
    """Compares a job after the attacks with the job before."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._kinds = kinds(workload.places())
        self._memory = workload.memory()
        self._descriptors = workload.descriptors()

    def check(self) -> None:
        """Checks that the calls have succeeded, and that nothing has been kept of strangers; ends the workload."""
        self._workload.wait_for_calls()
        self._workload.reduce()
        assert kinds(self._workload.places()) == self._kinds
        growth = [now - before for now, before in zip(self._workload.memory(), self._memory, strict=True)]
        assert max(growth) < MAX_GROWTH_MIB
        growth = [
            now - before for now, before in zip(self._workload.descriptors(), self._descriptors, strict=True)
        ]
        assert max(growth) < MAX_NEW_DESCRIPTORS
        self._workload.finish()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_one_host_without_set_up(workers, tmp_path):
    *members, stranger = workers(4)
    workload = Workload(members, urls("127.0.0.1"), BACKEND, [None] * 3)
    places = check_places(workload, LISTENING)
    assert kinds(of_unix(places)) == {AGENT, SOCKETS, STORE, FAILURE_DETECTOR}
    assert kinds(of_tcp(places)) == {PMI} & set(LISTENING)
    assert {each.listener.address[0] for each in of_tcp(places)} <= {"127.0.0.1"}
    strangers = Strangers(workload, {CLEAR: None, BARE: TlsClient()}, tmp_path)
    health = Health(workload)
    # The same user may do all that the job's user may, but not by mistake.
    check_silence(strangers.attack(stranger, places, group="another job"))
    stranger.run(become)
    outcomes = strangers.attack(stranger, places)
    denied = repr(PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
    assert {each.reason for each in outcomes if each.label[0] in (AGENT, STORE)} == {denied}
    for place in places:
        if place.kind == SOCKETS:
            said = openings(b"", "", workload.nonce(place.rank, (place.rank + 1) % 3))["socket"]
            (outcome,) = stranger.run(attempt_all, [Attempt((), place.listener.address, None, said)])
            assert outcome.is_closed
            assert not outcome.answer
    health.check()


def of_files(credentials: Credentials) -> TlsClient:
    """Returns a client with the certificate of a worker, which somebody has got hold of."""
    return TlsClient(b"".join(Path(str(each)).read_bytes() for each in (credentials.certificate, credentials.key)))


def issued(authority: Authority, worker: str | None, validity: Validity | None = None) -> TlsClient:
    return TlsClient(b"".join(authority.issue(worker, validity or Validity.days(1))))


def with_certificates(authority: Authority, own: Sequence[Credentials]) -> dict[str, TlsClient | None]:
    """Returns how strangers connect to a job whose workers have certificates, of which they have got one."""
    return {
        CLEAR: None,
        BARE: TlsClient(),
        "another CA": issued(make_authority(), "worker1"),
        "expired": issued(authority, "worker1", EXPIRED),
        MEMBER: of_files(own[-1]),
    }


def check_certificates(stranger: Worker, places: Iterable[Place], own: Sequence[Credentials]) -> None:
    """Checks that each worker shows strangers the certificate that is in its files now."""
    for place in (each for each in of_tcp(places) if each.kind not in (PMI, ENGINE)):
        certificate = x509.load_pem_x509_certificate(Path(str(own[place.rank].certificate)).read_bytes())
        assert stranger.run(served_serial_number, place.listener.address) == certificate.serial_number


def test_one_host_with_credentials_over_tcp(workers, tmp_path):
    """Certificates are replaced while the job runs, and the job is attacked again."""
    *members, stranger = workers(4)
    ca = make_authority()

    def write_all() -> list[Credentials]:
        return [write(tmp_path / f"of-{rank}", ca, f"worker{rank}") for rank in range(3)]

    own = write_all()
    workload = Workload(members, urls("127.0.0.1"), BACKEND, own, host="127.0.0.1", transports=("tcp", "grpc"))
    places = check_places(workload, LISTENING)
    assert of_unix(places) == []
    workload.wait_for_bulk_connection(0, 1)
    health = Health(workload)
    check_certificates(stranger, places, own)
    check_silence(Strangers(workload, with_certificates(ca, own), tmp_path).attack(stranger, places))
    write_all()
    check_certificates(stranger, places, own)
    workload.wait_for_calls()
    ways = with_certificates(ca, own)
    Strangers(workload, {way: ways[way] for way in ("expired", MEMBER)}, tmp_path).attack(stranger, places)
    health.check()


@pytest.mark.parametrize("kind", ["token", "certificates"])
def test_several_hosts(hosts, tmp_path, kind):
    net = hosts(3, 2)
    (a, b, here), (c, there) = net.hosts
    if kind == "token":
        own = [Credentials(token=TOKEN)] * 3
        ways = {CLEAR: None, BARE: TlsClient(), "another token": of_token(OTHER_TOKEN)}
        backend, expected = "gloo", set(LISTENING) - {PMI}
    else:
        ca = make_authority()
        own = [write(tmp_path / f"of-{rank}", ca, f"worker{rank}") for rank in range(3)]
        ways = with_certificates(ca, own)
        backend, expected = "mpi" if HAS_MPI else "gloo", set(LISTENING)
    workload = Workload([a, b, c], urls(net.address(0)), backend, own, insecure=True)
    places = check_places(workload, expected)
    workload.wait_for_bulk_connection(0, 2)
    strangers = Strangers(workload, ways, tmp_path)
    health = Health(workload)
    check_silence(strangers.attack(there, [each for each in of_tcp(places) if each.rank < 2]))
    strangers.attack(here, [each for each in of_tcp(places) if each.rank == 2])
    here.run(become)
    strangers.attack(here, of_unix(places))
    health.check()


def of_token(token: str) -> TlsClient:
    material = TokenSource(token, "worker1").current()
    return TlsClient(material.certificate + material.key)
