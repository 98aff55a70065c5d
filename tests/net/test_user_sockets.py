"""Sockets that only this user's processes can connect to: where they are, what is checked, what is swept."""

import os
import shutil
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from gradwire.net import user_sockets
from gradwire.net.user_sockets import (
    SocketDirectory,
    SocketFile,
    UnsafePathError,
    is_listening,
    link_file_name,
    store_socket_name,
)

NOBODY = 65534

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make files of another user")


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of this user that is XDG_RUNTIME_DIR."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in place of /tmp, without XDG_RUNTIME_DIR."""
    tmp_path.chmod(0o1777)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(user_sockets, "_TEMPORARY", str(tmp_path))
    return tmp_path


def own_directory(temporary: Path) -> Path:
    return temporary / f"gradwire-{os.geteuid()}"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as made:
        yield made


def listen(file: SocketFile, listener: socket.socket) -> None:
    listener.bind(file.bind_path)
    listener.listen()
    file.restrict()


def test_the_directory_is_in_xdg_runtime_dir(runtime):
    directory = SocketDirectory.of_this_user()
    assert directory.path == f"{runtime}/gradwire"
    assert stat.S_IMODE(os.stat(directory.path).st_mode) == 0o700
    assert SocketDirectory.of_this_user().identity == directory.identity


@pytest.mark.parametrize("flaw", ["not set", "missing", "open", "a link", "relative"])
def test_an_unusable_xdg_runtime_dir_is_not_used(temporary, monkeypatch, flaw):
    where = temporary / "runtime"
    if flaw == "a link":
        (temporary / "target").mkdir(mode=0o700)
        where.symlink_to(temporary / "target")
    elif flaw != "missing":
        where.mkdir(mode=0o700)
    if flaw == "open":
        where.chmod(0o755)
    value = os.path.relpath(where) if flaw == "relative" else str(where)
    if flaw != "not set":
        monkeypatch.setenv("XDG_RUNTIME_DIR", value)
    assert SocketDirectory.of_this_user().path == str(own_directory(temporary))


@pytest.mark.parametrize(
    ("flaw", "text"),
    [
        ("open", "has mode 0755, not 0700"),
        ("a link", "is no directory but a link"),
        ("a file", "is no directory"),
        ("missing", "No such file or directory"),
        pytest.param("another owner", "belongs to user 65534, not to 0", marks=as_root),
    ],
)
def test_a_directory_that_others_can_use_is_refused(temporary, monkeypatch, flaw, text):
    own = own_directory(temporary)
    if flaw in ("open", "another owner"):
        own.mkdir()
        own.chmod(0o755 if flaw == "open" else 0o700)
    if flaw == "another owner":
        os.chown(own, NOBODY, NOBODY)
    if flaw == "a link":
        (temporary / "target").mkdir(mode=0o700)
        own.symlink_to(temporary / "target")
    if flaw == "a file":
        own.touch(mode=0o700)
    if flaw == "missing":
        monkeypatch.setattr(user_sockets, "_TEMPORARY", f"{temporary}/none")
    monkeypatch.setattr(user_sockets, "_home_directory", lambda: "")
    with pytest.raises(UnsafePathError, match=f"{text}.*set XDG_RUNTIME_DIR"):
        SocketDirectory.of_this_user()


@as_root
def test_a_directory_that_another_user_has_made_first_does_not_keep_anybody_from_starting(
    temporary, monkeypatch, listener
):
    own = own_directory(temporary)
    own.mkdir(mode=0o700)
    os.chown(own, NOBODY, NOBODY)
    monkeypatch.setattr(user_sockets, "_home_directory", lambda: f"{temporary}/home")
    directory = SocketDirectory.of_this_user()
    assert directory.path == f"{temporary}/home"
    listen(SocketFile(directory), listener)
    assert [each.path for each in SocketDirectory.all_of_this_user()] == [directory.path]


def test_two_stores_do_not_get_one_name(runtime, listener):
    directory = SocketDirectory.of_this_user()
    first, second = (SocketFile(directory, store_socket_name(29500)) for _ in range(2))
    with first.claim():
        listen(first, listener)
    with socket.socket(socket.AF_UNIX) as other:
        with pytest.raises(FileExistsError), second.claim():
            pass
        listener.close()  # as if its process had been killed
        with second.claim():
            listen(second, other)
        first.remove()
        assert is_listening(directory.reach(second.path))
        second.remove()
    assert os.listdir(directory.path) == []


def test_paths_may_be_long(runtime, monkeypatch, listener):
    long = runtime / ("x" * 200)
    long.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    directory = SocketDirectory.of_this_user()
    file = SocketFile(directory)
    listen(file, listener)
    assert is_listening(directory.reach(file.path))
    assert file.path.startswith(str(long))


def test_a_directory_that_is_exchanged_afterwards_is_not_used(temporary, listener):
    """Anybody can do that where /tmp has no sticky bit, as in a volume of Kubernetes."""
    temporary.chmod(0o777)
    own = own_directory(temporary)
    directory = SocketDirectory.of_this_user()
    file = SocketFile(directory)
    listen(file, listener)
    own.rename(temporary / "elsewhere")
    other = SocketDirectory.of_this_user()
    assert (other.path, other.identity == directory.identity) == (directory.path, False)
    with socket.socket(socket.AF_UNIX) as foreign:
        foreign.bind(f"{other.by_descriptor}/{os.path.basename(file.path)}")  # and does not listen
        assert os.path.exists(file.path)
        assert is_listening(directory.reach(file.path))


def test_the_directory_is_closed_when_it_is_not_used_any_more(runtime):
    directory = SocketDirectory.of_this_user()
    path, descriptor = directory.path, directory.by_descriptor
    assert os.path.samefile(path, descriptor)
    del directory
    assert os.path.realpath(descriptor) != os.path.realpath(path)  # another thread may have got its number


def test_a_socket_of_this_user_passes(runtime, listener):
    directory = SocketDirectory.of_this_user()
    file = SocketFile(directory)
    with pytest.raises(FileNotFoundError):
        directory.reach(file.path)
    listen(file, listener)
    directory.reach(file.path)
    file.remove()
    file.remove()
    assert not os.listdir(directory.path)


@pytest.mark.parametrize(
    ("flaw", "text"),
    [
        ("elsewhere", "is not a worker's socket in"),
        ("another name", "is not a worker's socket in"),
        ("dots", "is not a worker's socket in"),
        ("a file", "is no socket"),
        ("a link", "is no socket but a link"),
        ("open", "has mode 0777, not 0700"),
        ("open directory", "has mode 0750, not 0700"),
        pytest.param("another owner", "belongs to user 65534", marks=as_root),
        pytest.param("directory of another", "belongs to user 65534", marks=as_root),
    ],
)
def test_what_is_no_socket_of_this_user_is_not_connected_to(runtime, listener, flaw, text):
    directory = SocketDirectory.of_this_user()
    file = SocketFile(directory)
    path = file.path
    listen(file, listener)
    if flaw == "elsewhere":
        path = str(shutil.move(path, runtime))
    if flaw == "another name":
        path = str(shutil.move(path, f"{directory.path}/other.sock"))
    if flaw == "dots":
        path = f"{directory.path}/../gradwire/{os.path.basename(path)}"
    if flaw == "a file":
        file.remove()
        Path(path).touch(mode=0o700)
    if flaw == "a link":
        os.symlink(shutil.move(path, runtime), path)
    if flaw == "open":
        os.chmod(path, 0o777)
    if flaw == "open directory":
        os.chmod(directory.path, 0o750)
    if flaw == "another owner":
        os.chown(path, NOBODY, NOBODY)
    if flaw == "directory of another":
        os.chown(directory.path, NOBODY, NOBODY)
    with pytest.raises(UnsafePathError, match=text):
        directory.reach(path)


def test_sockets_that_killed_processes_left_are_swept(runtime):
    directory = SocketDirectory.of_this_user()
    notes, alive, recent, old = (
        f"{directory.by_descriptor}/{name}"
        for name in ("notes.txt", *(f"419499{number}-0123456789abcdef.sock" for number in range(3)))
    )
    of_this_process = SocketFile(directory).bind_path
    Path(notes).touch()
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as not_listening_yet:
        listener.bind(alive)  # of a process that is not seen here, as in another container
        listener.listen()
        not_listening_yet.bind(of_this_process)
        for path in (recent, old):
            with socket.socket(socket.AF_UNIX) as dead:
                dead.bind(path)
        past = os.stat(old).st_mtime - 61
        for path in (notes, alive, old, of_this_process):
            os.utime(path, (past, past))
        directory.sweep()
        assert set(os.listdir(directory.path)) == {
            os.path.basename(path) for path in (notes, alive, recent, of_this_process)
        }


def test_links_to_pages_of_killed_processes_are_swept(runtime):
    directory = SocketDirectory.of_this_user()
    with socket.create_server(("127.0.0.1", 0)) as page, socket.socket() as gone:
        gone.bind(("127.0.0.1", 0))  # and does not listen
        of_page, of_gone = (link_file_name(each.getsockname()[1]) for each in (page, gone))
        for name in (of_page, of_gone):
            Path(directory.path, name).touch()
        directory.sweep()
        assert set(os.listdir(directory.path)) == {of_page, of_gone}  # a page may be about to listen
        past = os.stat(f"{directory.path}/{of_gone}").st_mtime - 61
        for name in (of_page, of_gone):
            os.utime(f"{directory.path}/{name}", (past, past))
        directory.sweep()
    assert os.listdir(directory.path) == [of_page]


def test_a_directory_that_a_stopped_process_has_locked_keeps_nobody_waiting(runtime, listener, monkeypatch):
    monkeypatch.setattr(user_sockets, "LOCK_TIMEOUT_S", 0.05)
    directory = SocketDirectory.of_this_user()
    usual, named = SocketFile(directory), SocketFile(directory, "store-1-1.sock")
    listen(usual, listener)
    with socket.socket(socket.AF_UNIX) as other:
        with named.claim():
            listen(named, other)
        with SocketDirectory.of_this_user().lock():
            usual.remove()  # whose name nobody else can have
            named.remove()
            with pytest.raises(TimeoutError, match="a stopped process has it locked"), named.claim():
                pass
    assert os.listdir(directory.path) == ["store-1-1.sock"]
    named.remove()
    assert os.listdir(directory.path) == []
