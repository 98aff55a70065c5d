"""How an agent leaves its group, whoever asks for it, and however often.

An agent is running, then maybe in a graceful shutdown, then ending, then ended. Any thread may begin a graceful
shutdown, and any thread may end it: all that wait for it wait for the end of the agent, and hold no lock.

- For the main thread others do the work: a handler of a signal may interrupt the wait, and raise.
- Another thread of the program ends the agent itself.
- So does a thread of gradwire, such as one that runs a remote function. If it begins a graceful shutdown, it goes
  on at once, as that waits for what the thread does.
- A finalizer in a garbage collection waits for nothing, nor does a handler that has interrupted code of gradwire:
  it may hold a lock. The event loop has a thread do the work.

A graceful shutdown waits until no calls are in flight, so that the worker can leave without losing one.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import final

from ...c10d.debug.call_site import called_at, find_call_site
from ...errors import LossCause, RpcTimeoutError, WorkerLostError
from ..collectives.all_gather import WARN_INTERVAL_S, AllGatherService
from ..contracts.agent import RpcAgent
from ..contracts.worker import SHUT_DOWN, WorkerEnd
from ..execution.executor import Executor
from ..execution.interruptions import Latch, handler_must_not_wait, start_thread
from ..requests.call import CallCounter
from ..requests.server import Server
from .network import Network

__all__ = ["Quiescence", "Shutdown"]

TIMEOUT_MARGIN_S = 1.0
"""Seconds after its timeout within which a graceful shutdown says which workers it has waited for."""

THREAD_PREFIX = "gradwire-"
"""How the names of all threads of gradwire begin."""

log = logging.getLogger(__name__)


@final
class Quiescence:
    """Waits for the calls of one agent, or of all workers of its group, and logs what it waits for."""

    def __init__(
        self,
        agent: RpcAgent,
        calls: CallCounter,
        server: Server,
        all_gathers: AllGatherService,
        unanswered: Callable[[], Mapping[str, int]],
    ) -> None:
        """Args: unanswered: see `Caller.count_unanswered`."""
        self._agent = agent
        self._calls = calls
        self._server = server
        self._all_gathers = all_gathers
        self._unanswered = unanswered

    def wait_everywhere(self, timeout: float, failed: Mapping[int, str]) -> Mapping[int, str]:
        """Waits until no worker has calls in flight and none can begin.

        Every worker waits until it has none, and tells the others which calls were the latest. Two rounds with the
        same calls mean that nothing happened in between. (Mattern's four-counter method, with names for numbers.)

        Args:
            timeout: seconds after which this raises RpcTimeoutError; 0 for none.
            failed: the ids of the workers that are known here to have failed, and why; it may grow meanwhile.

        Returns:
            The same for the workers that are known anywhere to have failed.
        """
        deadline = time.monotonic() + timeout if timeout else None
        before = None
        while True:
            self.wait_here(timeout, deadline)
            left = max(1e-3, deadline - time.monotonic()) if deadline else 0.0
            mine = (self._calls.latest, dict(failed))
            try:
                told = self._all_gathers.all_gather(
                    "shutdown", mine, self._agent.workers(), left, "shutdown", self._log_missing
                )
            except RpcTimeoutError as error:
                raise RpcTimeoutError(error.worker, timeout, "shutdown waits for others to shut down:") from None
            except WorkerLostError:  # they shut down without this worker
                return dict(failed)
            latest = {worker: calls for worker, (calls, _) in told.items()}
            if latest == before:
                return {worker: why for _, known in told.values() for worker, why in known.items()}
            before = latest

    def wait_here(self, timeout: float, deadline: float | None = None) -> None:
        """Waits until no calls are in flight here. Raises RpcTimeoutError after `timeout` seconds; 0 for never.

        The deadline is when these seconds are over, if they have begun already.
        """
        me = self._agent.info.name
        if timeout and deadline is None:
            deadline = time.monotonic() + timeout
        logs_at = time.monotonic() + WARN_INTERVAL_S
        while True:
            now = time.monotonic()
            ends = [logs_at - now, self._server.seconds_left(), deadline and deadline - now]
            if self._calls.wait_for_none(max(0.0, min(each for each in ends if each is not None))):
                return
            self._server.abort_expired()
            now = time.monotonic()
            if deadline and now >= deadline:
                raise RpcTimeoutError(me, timeout, f"shutdown waits for {self._in_flight()} on worker")
            if now >= logs_at:
                log.info("shutdown of worker %s waits for %s", me, self._in_flight())
                logs_at = now + WARN_INTERVAL_S

    def describe(self) -> str:
        """Returns what the agent waits for."""
        return self._in_flight() if self._calls.in_flight else "others to shut down"

    def _in_flight(self) -> str:
        sent = self._unanswered()
        parts = [f"{count} calls to {name!r}" for name, count in sorted(sent.items())]
        if (served := self._calls.in_flight - sum(sent.values())) > 0:
            parts.append(f"{served} calls from others")
        return " and ".join(parts) or "calls that are about to end"

    def _log_missing(self, names: Sequence[str]) -> None:
        log.info("shutdown of worker %s waits for %s to shut down", self._agent.info.name, ", ".join(names))


@final
class _Graceful:
    """A graceful shutdown.

    error: what has kept it from being one; raised by the call that began it.
    """

    def __init__(self, join: Callable[[], None]) -> None:
        self.join = join
        self.call_site = find_call_site()
        self.error: Exception | None = None


@final
class Shutdown:
    """The shutdown of one agent. Safe to use from any thread, handler of a signal, or finalizer."""

    def __init__(
        self,
        name: str,
        close: Callable[[WorkerEnd, bool], None],
        describe: Callable[[], str],
        is_collecting_here: Callable[[], bool],
        network: Network,
        executor: Executor,
    ) -> None:
        """The agent is running.

        Args:
            name: of the worker.
            close: ends the agent, given how the worker ends, and whether all of its calls have ended.
            describe: returns what a graceful shutdown waits for.
            is_collecting_here: returns whether the calling thread runs a finalizer in a garbage collection.
            network: its event loop does what this thread must not.
            executor: its threads take the place of those that cannot be started any more.
        """
        self._name = name
        self._close_agent = close
        self._describe = describe
        self._is_collecting_here = is_collecting_here
        self._network = network
        self._executor = executor
        # Of these the first entry counts. It is made, or taken, in one step, whatever interrupts the thread.
        self._graceful: dict[None, _Graceful] = {}
        self._ends: dict[None, WorkerEnd] = {}
        self._right_to_close = [None]
        self._closer: threading.Thread | None = None
        """The thread that ends the agent, or has ended it."""
        self._threads: list[threading.Thread] = []
        """Those that were started for this shutdown."""
        self._ended = Latch()

    @property
    def is_ending(self) -> bool:
        """Whether the agent ends, or has ended."""
        return bool(self._ends)

    @property
    def has_ended(self) -> bool:
        """Whether the agent has ended."""
        return self._ended.is_set

    def wait_and_end(self, join: Callable[[], None], timeout: float) -> None:
        """Ends the agent when a function has returned, which a thread runs unless it runs another one already.

        Args:
            join: waits until the agent can end. What it raises is raised here.
            timeout: seconds after which the agent ends all the same, with RpcTimeoutError; 0 for never.
        """
        if self._ends:
            self.end(SHUT_DOWN)
            return
        graceful = _Graceful(join)
        if self._must_not_wait() or _is_own_thread():
            self._later(self._begin_apart, graceful, timeout)
            return
        try:
            if not self._begin(graceful):
                self._join()
            limit = timeout + TIMEOUT_MARGIN_S if self._graceful[None] is graceful else timeout
            if not self._wait_for_end(limit if timeout else None):
                raise RpcTimeoutError(self._name, timeout, f"shutdown waits for {self._describe()} on worker")
        except BaseException as error:
            self.end(SHUT_DOWN if isinstance(error, Exception) else WorkerEnd.by_error(error))
            raise
        if graceful.error is not None:
            raise graceful.error

    def end(self, end: WorkerEnd) -> None:
        """Ends the agent now, if nothing ends it already. Waits until it has ended, unless this thread cannot.

        Args:
            end: how the worker ends, if nobody has said so before.
        """
        self._ends.setdefault(None, end)
        if self.has_ended:
            return
        if self._must_not_wait():
            self._later(self._close_apart)
        elif _is_own_thread():
            self._close()  # and no longer: whoever ends the agent waits for its threads
        else:
            if threading.current_thread() is not threading.main_thread() or not self._start(self._close):
                self._close()
            self._wait_for_end(None)

    def end_at_exit(self, end: WorkerEnd) -> None:
        """Ends the agent because the process ends; unless that is by an error, a graceful shutdown goes on."""
        if not self._graceful or self._ends or end.cause is not LossCause.EXIT:
            self.end(end)
            return
        try:
            self._wait_for_end(None)
        except BaseException as error:
            self.end(WorkerEnd.by_error(error))
            raise

    def _must_not_wait(self) -> bool:
        """Returns whether this thread is the loop, or runs what has interrupted code that may hold a lock."""
        if self._is_collecting_here() or self._network.is_loop_here:
            return True
        return threading.current_thread() is threading.main_thread() and handler_must_not_wait()

    def _wait_for_end(self, seconds: float | None) -> bool:
        """Waits until the agent has ended, at most `seconds`; returns whether it has."""
        if self._closer is threading.current_thread():  # a callback calls this, while this thread ends the agent
            return True
        has_ended = self._ended.wait(seconds)
        if has_ended and self._closer in self._threads:
            self._closer.join()  # so that it keeps nothing alive
        return has_ended

    def _begin(self, graceful: _Graceful) -> bool:
        """Begins a graceful shutdown, unless one has begun; returns False if there is no thread for it."""
        return self._graceful.setdefault(None, graceful) is not graceful or self._start(self._join)

    def _join(self) -> None:
        graceful = self._graceful[None]
        try:
            with called_at(graceful.call_site):
                graceful.join()
        except Exception as error:
            if not self._ends:  # else it has failed because the agent ends
                graceful.error = error
        self._ends.setdefault(None, SHUT_DOWN)
        self._close(in_order=graceful.error is None)

    def _close(self, *, in_order: bool = False) -> None:
        """Ends the agent, unless a thread has begun to."""
        try:
            self._right_to_close.pop()
        except IndexError:
            return
        self._closer = threading.current_thread()
        try:
            self._close_agent(self._ends[None], in_order)
        finally:
            self._ended.set()

    def _start(self, function: Callable[[], None]) -> bool:
        """Runs a function on a thread of its own; returns False if there can be no more threads."""
        name = f"{THREAD_PREFIX}shutdown-{self._name}"
        thread = threading.Thread(target=function, name=name, daemon=True)
        self._threads.append(thread)
        return start_thread(thread)

    def _later(self, function: Callable[..., None], *args: object) -> None:
        """Calls a function on the event loop. That takes no lock, and does nothing when the agent has ended."""
        with contextlib.suppress(RuntimeError):
            self._network.call_soon(function, *args)

    # On the event loop.

    def _begin_apart(self, graceful: _Graceful, timeout: float) -> None:
        if not self._begin(graceful):
            self._executor.submit_urgent(self._join)
        if timeout:
            asyncio.get_running_loop().call_later(timeout, self.end, SHUT_DOWN)

    def _close_apart(self) -> None:
        if not self._start(self._close):
            self._executor.submit_urgent(self._close)


def _is_own_thread() -> bool:
    """Returns whether the calling thread is one of gradwire's."""
    return threading.current_thread().name.startswith(THREAD_PREFIX)
