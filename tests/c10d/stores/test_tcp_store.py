"""The server of a TCPStore and its clients."""

import socket
import threading

import pytest
from gradwire.c10d import TCPStore
from gradwire.errors import StoreError
from gradwire.net.user_sockets import SocketDirectory, SocketFile, store_socket_name

from tests.c10d.stores import kinds as stores
from tests.c10d.stores.kinds import call, open_here


@pytest.fixture
def master():
    with TCPStore("127.0.0.1", 0, is_master=True) as store:
        yield store


def test_port_0_chooses_a_free_port(master):
    with TCPStore("127.0.0.1", 0, is_master=True) as other:
        assert len({master.port, other.port, 0}) == 3
        assert other.host == "127.0.0.1"
        other.set("key", "other's")
        assert not master.check(["key"])


def test_a_loopback_name_needs_no_permission(master):
    with TCPStore("localhost", master.port) as client:
        client.set("key", "value")
    assert master.get("key") == b"value"
    with TCPStore("localhost", 0, is_master=True) as named, TCPStore("127.0.0.1", named.port) as client:
        client.set("key", "value")
        assert named.get("key") == b"value"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_port_in_use_is_named(host, master):
    with pytest.raises(StoreError, match=f"cannot listen on {host}:{master.port}: Address already in use"):
        TCPStore(host, master.port, is_master=True)


def test_a_port_can_be_reused_after_its_store_closed(master):
    with TCPStore("127.0.0.1", master.port) as client:
        client.set("key", "value")
    master.close()
    with TCPStore("127.0.0.1", master.port, is_master=True) as again:
        assert again.num_keys() == 0


@pytest.mark.parametrize("is_master", [True, False])
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "2001:db8::1"])
def test_public_addresses_need_insecure(host, is_master):
    with pytest.raises(StoreError, match=f"'{host}' is refused.*no credentials.*insecure=True"):
        TCPStore(host, 29500, is_master=is_master)


def test_insecure_allows_public_addresses():
    with (
        TCPStore("0.0.0.0", 0, is_master=True, insecure=True) as master,
        TCPStore("127.0.0.1", master.port) as client,
    ):
        client.set("key", "value")
        assert master.get("key") == b"value"


def test_an_address_of_another_machine_cannot_be_hosted():
    with pytest.raises(StoreError, match="must be an address of this machine"):
        TCPStore("192.0.2.7", 29500, is_master=True, insecure=True)


def test_an_unknown_host_is_an_error():
    with pytest.raises(StoreError, match=r"'no-such-host\.invalid' cannot be resolved"):
        TCPStore("no-such-host.invalid", 29500)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("", 29500), "host_name is ''"),
        (("127.0.0.1", 0), "port is 0: give 1 to 65535$"),
        (("127.0.0.1", 65536), "port is 65536"),
        (("127.0.0.1", -1, None, True), "port is -1: give 1 to 65535, or 0"),
        (("127.0.0.1", 29500, 0), "world_size is 0"),
    ],
)
def test_bad_arguments_are_refused(arguments, problem):
    with pytest.raises(ValueError, match=problem):
        TCPStore(*arguments)


def test_the_masters_timeout_says_how_many_clients_joined():
    with pytest.raises(
        StoreError, match=r"Timed out after 0\.01 seconds waiting for clients\. 1/3 clients joined\."
    ):
        TCPStore("127.0.0.1", 0, 3, is_master=True, timeout=0.01)


def test_the_master_waits_for_its_workers(free_port, workers):
    a, b, c = workers(3)
    master = a.start(open_here, lambda: TCPStore("127.0.0.1", free_port, 3, is_master=True))
    b.run(open_here, lambda: TCPStore("127.0.0.1", free_port, 3))
    assert not master.done()
    c.run(open_here, lambda: TCPStore("127.0.0.1", free_port, 3))
    master.result()
    assert a.run(call, "num_keys") == 0


def test_a_client_can_start_before_its_master(free_port, workers):
    early, late = workers(2)
    client = early.start(open_here, lambda: TCPStore("127.0.0.1", free_port))
    assert not client.done()
    late.run(open_here, lambda: TCPStore("127.0.0.1", free_port, is_master=True))
    client.result()
    late.run(call, "set", "key", "value")
    assert early.run(call, "get", "key") == b"value"


def test_a_client_without_a_master_times_out(free_port):
    with pytest.raises(StoreError, match=rf"no store answered on 127\.0\.0\.1:{free_port} within 0\.05 s"):
        TCPStore("127.0.0.1", free_port, timeout=0.05)


def test_a_killed_master_fails_its_clients_at_once(free_port, workers):
    victim, client = workers(2)
    victim.run(open_here, lambda: TCPStore("127.0.0.1", free_port, is_master=True))
    client.run(open_here, lambda: TCPStore("127.0.0.1", free_port))

    def say_and_wait() -> None:
        stores.mine.set("waiting", "now")
        stores.mine.get("never")

    pending = client.start(say_and_wait)
    victim.run(call, "get", "waiting")
    victim.kill()
    with pytest.raises(StoreError, match=rf"the store on 127\.0\.0\.1:{free_port} is gone"):
        pending.result()
    with pytest.raises(StoreError, match=rf"the store on 127\.0\.0\.1:{free_port} is gone"):
        client.run(call, "set", "key", "value")


def test_the_socket_of_a_killed_store_hides_none_in_another_directory(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with TCPStore("127.0.0.1", 0, is_master=True) as master, socket.socket(socket.AF_UNIX) as dead:
        tmp_path.chmod(0o700)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        left = SocketFile(SocketDirectory.of_this_user(), store_socket_name(master.port))
        dead.bind(left.bind_path)
        left.restrict()
        with TCPStore("127.0.0.1", master.port, timeout=20) as client:
            client.set("key", "value")
        assert master.get("key") == b"value"


def test_closing_the_master_ends_waits_with_an_error(master, workers):
    (client,) = workers(1)
    port = master.port
    client.run(open_here, lambda: TCPStore("127.0.0.1", port))
    client.run(call, "set", "waiting", "now")
    pending = client.start(call, "get", "never")
    assert not pending.done()
    master.close()
    with pytest.raises(StoreError, match="is gone"):
        pending.result()


def test_large_values_work_and_results_over_the_limit_are_refused(master):
    with TCPStore("127.0.0.1", master.port) as client:
        most = bytes(64 * 1024 * 1024 - 100)
        client.set("a", most)
        assert client.get("a") == most
        client.set("b", b"x" * 100)
        with pytest.raises(StoreError, match="a result of .* exceeds the limit .* ask for fewer keys"):
            client.multi_get(["a", "b"])
        assert client.get("b") == b"x" * 100


def test_waiting_clients_take_no_threads_on_the_master(master, workers):
    port = master.port
    (crowd,) = workers(1)

    def wait_in_threads() -> None:
        clients = [TCPStore("127.0.0.1", port) for _ in range(4)]
        threads = [threading.Thread(target=clients[n % 4].get, args=("go",)) for n in range(40)]
        for thread in threads:
            thread.start()
        clients[0].set("all are waiting", "or about to")
        for thread in threads:
            thread.join()
        for client in clients:
            client.close()

    before = set(threading.enumerate())
    pending = crowd.start(wait_in_threads)
    master.get("all are waiting")
    assert set(threading.enumerate()) <= before  # those of other tests may have ended
    assert not pending.done()
    master.set("go", "now")
    pending.result()


def test_proxies_are_not_used(master, workers):
    port = master.port
    (worker,) = workers(1)

    def through_a_proxy() -> bytes:
        import os

        os.environ["http_proxy"] = os.environ["https_proxy"] = "http://192.0.2.1:3128"
        with TCPStore("127.0.0.1", port, timeout=30) as client:
            return client.compare_set("key", "", "value")

    assert worker.run(through_a_proxy) == b"value"


def test_an_unknown_operation_is_refused(master):
    """A client of a newer version may send one; the store stays usable."""
    from gradwire.proto.v1.store_pb2 import Operation

    with TCPStore("127.0.0.1", master.port) as client:
        for operation in (Operation(kind=99), Operation(kind=3), Operation(kind=1, keys=["a"])):
            with pytest.raises(StoreError, match="store operation"):
                client._run(operation)
        assert client.num_keys() == 0
