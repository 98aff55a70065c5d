"""Unix sockets that only processes of this user can connect to.

They are in one directory per user, of mode 0700: `gradwire` in XDG_RUNTIME_DIR, else /tmp/gradwire-UID, else
`.gradwire` in the home directory, if somebody else has made the one in /tmp. The kernel lets nobody else connect
to what is in there; root gets in anywhere. The directory is opened, then checked, and its sockets are reached by
its descriptor: nobody can exchange it afterwards, even where /tmp lacks the sticky bit.

Workers choose names for their sockets that nobody else has. That of a store is known from its port, which only one
store of the user can have in a network.
"""

import errno
import fcntl
import os
import pwd
import re
import secrets
import socket
import stat
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final, final

from .socket_owners import users_listening

__all__ = [
    "UNIX_SCHEME",
    "SocketDirectory",
    "SocketFile",
    "UnsafePathError",
    "is_listening",
    "is_socket_path",
    "link_file_name",
    "store_socket_name",
]

UNIX_SCHEME: Final = "unix:"
"""What the address of a unix socket begins with, in front of its path."""

MIN_SWEPT_AGE_S: Final = 60.0
"""Seconds after which a socket that refuses connections is removed. A younger one may be about to listen."""

LOCK_TIMEOUT_S: Final = 5.0
LOCK_PAUSE_S: Final = 0.002
"""Seconds for which the directory's lock is waited for, and between two tries: flock() has no timeout."""

MAX_SWEPT: Final = 256
"""Files that one process looks at when it sweeps."""

SECRET_BYTES: Final = 32

_SECRET_NAME: Final = "secret"
_TEMPORARY: Final = "/tmp"
_BY_DESCRIPTOR: Final = "/proc/self/fd/"
_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NAME: Final = re.compile(r"(\d{1,10})-[0-9a-f]{16}\.sock|store-\d{1,20}-\d{1,5}\.sock", re.ASCII)
"""Names of sockets: the process id, and what makes them unique; or the network and the port of a store."""

_LINK_NAME: Final = re.compile(r"view-\d{1,20}-(\d{1,5})\.link", re.ASCII)
"""Names of the files with links to the pages of workers: the network and the port of the page."""


class UnsafePathError(OSError):
    """A directory or a socket is not one that only this user can use. The text says why, and what to do."""


@final
class SocketDirectory:
    """The directory for the sockets of this user. It is closed when nothing refers to this object any more."""

    def __init__(self, path: str, *, make: bool = True) -> None:
        """Opens a directory; makes it, in one that exists, if it is missing and may be made.

        Raises:
            UnsafePathError: others than this user can use it, or it is no directory.
            OSError: it cannot be made or opened.
        """
        if make:
            with suppress(FileExistsError):
                os.mkdir(path, stat.S_IRWXU)
        _check_kind(path, os.lstat(path), stat.S_IFDIR)
        self.path = path
        """Where it is, for messages, and in the addresses that other processes are told."""
        self._descriptor = os.open(path, _FLAGS)
        # Not at exit, where workers still say goodbye.
        weakref.finalize(self, os.close, self._descriptor).atexit = False
        status = self._check()
        self.by_descriptor = f"{_BY_DESCRIPTOR}{self._descriptor}"
        """The path by which this process reaches it. A socket's path may have 107 bytes; this one is short."""
        if not os.path.exists(self.by_descriptor):
            raise UnsafePathError("there is no /proc, by which sockets are reached")
        self.identity = f"{path} of user {os.geteuid()} (device {status.st_dev}, inode {status.st_ino})"
        """Equal for two processes of one kernel if and only if they have the same directory."""

    @classmethod
    def of_this_user(cls) -> "SocketDirectory":
        """Opens the directory of this user, or makes it.

        Raises:
            UnsafePathError: there is none that only this user can use, and none can be made.
        """
        runtime = os.environ.get("XDG_RUNTIME_DIR", "")
        if os.path.isabs(runtime):
            with suppress(OSError):
                _check_only_for_this_user(runtime, os.lstat(runtime), stat.S_IFDIR)
                return cls(f"{runtime}/gradwire")
        temporary = f"{_TEMPORARY}/gradwire-{os.geteuid()}"
        try:
            if (home := _home_directory()) and _is_of_another_user(temporary):
                return cls(home)
            return cls(temporary)
        except OSError as error:
            raise UnsafePathError(
                f"{error}. Workers of one host need a directory for their sockets that nobody else can use: set "
                "XDG_RUNTIME_DIR, on all of them, to a directory of yours with mode 0700"
            ) from error

    @classmethod
    def all_of_this_user(cls) -> "Iterator[SocketDirectory]":
        """Opens the directories that processes of this user may have, with whatever XDG_RUNTIME_DIR."""
        user = os.geteuid()
        paths = [
            f"{os.environ.get('XDG_RUNTIME_DIR', '')}/gradwire",
            f"/run/user/{user}/gradwire",
            f"{_TEMPORARY}/gradwire-{user}",
            _home_directory(),
        ]
        for path in dict.fromkeys(paths):
            if os.path.isabs(path):
                with suppress(OSError):
                    yield cls(path, make=False)

    def reach(self, path: str) -> str:
        """Checks a socket that somebody has named; returns the path by which to connect to it.

        Raises:
            UnsafePathError: the path is not in this directory, or what is there is no socket that only this user
                can use.
            FileNotFoundError: there is nothing.
        """
        directory, _, name = path.rpartition("/")
        if directory != self.path or not _NAME.fullmatch(name):
            raise UnsafePathError(f"{path!r} is not a worker's socket in {self.path}")
        self._check()
        status = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        _check_only_for_this_user(path, status, stat.S_IFSOCK)
        return f"{self.by_descriptor}/{name}"

    def sweep(self) -> None:
        """Removes sockets and links that killed processes have left: those on which nobody listens."""
        for name in os.listdir(self._descriptor)[:MAX_SWEPT]:
            if (link := _LINK_NAME.fullmatch(name)) and name == link_file_name(int(link[1])):
                self._remove_if_dead(name, MIN_SWEPT_AGE_S, int(link[1]))
            named = _NAME.fullmatch(name)
            if named and not (named[1] and os.path.exists(f"/proc/{named[1]}")):
                self._remove_if_dead(name, MIN_SWEPT_AGE_S)

    def secret(self) -> str:
        """Returns what only processes of this user on this host know: random, and the same in all of them."""
        path = f"{self.by_descriptor}/{_SECRET_NAME}"
        with self.lock():
            file = os.open(
                path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, stat.S_IRUSR | stat.S_IWUSR
            )
            with os.fdopen(file, "r+") as opened:
                found = opened.read()
                if len(found) != 2 * SECRET_BYTES:  # it is new, or its maker was killed here
                    found = secrets.token_hex(SECRET_BYTES)
                    opened.seek(0)
                    opened.truncate()
                    opened.write(found)
                return found

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Context manager in which no other process claims a name.

        Raises:
            TimeoutError: a process that does so does not get on with it, since it is stopped.
        """
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TimeoutError(errno.ETIMEDOUT, "a stopped process has it locked", self.path) from None
                time.sleep(LOCK_PAUSE_S)
        try:
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def remove_if_dead(self, path: str) -> None:
        """Removes the socket at which a worker has listened, if nobody listens there any more. Never waits."""
        directory, _, name = path.rpartition("/")
        if directory == self.path and _NAME.fullmatch(name):
            self._remove_if_dead(name, 0.0)

    def _remove_if_dead(self, name: str, min_age_s: float, port: int | None = None) -> None:
        """Removes a socket, or with a port the link to the page there, if nobody listens any more."""
        with suppress(OSError):
            status = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
            if time.time() - status.st_mtime < min_age_s:
                return
            if port is None:
                is_dead = stat.S_ISSOCK(status.st_mode) and not is_listening(f"{self.by_descriptor}/{name}")
            else:
                is_dead = os.geteuid() not in users_listening(port)
            if is_dead:
                os.unlink(name, dir_fd=self._descriptor)

    def _check(self) -> os.stat_result:
        status = os.fstat(self._descriptor)
        _check_only_for_this_user(self.path, status, stat.S_IFDIR)
        return status


@final
class SocketFile:
    """The file of a listening socket, which is there from when the socket is bound until `remove`."""

    def __init__(self, directory: SocketDirectory, name: str = "") -> None:
        """Makes nothing yet.

        Args:
            directory: where the socket is to be.
            name: of the socket, if others know it; by default one that no other socket has.
        """
        name = name or f"{os.getpid()}-{secrets.token_hex(8)}.sock"
        self._directory = directory
        self.path = f"{directory.path}/{name}"
        """Where others find the socket: see `SocketDirectory.reach`."""
        self.bind_path = f"{directory.by_descriptor}/{name}"
        """Where the socket is to be bound."""
        self._made: tuple[int, int] | None = None
        """Inode and time of the file, if another socket may get its name; else None."""

    def restrict(self) -> None:
        """Lets only this user use the socket, which has just been bound."""
        os.chmod(self.bind_path, stat.S_IRWXU)

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Context manager in which this process binds a socket with a name that others know, and listens.

        Raises:
            FileExistsError: another process listens on a socket with this name.
            TimeoutError: a process that is stopped has the directory locked.
        """
        with self._directory.lock():
            if os.path.lexists(self.bind_path):
                if is_listening(self.bind_path):
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.path)
                os.unlink(self.bind_path)  # of a process that was killed
            yield
            self.restrict()
            self._made = self._identify()

    def remove(self) -> None:
        """Removes the file, if it is there, and is still this one."""
        with suppress(FileNotFoundError, TimeoutError):  # what stays is swept
            if self._made is None:
                os.unlink(self.bind_path)
                return
            with self._directory.lock():
                if self._made == self._identify():
                    os.unlink(self.bind_path)

    def _identify(self) -> tuple[int, int]:
        """Returns inode and time of the file; another file may get the inode of one that has been removed."""
        status = os.stat(self.bind_path)
        return status.st_ino, status.st_mtime_ns


def is_listening(path: str) -> bool:
    """Returns whether a process listens on a unix socket.

    Raises:
        OSError: that cannot be found out.
    """
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(0)  # with a listener whose queue is full, too
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return False
        except BlockingIOError:
            return True
    return True


def store_socket_name(port: int) -> str:
    """Returns the name of the socket of the store that has a port in the network of this process."""
    return f"store-{_network()}-{port}.sock"


def link_file_name(port: int) -> str:
    """Returns the name of the file with the link to the page that has a port in the network of this process."""
    return f"view-{_network()}-{port}.link"


def _network() -> int:
    return os.stat("/proc/self/ns/net").st_ino


def _home_directory() -> str:
    """Returns the path of the directory for sockets in this user's home directory; empty without a home."""
    with suppress(KeyError):
        home = pwd.getpwuid(os.geteuid()).pw_dir
        if os.path.isdir(home):
            return f"{home}/.gradwire"
    return ""


def _is_of_another_user(path: str) -> bool:
    """Returns whether somebody else has put something at a path."""
    with suppress(FileNotFoundError):
        return os.lstat(path).st_uid != os.geteuid()
    return False


def is_socket_path(path: str) -> bool:
    """Returns whether a path, as the kernel tells it, is that of a socket in the directory of some user."""
    directory, _, name = path.rpartition("/")
    is_there = directory.startswith(_BY_DESCRIPTOR) or directory.rpartition("/")[2].lstrip(".").startswith(
        "gradwire"
    )
    return is_there and _NAME.fullmatch(name) is not None


def _check_kind(path: str, status: os.stat_result, kind: int) -> None:
    if stat.S_IFMT(status.st_mode) != kind:
        what = "directory" if kind == stat.S_IFDIR else "socket"
        raise UnsafePathError(f"{path} is no {what}{' but a link' * stat.S_ISLNK(status.st_mode)}")


def _check_only_for_this_user(path: str, status: os.stat_result, kind: int) -> None:
    """Raises UnsafePathError if what is at a path is not of this kind, or others than this user can use it."""
    _check_kind(path, status, kind)
    if status.st_uid != os.geteuid():
        raise UnsafePathError(f"{path} belongs to user {status.st_uid}, not to {os.geteuid()}")
    if stat.S_IMODE(status.st_mode) & 0o777 != stat.S_IRWXU:
        raise UnsafePathError(f"{path} has mode {stat.S_IMODE(status.st_mode):04o}, not 0700")
