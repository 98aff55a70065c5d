"""Stores with credentials: who may use a TCPStore, and sealed values in stores that let everybody in."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch.distributed
from gradwire import c10d
from gradwire.c10d import Credentials, FileStore, HashStore, PrefixStore, StoreLimits, TCPStore, rendezvous
from gradwire.c10d.stores.sealed import SealedStore, seal
from gradwire.c10d.stores.server import EXECUTE
from gradwire.c10d.stores.views import is_insecure_store, store_credentials
from gradwire.errors import CredentialsError, RendezvousError, StoreError
from gradwire.net.security import SHARED_HOST_NAME, issuing
from gradwire.net.security.issuing import Validity
from gradwire.proto.v1 import store_pb2

from tests.certificates import EXPIRED, OTHER_TOKEN, TOKEN, ca_pem, make_authority, write

TOKENS = Credentials(token=TOKEN)
OTHERS = Credentials(token=OTHER_TOKEN)


@pytest.fixture
def master():
    with TCPStore("127.0.0.1", 0, is_master=True, credentials=TOKENS) as store:
        yield store


def test_processes_of_the_job_use_the_store(master, workers):
    def use(port: int) -> bytes:
        with TCPStore("127.0.0.1", port, credentials=TOKENS) as store:
            with store.clone() as clone:
                clone.set("from", "there")
            return store.get("here")

    master.set("here", "value")
    assert workers(1)[0].run(use, master.port) == b"value"
    assert master.get("from") == b"there"
    assert store_credentials(PrefixStore("a", master)) == TOKENS


def test_the_environment_has_the_credentials(master, monkeypatch):
    monkeypatch.setenv("GRADWIRE_TOKEN", TOKEN)
    with TCPStore("127.0.0.1", master.port) as store:
        assert store.credentials == TOKENS
        assert store_credentials(FileStore) == TOKENS


@pytest.mark.parametrize(
    ("credentials", "text"),
    [(None, "demands credentials, and this process has none"), (OTHERS, "certificate is not of this job")],
    ids=["none", "wrong"],
)
def test_others_are_refused_and_told_why(master, credentials, text):
    with pytest.raises(StoreError, match=text):
        TCPStore("127.0.0.1", master.port, credentials=credentials)


def test_a_store_without_credentials_is_not_used_with_credentials():
    with (
        TCPStore("127.0.0.1", 0, is_master=True) as master,
        pytest.raises(StoreError, match="it has no credentials"),
    ):
        TCPStore("127.0.0.1", master.port, credentials=TOKENS)


def test_certificates_that_expire_are_refused(tmp_path):
    """The processes that show them may not look at them."""
    ca = make_authority()

    def attempt(port: int, validity: Validity) -> str:
        chain, key = ca.issue(None, validity)
        credentials = grpc.ssl_channel_credentials(ca_pem(ca), key, chain)
        options = [("grpc.ssl_target_name_override", SHARED_HOST_NAME)]
        request = store_pb2.Operation(kind=store_pb2.COUNT_KEYS).SerializeToString()
        channel: Any = grpc.secure_channel(f"127.0.0.1:{port}", credentials, options=options)
        with channel:
            try:
                channel.unary_unary(EXECUTE)(request, timeout=20)
            except grpc.RpcError as error:
                return str(error.code().name)
            return "OK"

    with TCPStore("127.0.0.1", 0, is_master=True, credentials=write(tmp_path / "a", ca, "a")) as store:
        assert attempt(store.port, EXPIRED) == "UNAVAILABLE"
        assert attempt(store.port, Validity.days(1)) == "OK"
    with pytest.raises(CredentialsError, match="expired"):
        TCPStore("127.0.0.1", 0, is_master=True, credentials=write(tmp_path / "b", ca, None, EXPIRED))


def test_public_addresses_are_allowed_with_credentials():
    with (
        TCPStore("0.0.0.0", 0, is_master=True, credentials=TOKENS) as master,
        TCPStore("127.0.0.1", master.port, credentials=TOKENS) as client,
    ):
        client.set("key", "value")


@pytest.fixture
def sealed():
    with HashStore() as under, SealedStore(under, TOKENS) as store:
        yield store


@pytest.mark.parametrize("make", [lambda store: PrefixStore("a", store), lambda store: SealedStore(store, TOKENS)])
def test_a_clone_of_a_view_is_what_the_view_is(tmp_path, make):
    with FileStore(str(tmp_path / "store")) as under, make(under) as view:
        view.insecure, view.credentials = True, TOKENS
        view.set_timeout(7)
        with view.clone() as twin:
            assert is_insecure_store(twin)
            assert (store_credentials(twin), twin.timeout) == (TOKENS, view.timeout)
            twin.set("key", "value")
            assert view.get("key") == b"value"


def test_sealed_values_cannot_be_read_below(sealed):
    sealed.set("key", "a secret value")
    sealed.append("key", " and more")
    sealed.queue_push("queue", "a secret item")
    stored = sealed.underlying_store.get("key") + sealed.underlying_store.queue_pop("queue")
    assert b"secret" not in stored
    assert b"more" not in stored
    assert sealed.get("key") == b"a secret value and more"


@pytest.mark.parametrize(
    "forge",
    [
        lambda store: store.set("key", "forged"),
        lambda store: store.set("key", store.get("other")),
        lambda store: store.set("key", store.get("key")[:-1]),
        lambda store: store.set("key", store.get("key")[:-1] + bytes([store.get("key")[-1] ^ 1])),
        lambda store: store.set("key", store.get("key")[:8]),
        lambda store: store.set("key", b"\x00gw1\xff\xff\xff\xff"),
        lambda store: store.append("key", "forged"),
        lambda store: store.set("key", b"12forged"),
        lambda store: SealedStore(store, OTHERS).set("key", "forged"),
    ],
)
def test_forged_values_are_refused(sealed, forge):
    sealed.set("other", "another value")
    sealed.set("key", "value")
    forge(sealed.underlying_store)
    with pytest.raises(StoreError, match="value of 'key' is not sealed with this job's token"):
        sealed.get("key")
    with pytest.raises(StoreError, match="not sealed"):
        sealed.compare_set("key", "value", "new")
    assert sealed.get("other") == b"another value"


def test_forged_items_of_queues_are_refused(sealed):
    sealed.underlying_store.queue_push("queue", "forged")
    with pytest.raises(StoreError, match="not sealed"):
        sealed.queue_pop("queue")


def test_numbers_are_not_sealed(sealed):
    sealed.set("count", "5")
    assert sealed.add("count", 2) == 7
    assert sealed.get("count") == b"7"
    sealed.append("count", "8")
    assert sealed.get("count") == b"78"


def test_which_stores_are_sealed(tmp_path):
    certificates = write(tmp_path / "a", make_authority(), "a")
    with HashStore() as in_process, FileStore(str(tmp_path / "store")) as file:
        with TCPStore("127.0.0.1", 0, is_master=True, credentials=TOKENS) as secure:
            assert isinstance(seal(PrefixStore("a", secure), TOKENS), PrefixStore)
        assert seal(in_process, TOKENS) is in_process
        assert seal(file, None) is file
        assert seal(file, certificates) is file
        found = seal(file, TOKENS)
        assert isinstance(found, SealedStore)
        assert seal(found, TOKENS) is found
        assert store_credentials(found) == TOKENS
        root = PrefixStore("a", PrefixStore("b", file))
        root.credentials = certificates
        assert store_credentials(PrefixStore("c", root.clone())) == certificates
    with pytest.raises(CredentialsError, match="certificates share no secret"):
        SealedStore(torch.distributed.HashStore(), certificates)


def test_rendezvous_under_torchrun_is_sealed(workers):
    launcher = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(launcher.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GRADWIRE_TOKEN": TOKEN,
    }

    def meet(rank: int) -> bytes:
        os.environ.update(environment, RANK=str(rank))
        found = rendezvous(timeout=40)
        found.store.set(f"from/{rank}", f"the value of {rank}")
        found.wait_for_all(40)
        return found.store.get(f"from/{1 - rank}")

    pending = [worker.start(meet, rank) for rank, worker in enumerate(workers(2))]
    assert [each.result() for each in pending] == [b"the value of 1", b"the value of 0"]
    stored = [launcher.get(f"gradwire/attempt/0/from/{rank}") for rank in range(2)]
    assert not [value for value in stored if b"value of" in value]


def test_torchruns_store_is_not_protected_by_certificates(monkeypatch, tmp_path):
    """They share no secret, so a store on another host stays refused."""
    variables = {"MASTER_ADDR": "192.0.2.7", "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RendezvousError, match="'192.0.2.7' is refused"):
        rendezvous(rank=0, world_size=1, credentials=write(tmp_path / "a", make_authority(), "a"))


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_process_group_with_a_token(workers, free_port, backend):
    def reduce(rank: int) -> float:
        url = f"tcp://127.0.0.1:{free_port}"
        c10d.init_process_group(backend, url, timedelta(seconds=40), 2, rank, credentials=TOKENS)
        tensor = torch.ones(3)
        c10d.all_reduce(tensor)
        c10d.destroy_process_group()
        return float(tensor.sum())

    pending = [worker.start(reduce, rank) for rank, worker in enumerate(workers(2))]
    assert [each.result() for each in pending] == [6.0, 6.0]


def test_a_rank_without_the_token_is_told(workers, free_port):
    url = f"tcp://127.0.0.1:{free_port}"

    def meet(rank: int, credentials: Credentials | None) -> None:
        rendezvous(url, rank=rank, world_size=2, timeout=20, credentials=credentials).close()

    found = rendezvous(url, rank=0, world_size=2, credentials=TOKENS)
    with pytest.raises(RendezvousError, match="cannot join its group.*demands credentials"):
        workers(1)[0].run(meet, 1, None)
    found.close()


def test_paths_may_be_str(tmp_path: Path):
    made = write(tmp_path / "a", make_authority(), "a")
    as_text = Credentials(ca=str(made.ca), certificate=str(made.certificate), key=str(made.key))
    with (
        TCPStore("127.0.0.1", 0, is_master=True, credentials=as_text) as master,
        TCPStore("127.0.0.1", master.port, credentials=made) as client,
    ):
        client.set("key", "value")


def test_a_certificate_of_the_same_ca_for_something_else_is_refused(monkeypatch, tmp_path):
    """A company's CA signs certificates for other programs, too."""
    ca = make_authority()
    with TCPStore("127.0.0.1", 0, is_master=True, credentials=write(tmp_path / "ours", ca, None)) as store:
        monkeypatch.setattr(issuing, "host_names", lambda _worker: ["www.example.org"])
        certificate, key = ca.issue(None, issuing.Validity.days(1))
        credentials = grpc.ssl_channel_credentials(ca_pem(ca), key, certificate)
        name = [("grpc.ssl_target_name_override", SHARED_HOST_NAME)]
        with grpc.secure_channel(f"127.0.0.1:{store.port}", credentials, name) as channel:
            operation = store_pb2.Operation(kind=store_pb2.SET, keys=["x"], values=[b"1"])
            set_x = channel.unary_unary(EXECUTE, store_pb2.Operation.SerializeToString, None)
            with pytest.raises(grpc.RpcError, match="the certificate of the client is not for gradwire.invalid"):
                set_x(operation)
        assert not store.check(["x"])


def test_a_shared_store_is_not_joined_with_other_credentials():
    credentials = Credentials(token=TOKEN)
    store = TCPStore("127.0.0.1", 0, is_master=True, multi_tenant=True)
    with store, pytest.raises(StoreError, match="was made without credentials"):
        TCPStore("127.0.0.1", store.port, is_master=True, multi_tenant=True, credentials=credentials)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"credentials": OTHERS}, "was made with other credentials"),
        ({"host_name": "localhost"}, "was made for the host '127.0.0.1', not 'localhost'"),
        ({"limits": StoreLimits(max_entries=5)}, r"has StoreLimits\(max_entries=4000000,.* not .*max_entries=5,"),
    ],
    ids=["credentials", "host", "limits"],
)
def test_a_shared_store_is_joined_with_the_same_arguments_only(given, problem):
    first: dict[str, Any] = {"host_name": "127.0.0.1", "credentials": Credentials(token=TOKEN)}
    shared = {"is_master": True, "multi_tenant": True}
    with TCPStore(port=0, **first, **shared) as store:
        with pytest.raises(StoreError, match=problem):
            TCPStore(port=store.port, **{**first, **given}, **shared)
        with TCPStore(port=store.port, **first, **shared) as second:
            second.set("key", "value")
        assert store.get("key") == b"value"
