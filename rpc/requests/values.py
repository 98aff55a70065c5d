"""The values of messages as bytes, and back; and the errors that keep them from that."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, final

from ...errors import LimitReachedError, RemoteError, SerializationError
from ...net.security import Audit
from ..channels.base import PayloadLostError
from ..contracts.devices import DeviceMap
from ..contracts.messages import Buffer
from ..contracts.options import RpcBackendOptions
from ..contracts.worker import WorkerInfo
from ..policy.value_readers import make_reader
from ..wire.failures import decode_failure, encode_failure
from ..wire.pickling import Packed, Packer, dumps
from ..wire.tensors import UnmappedDeviceError

__all__ = ["Values"]


@final
class Values:
    """Pickles and unpickles for one agent. Safe to use from any thread."""

    def __init__(self, me: WorkerInfo, options: RpcBackendOptions, packer: Packer, audit: Audit) -> None:
        """Makes what pickles for one agent. The policy of the options says what is unpickled."""
        self.me = me
        self._options = options
        self.packer = packer
        self._audit = audit
        self._reader = make_reader(me, options.policy, audit)
        self.unpack = self._reader.read
        """Returns the value of a message: see `RestrictedReader.read`."""
        self._dumps = partial(dumps, packer.pickler)

    def pack(
        self,
        value: object,
        label: str | Sequence[str],
        worker: WorkerInfo,
        device_map: DeviceMap,
        *,
        is_answer: bool = False,
    ) -> Packed:
        """Pickles a value for a worker. Raises SerializationError."""
        try:
            return self.packer.pack(value, label, device_map)
        except SerializationError as error:
            raise self.explained(error, worker, is_answer=is_answer) from error.__cause__

    def explained(
        self, error: SerializationError, worker: WorkerInfo, *, is_answer: bool = False
    ) -> SerializationError:
        """Returns an error that also says how to map the device of a tensor, if that is the problem."""
        if not isinstance(unmapped := error.__cause__, UnmappedDeviceError):
            return error
        options = type(self._options)
        if is_answer:
            how = (
                f"Response device mapping is not available for a tensor on {unmapped.device}: return "
                f"tensor.cpu(), or have worker {worker.name!r}, which asks for it, call `set_device_map` for "
                f"{self.me.name!r} on its `{options.__name__}` before init_rpc"
            )
        else:
            how = (
                f"it is a tensor on {unmapped.device}. {options.backend_name} RPC backend only supports CPU "
                "tensors by default: send tensor.cpu(), or call `set_device_map` on "
                f"`{options.__name__}` before init_rpc"
            )
        return SerializationError(error.path, how)

    # Pickles without tensors or references apart: of control messages and errors.

    def dumps(self, value: object) -> bytes:
        """Returns a pickle of a value with all that is in it."""
        return self._dumps(value)

    def load(self, source: WorkerInfo, data: Buffer) -> Any:
        """Returns the value of a pickle of a worker. Raises PolicyError, or what unpickling raises."""
        return self._reader.load(source, data)

    def encode_failure(self, error: BaseException) -> bytes:
        """Returns an exception as bytes, pickled if that can be. Never raises."""
        return encode_failure(error, self._dumps)

    def decode_failure(self, worker: WorkerInfo, failure: Buffer) -> Exception:
        """Returns the exception that a worker has encoded by `encode_failure`, or its text."""
        return decode_failure(failure, worker.name, partial(self._reader.load, worker))

    # What is refused.

    def record_refusal(self, source: WorkerInfo, error: BaseException) -> None:
        """Records in the audit log why a message of a worker is refused: it is malformed, or exceeds a limit.

        Errors of other kinds are ignored.
        """
        if isinstance(error, LimitReachedError):
            if not isinstance(error.__cause__, RemoteError):  # else it is a limit of another worker
                self._audit.limit("messages", error.limit, error, worker=source.name)
        elif isinstance(error, ValueError) and not isinstance(error, PayloadLostError):
            self._audit.deny("messages", error, worker=source.name)

    @property
    def refused(self) -> Mapping[str, int]:
        """How many messages the policy has refused, by the name of their sender."""
        return self._reader.refused
