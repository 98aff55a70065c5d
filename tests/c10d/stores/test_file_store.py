"""The file of a FileStore."""

import errno
import fcntl
import os
import resource
import stat
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from gradwire.c10d import FileStore
from gradwire.errors import QueueEmptyError, StoreError, StoreTimeoutError

from tests.c10d.stores import kinds as stores
from tests.c10d.stores.kinds import call, open_here
from tests.stopped import stopped


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "store"


def test_the_last_user_removes_the_file(path):
    first, second = FileStore(str(path)), FileStore(str(path))
    twin = first.clone()
    first.close()
    first.close()
    twin.close()
    assert path.exists()
    second.close()
    assert not path.exists()


def test_the_file_stays_until_world_size_users_have_closed_it(path):
    with FileStore(str(path), 2) as first:
        first.clone().close()
        first.set("from", "first")
    assert path.exists()
    with FileStore(str(path), 2) as second:
        assert second.get("from") == b"first"
    assert not path.exists()


def test_a_removed_file_is_created_again(path):
    with FileStore(str(path)) as store:
        store.set("key", "old")
    with FileStore(str(path)) as store:
        assert not store.check(["key"])


def test_an_empty_file_is_accepted_and_a_new_one_is_private(path):
    with tempfile.NamedTemporaryFile(delete=False) as empty, FileStore(empty.name) as store:
        store.set("key", "value")
        with FileStore(empty.name) as other:
            assert other.get("key") == b"value"
    assert not os.path.exists(empty.name)
    with FileStore(str(path)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_path_is_absolute(path, monkeypatch):
    monkeypatch.chdir(path.parent)
    with FileStore("store") as store:
        assert store.path == str(path)
        monkeypatch.chdir("/")
    assert not path.exists()


def test_a_file_that_is_no_store_is_refused_and_unchanged(path):
    path.write_text("dear diary")
    with pytest.raises(StoreError, match="is not a gradwire store: remove it, or choose another path"):
        FileStore(str(path))
    assert path.read_text() == "dear diary"


def test_a_path_that_cannot_be_opened_is_an_error(path):
    with pytest.raises(StoreError, match=r"no/such/folder' cannot be opened: No such file"):
        FileStore("/no/such/folder")
    with pytest.raises(StoreError, match="Is a directory"):
        FileStore(str(path.parent))


def test_a_symbolic_link_is_not_followed(path, tmp_path):
    target = tmp_path / "target"
    path.symlink_to(target)
    with pytest.raises(StoreError, match="cannot be opened: it is a symbolic link"):
        FileStore(str(path))
    assert not target.exists()


def test_a_pipe_is_no_store(path):
    os.mkfifo(path)
    with pytest.raises(StoreError, match="is not a regular file"):
        FileStore(str(path))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user")
def test_a_file_of_another_user_is_refused(path):
    path.touch()
    os.chown(path, 65534, 65534)
    with pytest.raises(StoreError, match="belongs to user 65534, and this process to user 0: choose a path"):
        FileStore(str(path))
    assert path.read_bytes() == b""


def test_an_unfinished_record_is_ignored(path):
    """A writer may be killed after any byte."""
    with FileStore(str(path)) as store:
        store.set("before", "1")
        whole = path.read_bytes()
        store.set("torn", "value")
        record = path.read_bytes().removeprefix(whole)
    for cut in range(len(record)):
        path.write_bytes(whole + record[:cut])
        with FileStore(str(path)) as first, FileStore(str(path)) as second:
            assert first.list_keys() == ["before"]
            first.set("after", str(cut))
            assert sorted(second.list_keys()) == ["after", "before"]
            assert second.get("after") == str(cut).encode()


def test_readers_ignore_an_unfinished_record(path):
    with FileStore(str(path)) as store, FileStore(str(path)) as writer:
        with path.open("ab") as file:
            file.write(b"\x40\x00\x00\x00 begun")
        assert not store.check(["key"])
        writer.set("key", "value")
        assert store.get("key") == b"value"


def test_a_half_written_header_is_written_again(path):
    path.write_bytes(b"gradwire st")
    with FileStore(str(path)) as store:
        store.set("key", "value")
        with FileStore(str(path)) as other:
            assert other.get("key") == b"value"


def test_a_last_record_of_zeros_is_unfinished(path):
    """The file system may have made room for it without writing it."""
    with FileStore(str(path)) as store:
        store.set("key", "value")
        intact = path.read_bytes()
    path.write_bytes(intact[:-3] + bytes(3))
    with FileStore(str(path)) as store:
        assert not store.check(["key"])
        store.set("key", "again")
        with FileStore(str(path)) as other:
            assert other.get("key") == b"again"


def test_a_file_that_is_damaged_while_it_is_used_is_not_written_to(path):
    with FileStore(str(path)) as store, FileStore(str(path)) as other:
        store.set("key", "value")
        intact = path.read_bytes()
        damaged = intact[:-4] + b"!" + intact[-3:]
        path.write_bytes(damaged)
        for change in (lambda: other.set("more", "1"), lambda: other.check(["key"]), lambda: other.get("key")):
            with pytest.raises(StoreError, match="damaged at byte"):
                change()
        path.write_bytes(intact[:-9])
        with pytest.raises(StoreError, match="has been cut while this process used it"):
            store.set("more", "1")
        path.write_bytes(intact)
        other.set("more", "1")
        assert store.get("more") == b"1"


def test_a_file_removed_while_it_is_opened_is_created_again(path, monkeypatch):
    """The last user may remove it after a new one has opened, and before that one has locked it."""
    lock, calls = fcntl.flock, []

    def remove_and_lock(file: int, how: int) -> None:
        if not calls:
            path.unlink()
        calls.append(how)
        lock(file, how)

    monkeypatch.setattr("gradwire.c10d.stores.log.fcntl.flock", remove_and_lock)
    with FileStore(str(path)) as store, FileStore(str(path)) as other:
        store.set("key", "value")
        assert other.get("key") == b"value"


def lock(path: str, how: int) -> None:
    """Locks a file until this worker ends, as a store does while it writes or reads."""
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.flock(descriptor, how)


def test_operations_end_in_time_while_a_process_that_is_stopped_has_the_lock(path, workers):
    (holder,) = workers(1)
    store, other = FileStore(str(path), timeout=1), FileStore(str(path), timeout=0)
    store.set("key", "value")
    assert other.get("key") == b"value"
    holder.run(lock, str(path), fcntl.LOCK_EX)
    operations: list[Callable[[], object]] = [
        lambda: store.set("key", "new"),
        lambda: store.compare_set("key", "value", "new"),
        lambda: store.add("count", 1),
        lambda: store.queue_push("queue", "item"),
        lambda: store.barrier("barrier", 1),
        lambda: FileStore(str(path), timeout=1),
        other.close,
    ]
    with stopped(holder), ThreadPoolExecutor(len(operations)) as pool:
        for pending in [pool.submit(each) for each in operations]:
            with pytest.raises(StoreError, match=rf"locked by process {holder.pid} \(python, stopped\): end what"):
                pending.result(60)
        # What needs no lock goes on.
        assert store.get("key") == b"value"
        with pytest.raises(StoreTimeoutError):
            store.wait(["other"], 0.1)
        with pytest.raises(QueueEmptyError):
            store.queue_pop("queue", block=False)
    holder.kill()
    store.set("key", "new")
    store.close()


def test_readers_that_are_stopped_are_named(path, workers):
    readers = workers(5)
    with FileStore(str(path), timeout=1) as store:
        for reader in readers:
            reader.run(lock, str(path), fcntl.LOCK_SH)
        with pytest.raises(StoreError, match=r"it is locked by (process \d+ \(python\), ){4}…: end") as caught:
            store.set("key", "value")
        assert sum(f"process {reader.pid} (" in str(caught.value) for reader in readers) == 4
        assert not store.check(["key"])
        for reader in readers:
            reader.kill()
        store.set("key", "value")


def test_a_full_disk_changes_nothing(path, workers):
    (worker,) = workers(1)

    def overfill() -> tuple[str, list[str]]:
        with FileStore(str(path)) as store:
            store.set("small", "1")
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
            with pytest.raises(StoreError) as caught:
                store.set("large", bytes(100_000))
            store.set("after", "2")
            return str(caught.value), sorted(store.list_keys())

    with FileStore(str(path)) as witness:
        message, keys = worker.run(overfill)
        assert os.strerror(errno.EFBIG) in message
        assert keys == sorted(witness.list_keys()) == ["after", "small"]


def write_forever() -> None:
    for number in range(10**9):
        stores.mine.set(f"key{number % 10}", str(number) * 100)


def test_a_killed_writer_does_not_stop_other_processes(path, workers):
    with FileStore(str(path)) as store:
        for _ in range(5):
            (victim,) = workers(1)
            victim.run(open_here, lambda: FileStore(str(path)))
            victim.start(write_forever)
            store.wait(["key9"])
            victim.kill()
            store.delete_key("key9")
            assert store.add("survived", 1) > 0
            with FileStore(str(path)) as fresh:
                assert sorted(fresh.list_keys()) == sorted(store.list_keys())
    assert path.exists()  # a killed process does not close its store


def test_a_worker_that_exits_closes_the_store(path, workers):
    a, b = workers(2)
    for worker in (a, b):
        worker.run(open_here, lambda: FileStore(str(path)))
    a.run(call, "set", "key", "value")
    a._connection.send_bytes(b"")
    a.process.join()
    assert path.exists()
    assert b.run(call, "get", "key") == b"value"
    b._connection.send_bytes(b"")
    b.process.join()
    assert not path.exists()


def test_a_script_that_does_not_close_its_store_exits_without_errors(path, python):
    script = (
        "from gradwire.c10d import FileStore, PrefixStore, TCPStore\n"
        f"file = PrefixStore('p', FileStore({str(path)!r}))\n"
        "file.set('k', 'v')\n"
        "master = TCPStore('127.0.0.1', 0, is_master=True)\n"
        "client = TCPStore('127.0.0.1', master.port)\n"
        "client.set('k', 'v')\n"
    )
    done = python.run("-c", script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not path.exists()


def test_closing_frees_the_descriptor(path):
    def descriptors() -> int:
        """Counts those of the file: threads of other tests may close theirs."""
        numbers = os.listdir("/proc/self/fd")
        return [os.path.realpath(f"/proc/self/fd/{number}") for number in numbers].count(str(path))

    with FileStore(str(path)) as store, store.clone():
        assert descriptors() == 1
    assert descriptors() == 0
