"""Reads the values of messages: with Python's unpickler, or as the policy for their sender says."""

import pickle
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, final

import torch

from ...errors import PolicyError, SerializationError
from ...net.security import Audit
from ..contracts.messages import Buffer, Incoming
from ..contracts.options import BY_VALUE, SEND_CODE
from ..contracts.policy import Policy
from ..contracts.worker import WorkerInfo
from ..execution.futures import printable_text
from ..wire.unpickling import unpickle
from .message_names import MALFORMED, MessageNames, RefusedValueError, is_method_exposed, show
from .plain_pickle import read_plain_pickle

__all__ = ["PickleReader", "RestrictedReader", "make_reader"]


@final
class PickleReader:
    """Accepts anything."""

    refused: Mapping[str, int] = {}

    def __init__(self, me: WorkerInfo) -> None:
        """Makes the reader of one worker."""
        self._me = me

    def read(self, message: Incoming) -> Any:
        """Returns the value of a message: see `RestrictedReader.read`."""
        try:
            if not message.tensors and not message.references:
                return pickle.loads(message.body)
            return unpickle(message.body, message.tensors, message.references)
        except (AttributeError, ImportError) as error:
            raise _not_found(error, self._me) from error

    def load(self, source: WorkerInfo, data: Buffer | bytearray) -> Any:  # noqa: ARG002
        """Returns the value of a pickle without tensors."""
        return pickle.loads(data)


@final
class RestrictedReader:
    """Accepts what the policy for the sender of a message says. Safe to use from any thread."""

    def __init__(self, me: WorkerInfo, policy: Policy, audit: Audit) -> None:
        """Makes the reader of one worker, whose messages to itself may have anything."""
        self._audit = audit
        self._me = me
        self._policy = policy
        self._lock = threading.Lock()
        self._refused: Counter[str] = Counter()

    @property
    def refused(self) -> Mapping[str, int]:
        """How many messages were refused, by the name of their sender."""
        with self._lock:
            return dict(self._refused)

    def read(self, message: Incoming) -> Any:
        """Returns the value of a message.

        Raises:
            PolicyError: the policy does not accept it; nothing of it has run.
            SerializationError: this worker has not got what it names.
            Exception: whatever unpickling the value raises.
        """
        try:
            return self._read(message.source, message.body, message.tensors, message.references)
        except (AttributeError, ImportError) as error:
            raise _not_found(error, self._me) from error

    def load(self, source: WorkerInfo, data: Buffer | bytearray) -> Any:
        """Returns the value of a pickle without tensors. Raises as `read` does."""
        return self._read(source, memoryview(data), (), ())

    def _read(
        self,
        source: WorkerInfo,
        data: Buffer,
        tensors: Sequence[torch.Tensor],
        references: Sequence[Any],
    ) -> Any:
        policy = self._policy.of(source.name)
        if policy.accepts == "anything" or source.wire_id == self._me.wire_id:
            return unpickle(data, tensors, references)
        names = MessageNames(policy, partial(self._check_method, policy, source), tensors, references)
        try:
            return read_plain_pickle(data, names, policy.max_depth, policy.max_operations)
        except RefusedValueError as refusal:
            name, problem = refusal.name, str(refusal)
        except PolicyError:
            raise
        except Exception as error:
            if names.has_run:  # it may be the error of an exposed class
                raise
            name, problem = "", f"{MALFORMED}: {type(error).__name__}: {show(str(error))}"
        raise self._refusal(source, name, problem)

    def _check_method(self, policy: Policy, source: WorkerInfo, value: object, name: str) -> None:
        """Raises PolicyError if a worker may not call this method, or read this attribute, of a value."""
        if is_method_exposed(policy, value, name):
            return
        full = f"{type(value).__module__}.{type(value).__qualname__}.{name}"
        raise self._refusal(
            source,
            full,
            f"it uses {show(full)}, which is not exposed: decorate the method or its class with rpc.expose, or "
            "list it in `exposed` of the rpc.Policy in this worker's RpcBackendOptions",
        )

    def _refusal(self, source: WorkerInfo, name: str, problem: str) -> PolicyError:
        """Counts and records a message that is refused; returns the error to raise.

        `name` is that of the function, class or method that is refused, if it is one.
        """
        name = show(name)[1:-1]
        with self._lock:
            self._refused[source.name] += 1
        self._audit.deny("policy", problem, worker=source.name)
        return PolicyError(self._me.name, source.name, name, problem)


def _not_found(error: AttributeError | ImportError, me: WorkerInfo) -> SerializationError:
    """Returns the error for a message that names what a worker has not got."""
    if isinstance(error, ImportError) and (error.name or "").partition(".")[0] == BY_VALUE:
        return SerializationError(
            "the message",
            f"it has a function or class by value, and worker {me.name!r} has no cloudpickle: "
            "pip install cloudpickle there, too",
        )
    return SerializationError(
        "the message",
        f"worker {me.name!r} cannot find what it names: {type(error).__name__}: {printable_text(error)}. "
        "RPC pickler does not serialize functions and classes, it names them: define them at the top level of a "
        "module that both workers can import (the program's __main__ and the cells of a notebook are none), or "
        f"{SEND_CODE}",
    )


def make_reader(me: WorkerInfo, policy: Policy, audit: Audit | None = None) -> PickleReader | RestrictedReader:
    """Returns what reads the messages of one worker. By default it records in a log of its own what is refused."""
    return RestrictedReader(me, policy, audit or Audit(me.name)) if policy.restricts else PickleReader(me)
