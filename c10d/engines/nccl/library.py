"""What gradwire uses of NCCL, under the names of cupy.cuda.nccl. Tests put other libraries in its place."""

from typing import Protocol, cast

from ....errors import ProcessGroupError, UnsupportedOperationError

__all__ = ["Communicator", "Library", "load", "translated"]


class Communicator(Protocol):
    """One rank of a communicator.

    Tensors are pointers and counts of elements; `datatype` and `op` are numbers (dtypes.py); `stream` is a
    cudaStream_t. The calls put work on the stream and return; inside a group they only note what to do.
    """

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int, /) -> None:  # noqa: N802
        """Every rank's `recvbuf` becomes the reduction of all."""

    def reduce(
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int, /
    ) -> None:
        """The root's `recvbuf` becomes the reduction of all."""

    def broadcast(self, sendbuf: int, recvbuf: int, count: int, datatype: int, root: int, stream: int, /) -> None:
        """Every rank's `recvbuf` becomes the root's `sendbuf`."""

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int, /) -> None:  # noqa: N802
        """`recvbuf` becomes the `count` elements of each rank, one after another."""

    def reduceScatter(  # noqa: N802
        self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int, /
    ) -> None:
        """Rank i's `recvbuf` becomes the reduction of the i-th `recvcount` elements of all."""

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int, /) -> None:
        """To the peer's next `recv` from this rank."""

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int, /) -> None:
        """The peer's next `send` to this rank."""

    def check_async_error(self) -> None:
        """Raises the error, if there was one since."""

    def abort(self) -> None:
        """Ends what is under way, and gives everything back."""

    def destroy(self) -> None:
        """Gives everything back, once what is under way is done."""


class Library(Protocol):
    """NCCL."""

    def get_version(self) -> int:
        """Such as 22703 for 2.27.3."""

    def get_unique_id(self) -> tuple[int, ...]:
        """Names a new communicator; all its ranks must be given it."""

    def NcclCommunicator(self, ndev: int, commId: tuple[int, ...], rank: int, /) -> Communicator:  # noqa: N802, N803
        """Joins a communicator with the current GPU; returns once all ranks have, or at the end of the group."""

    def groupStart(self) -> None:  # noqa: N802
        """From here on, calls of this thread are only noted."""

    def groupEnd(self) -> None:  # noqa: N802
        """Does what was noted, all at once."""


def load() -> Library:
    """NCCL itself.

    Raises:
        UnsupportedOperationError: cupy is not installed, or finds no NCCL.
    """
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise UnsupportedOperationError(
            "nccl", "start", f"it needs cupy, pip install 'gradwire[cuda]' ({error})"
        ) from None
    if not nccl.available:
        raise UnsupportedOperationError(
            "nccl",
            "start",
            "cupy cannot load libnccl.so.2: install the nvidia-nccl wheel for your CUDA, as torch does",
        )
    return cast(Library, nccl)


_UNNAMED = {6: "a process exited or the network failed", 7: "still in progress"}
"""Of NCCL's errors, those whose names cupy lacks: it raises KeyError instead."""


def translated(doing: str, error: Exception) -> ProcessGroupError:
    """What users see of an error of the library."""
    text = str(error)
    if isinstance(error, KeyError) and error.args and error.args[0] in _UNNAMED:
        text = f"error {error.args[0]}: {_UNNAMED[error.args[0]]}"
    return ProcessGroupError(f"NCCL failed in {doing}: {text} (NCCL_DEBUG=WARN prints more)")
