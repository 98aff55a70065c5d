"""The functions of NCCL that the engine uses, as cupy.cuda.nccl names them. Tests pass another implementation."""

from typing import Protocol, cast

from ....errors import ProcessGroupError, UnsupportedOperationError

__all__ = ["Communicator", "Library", "load", "translate_error"]

MIN_CUPY = 14
"""The first release of cupy whose ids of communicators are bytes."""


class Communicator(Protocol):
    """One rank of a communicator.

    Tensors are given as device pointers and counts of elements, datatypes and reductions as numbers (dtypes.py),
    and streams as cudaStream_t. Operations are enqueued on the stream, those inside a group at its end.
    """

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int, /) -> None:  # noqa: N802
        """Reduces all ranks' `sendbuf` into every rank's `recvbuf`."""

    def reduce(
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int, /
    ) -> None:
        """Reduces all ranks' `sendbuf` into the root's `recvbuf`."""

    def broadcast(self, sendbuf: int, recvbuf: int, count: int, datatype: int, root: int, stream: int, /) -> None:
        """Copies the root's `sendbuf` to every rank's `recvbuf`."""

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int, /) -> None:  # noqa: N802
        """Concatenates the `count` elements of every rank's `sendbuf` into `recvbuf`."""

    def reduceScatter(  # noqa: N802
        self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int, /
    ) -> None:
        """Reduces the i-th `recvcount` elements of all ranks' `sendbuf` into rank i's `recvbuf`."""

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int, /) -> None:
        """Sends to the peer's next `recv` from this rank."""

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int, /) -> None:
        """Receives the peer's next `send` to this rank."""

    def check_async_error(self) -> None:
        """Raises the asynchronous error of the communicator, if there was one."""

    def abort(self) -> None:
        """Ends operations in flight and releases the communicator."""

    def destroy(self) -> None:
        """Releases the communicator. No operation may be in flight."""


class Library(Protocol):
    """The functions of the module cupy.cuda.nccl."""

    def get_version(self) -> int:
        """Returns the version, such as 22703 for 2.27.3."""

    def get_unique_id(self) -> bytes:
        """Returns an id for a new communicator, which all its ranks must pass to it."""

    def NcclCommunicator(self, ndev: int, commId: bytes, rank: int, /) -> Communicator:  # noqa: N802, N803
        """Joins a communicator of `ndev` ranks with the current GPU.

        Blocks until all ranks have joined; inside a group, the end of the group blocks.
        """

    def groupStart(self) -> None:  # noqa: N802
        """Starts a group: operations that this thread calls are collected."""

    def groupEnd(self) -> None:  # noqa: N802
        """Ends the group: starts all collected operations at once."""


def load() -> Library:
    """Returns cupy.cuda.nccl.

    Raises:
        UnsupportedOperationError: cupy is not installed or too old, or finds no NCCL.
    """
    try:
        import cupy
        from cupy.cuda import nccl
    except ImportError as error:
        raise UnsupportedOperationError(
            "nccl", "start", f"it needs cupy: pip install 'cupy-cuda13x>=14' ({error})"
        ) from None
    if int(cupy.__version__.split(".")[0]) < MIN_CUPY:
        raise UnsupportedOperationError(
            "nccl", "start", f"it needs cupy {MIN_CUPY} or newer, and finds {cupy.__version__}"
        )
    if not nccl.available:
        raise UnsupportedOperationError(
            "nccl",
            "start",
            "cupy cannot load libnccl.so.2: install the nvidia-nccl wheel for your CUDA, as torch does",
        )
    return cast(Library, nccl)


_UNNAMED_ERRORS = {6: "a process exited or the network failed", 7: "still in progress"}
"""Error codes of NCCL whose names cupy lacks; it raises KeyError with the code."""


def translate_error(operation: str, error: Exception) -> ProcessGroupError:
    """Returns the error to raise for an error of NCCL."""
    text = str(error)
    if isinstance(error, KeyError) and error.args and error.args[0] in _UNNAMED_ERRORS:
        text = f"error {error.args[0]}: {_UNNAMED_ERRORS[error.args[0]]}"
    return ProcessGroupError(f"NCCL failed in {operation}: {text} (NCCL_DEBUG=WARN prints more)")
