"""What other workers ask of this one."""

import concurrent.futures
import contextlib
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

from ...errors import AnswerFailedError, RpcCancelledError, SendFailedError, WorkerLostError
from ...proto.v1 import agent_pb2
from ..channels.router import PayloadReader
from ..contracts.messages import Deferred, Handler, Incoming, MessageType, Outgoing
from ..contracts.worker import WorkerInfo
from ..wire.failures import encode_failure
from .cancellation import CancellableRequests
from .codec import Codec
from .stats import CallCounter

if TYPE_CHECKING:
    from ..execution.executor import Executor

__all__ = ["Server"]

log = logging.getLogger(__name__)


@final
class Server:
    """Runs the handlers of requests, and answers. Everything happens on the executor's threads."""

    def __init__(
        self,
        me: WorkerInfo,
        codec: Codec,
        handlers: Mapping[MessageType.ValueType, Handler],
        executor: "Executor",
        activity: CallCounter,
    ) -> None:
        """Args: who serves; what sends; what requests do; whose threads; what counts users' calls."""
        self.arrivals = CancellableRequests()
        self.running = CallCounter()
        """Requests that a thread is busy with."""
        self.deferred = CallCounter()
        """Requests that are to be answered later."""
        self._me = me
        self._codec = codec
        self._handlers = handlers
        self._executor = executor
        self._activity = activity

    def on_announced(self, source: WorkerInfo, envelope: agent_pb2.Envelope) -> None:
        """A request is here, but for its payloads. Called on the loop."""
        handler = self._handlers.get(envelope.type)
        if handler is not None and handler.cancellable:
            self.arrivals.add(source, envelope)

    def serve(self, source: WorkerInfo, envelope: agent_pb2.Envelope, arrived: PayloadReader) -> None:
        """Does what a request asks for."""
        handler = self._handlers.get(envelope.type)
        if handler is None:
            self.refuse(source, envelope, ValueError(f"message type {envelope.type} has no handler here"))
            return
        if handler.cancellable and not self.arrivals.begin(source, envelope):
            cancelled = RpcCancelledError(self._me.name)
            self._codec.tell_unreadable(source, envelope, cancelled)
            self._answer_error(source, envelope, cancelled)  # so that its caller knows that it is over
            return
        if handler.user_values:
            self._activity.begin()
            self.running.begin()
        message = None
        deferred = False
        try:
            message = self._codec.read(source, envelope, arrived, users=handler.user_values)
            self._await_ready(message, handler)
            with self._codec.scopes(message):
                try:
                    message.value = self._codec.unpack(message)
                    result = handler.run(message)
                    if isinstance(result, Deferred):
                        deferred = True
                        self.deferred.begin()
                        result.future.add_done_callback(self._answer_later(message))
                        return
                    self._answer(message, result)
                except BaseException as error:
                    message.error = error
                    self._answer_error(source, envelope, error)
        except BaseException as error:
            self._answer_error(source, envelope, error)
        finally:
            if message is not None:
                message.error = None  # its traceback leads back to this frame
            if handler.user_values:
                self.running.end()
                if not deferred:
                    self._activity.end()

    def refuse(self, source: WorkerInfo, envelope: agent_pb2.Envelope, error: Exception) -> None:
        """A request cannot be read: its sender gets the error."""
        self.arrivals.forget(source, envelope)
        self._answer_error(source, envelope, error)

    def _await_ready(self, message: Incoming, handler: Handler) -> None:
        for extension in self._codec.extensions if handler.user_values else []:
            if (ready := extension.wait_before_run(message)) is not None:
                self._executor.wait(ready)

    def _answer(self, request: Incoming, value: object) -> None:
        if not request.envelope.id:
            return
        envelope = agent_pb2.Envelope(id=request.envelope.id, type=MessageType.RESULT)
        packed = self._codec.pack(value, "the result", request.source, request)
        try:
            self._codec.send(request.source, request.envelope.type, envelope, packed, request)
        except WorkerLostError:
            pass  # a caller that is gone needs no answer
        except SendFailedError as error:
            raise AnswerFailedError(self._me.name, error.reason) from None

    def _answer_later(self, request: Incoming) -> Any:
        def done(future: "concurrent.futures.Future[Any]") -> None:
            self._executor.submit(answer, future)

        def answer(future: "concurrent.futures.Future[Any]") -> None:
            try:
                # Not raised here: every raise would add a frame to an error that is kept.
                if (error := future.exception()) is not None:
                    self._answer_error(request.source, request.envelope, error)
                else:
                    self._answer(request, future.result())
            except BaseException as error:
                self._answer_error(request.source, request.envelope, error)
            finally:
                self.deferred.end()
                if self._handlers[request.envelope.type].user_values:
                    self._activity.end()

        return done

    def _answer_error(self, source: WorkerInfo, request: agent_pb2.Envelope, error: BaseException) -> None:
        if not request.id:
            log.error("a message from worker %s failed", source.name, exc_info=error)
            return
        envelope = agent_pb2.Envelope(id=request.id, type=MessageType.ERROR)
        with contextlib.suppress(WorkerLostError, SendFailedError):
            self._codec.send_bare(Outgoing(source, envelope, [], [], None), encode_failure(error))
