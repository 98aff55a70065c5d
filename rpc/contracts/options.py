"""The options of `init_rpc`; `policy` is in policy.py."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from typing import Any, ClassVar, Literal, final

from ...errors import RpcError
from ...net.addresses import ListenSettings, parse_ports
from ...net.security import Credentials
from .devices import Device, checked_device_map, checked_device_maps, checked_devices
from .policy import Policy, check_counts

__all__ = [
    "BY_NAME",
    "BY_VALUE",
    "DEFAULT_INIT_METHOD",
    "DEFAULT_RPC_TIMEOUT",
    "INSTALL_VIEW",
    "MAX_ATTACHED_BYTES",
    "MAX_BULK_CONNECTIONS",
    "SEND_CODE",
    "BroadcastOptions",
    "ChannelOptions",
    "CudaOptions",
    "FlowControlOptions",
    "Liveness",
    "RpcBackendOptions",
    "View",
    "check_rpc_timeout",
    "otel_from_environment",
]

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

MAX_ATTACHED_BYTES = 16 << 20
"""Bytes that one envelope may have behind it."""

MAX_BULK_CONNECTIONS = 16
"""Connections by which one worker may send large payloads to another."""

TRANSPORTS = ("unix", "tcp", "grpc")
"""What may carry messages."""

DEFAULT_RPC_TIMEOUT = 60.0
"""Seconds."""

DEFAULT_INIT_METHOD = "env://"

BY_NAME = "pickle"
"""Functions and classes travel as their names."""

BY_VALUE = "cloudpickle"
"""Functions and classes that the other worker cannot import by name travel with their code."""

PICKLERS = (BY_NAME, BY_VALUE)

SEND_CODE = f'send code with RpcBackendOptions(pickler="{BY_VALUE}")'
"""What errors advise for functions and classes that the other worker cannot import."""

OTEL_VARIABLE = "GRADWIRE_OTEL"

DEFAULT_BUSY_POLL = 0.001
MAX_BUSY_POLL = 0.01
"""Seconds."""

DEFAULT_SUSPECT_AFTER = 5.0
"""Seconds."""

SUSPECT_AFTER_VARIABLE = "GRADWIRE_SUSPECT_AFTER"

VIEW_VARIABLE = "GRADWIRE_VIEW"

INSTALL_VIEW = "pip install prometheus-client rich starlette uvicorn"
"""The command that installs what the page of a job and `gradwire top` need."""

DEFAULT_HOST = "127.0.0.1"

MAX_NAMES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelOptions:
    """Where the bytes of bodies and tensors travel.

    inline_threshold: bytes below which a payload travels inside its envelope.
    max_inline_bytes: bytes of payloads that one envelope carries inside at most; the rest is sent apart from it.
    max_attached_bytes: bytes of larger payloads that follow one envelope on the same connection, at most, between
        hosts or where there is no shared memory; the rest is sent apart from it. 16 MiB at most.
    chunk_bytes: bytes of one chunk of a larger payload that goes by gRPC, because there are no bulk connections.
    bulk_connections: TCP connections, from 1 to 16, by which this worker sends what is beyond max_attached_bytes
        to each worker of another host. They carry parts of one payload at the same time.
    max_payload_bytes: bytes of the largest payload a worker accepts from another; nothing larger is allocated, but
        for what follows an envelope: 16 MiB at most.
    max_cached_bytes: bytes of memory of received tensors that this worker keeps for further ones when the tensors
        are gone, as long as it receives large payloads from other hosts.
    shared_memory_threshold: bytes from which a payload for a worker of this host, to which there is a unix socket,
        goes through shared memory. (A few tensors of up to 64 KiB are part of the body.)
    max_shared_bytes: bytes of shared memory that this worker makes at most, for all other workers together; beyond
        that, payloads travel as between hosts.
    max_mapped_bytes: bytes of shared memory that this worker accepts from one other worker.
    """

    inline_threshold: int = 128 * KIB
    max_inline_bytes: int = MIB
    max_attached_bytes: int = MIB
    chunk_bytes: int = MIB
    bulk_connections: int = 2
    max_payload_bytes: int = 16 * GIB
    max_cached_bytes: int = 256 * MIB
    shared_memory_threshold: int = 48 * KIB
    max_shared_bytes: int = 4 * GIB
    max_mapped_bytes: int = 16 * GIB

    def __post_init__(self) -> None:
        check_counts(self, *(option.name for option in fields(self)))
        if self.bulk_connections > MAX_BULK_CONNECTIONS:
            raise ValueError(
                f"bulk_connections is {self.bulk_connections}: give a number from 1 to {MAX_BULK_CONNECTIONS}"
            )
        if self.max_attached_bytes > MAX_ATTACHED_BYTES:
            raise ValueError(
                f"max_attached_bytes is {self.max_attached_bytes}: give at most {MAX_ATTACHED_BYTES}, as other "
                "messages wait for these bytes"
            )
        if self.max_inline_bytes > 32 * MIB or self.chunk_bytes > 32 * MIB:
            raise ValueError("max_inline_bytes and chunk_bytes can be 32 MiB at most: gRPC frames hold no more")


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaOptions:
    """How tensors on CUDA devices travel.

    ipc: False to have all of them go by way of the host. By default, tensors for workers of this host, to which
        there is a unix socket, go by device memory that the other worker maps (CUDA IPC), where that is possible.
    ipc_threshold: bytes of a message's tensors on one device from which they go that way.
    max_ipc_bytes: device memory that this worker allocates for that at most, for all other workers together;
        beyond that, tensors go by way of the host.
    max_pinned_bytes: page-locked memory of the host that copies from and to devices use at a time; beyond that,
        they use ordinary memory.
    """

    ipc: bool = True
    ipc_threshold: int = 64 * KIB
    max_ipc_bytes: int = GIB
    max_pinned_bytes: int = GIB

    def __post_init__(self) -> None:
        _check_flags(self, "ipc")
        check_counts(self, "ipc_threshold", "max_ipc_bytes", "max_pinned_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastOptions:
    """When `broadcast_call` sends large tensors to all workers at once.

    Workers of this host share memory; those of other hosts receive by a process group, in static groups.

    enabled: False to send them to each worker by itself.
    threshold: bytes from which a tensor counts as large.
    max_groups: process groups that this worker keeps, one for each set of receivers; beyond that, the least
        recently used is closed.
    """

    enabled: bool = True
    threshold: int = 1 << 20
    max_groups: int = 8

    def __post_init__(self) -> None:
        _check_flags(self, "enabled")
        check_counts(self, "threshold", "max_groups")


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowControlOptions:
    """How much may wait for a slow or stopped worker: on the workers that call it, and on itself.

    A call is in flight from when it is sent, or queued to be sent, until its answer arrives. One that times out or
    is cancelled stays in flight until then, as it still waits to be sent or to run. A call counts as the bytes of
    its arguments, and as 1 KiB at least. A call to a worker to which no other is in flight is always sent, however
    large; for calls that remote functions make, only others of their depth of nesting count for this rule.

    max_in_flight: calls to one worker that may be in flight.
    max_in_flight_bytes: their bytes.
    max_total_in_flight: calls to all workers together that may be in flight.
    max_total_in_flight_bytes: their bytes.
    max_received: requests of one worker that may have arrived and not run yet; beyond that, nothing more is read
        from the connection to that worker until half of them have begun to run.
    max_received_bytes: their bytes.
    max_unsent_bytes: bytes that may be queued to be sent to one worker, answers above all; beyond that, no further
        calls of this worker begin to run until half of them are sent, and its streams pause.
    max_total_unsent_bytes: the same for all workers together; a worker for which nothing is queued is left out.
    when_full: what a call does that would be one too many: "wait" until there is capacity, for as long as the
        timeout of the call, or "raise" SendQueueFullError.
    """

    max_in_flight: int = 1 << 16
    max_in_flight_bytes: int = 4 * GIB
    max_total_in_flight: int = 1 << 18
    max_total_in_flight_bytes: int = 16 * GIB
    max_received: int = 1 << 16
    max_received_bytes: int = 4 * GIB
    max_unsent_bytes: int = 4 * GIB
    max_total_unsent_bytes: int = 16 * GIB
    when_full: Literal["wait", "raise"] = "wait"

    def __post_init__(self) -> None:
        check_counts(self, *(option.name for option in fields(self) if option.name != "when_full"))
        for name, total in (
            ("max_in_flight", "max_total_in_flight"),
            ("max_in_flight_bytes", "max_total_in_flight_bytes"),
            ("max_unsent_bytes", "max_total_unsent_bytes"),
        ):
            if getattr(self, name) > getattr(self, total):
                raise ValueError(
                    f"{name} is {getattr(self, name)}, more than {total}={getattr(self, total)}: raise that too"
                )
        if self.when_full not in ("wait", "raise"):
            raise ValueError(f"when_full is {self.when_full!r}: give 'wait' or 'raise'")


def _default_suspect_after() -> float:
    text = os.environ.get(SUSPECT_AFTER_VARIABLE, "")
    if not text:
        return DEFAULT_SUSPECT_AFTER
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{SUSPECT_AFTER_VARIABLE} is {text!r}: give seconds") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """When another worker counts as suspect, and what happens then.

    A worker becomes suspect when the connection to it breaks without a goodbye, or nothing comes from it although
    it sends heartbeats. Calls to it fail with WorkerSuspectError then. References and contexts that it has are
    kept, and it is dialled again. A worker whose process is known to be gone is lost at once.

    heartbeat: seconds for which a connection carries nothing, before this worker sends a heartbeat. Twice in that
        time, it also counts up what workers of its host read in place of heartbeats.
    suspect_after: seconds without anything from the other worker, at least twice its `heartbeat`, after which it
        is suspect. Also the longest that a round trip may take. By default 5, or what GRADWIRE_SUSPECT_AFTER in
        the environment says.
    lease: seconds for which a worker is suspect, before it is lost. A worker whose program holds the interpreter,
        while its process runs, is suspect after as many seconds more.
    when_suspect: what a call to a suspect worker does: "fail" at once, without having been sent, or "wait" until
        the worker is back, for as long as the timeout of the call. Calls that have been sent before fail in any
        case, because they may have run.
    """

    heartbeat: float = 1.0
    suspect_after: float = field(default_factory=_default_suspect_after)
    lease: float = 60.0
    when_suspect: Literal["fail", "wait"] = "fail"

    def __post_init__(self) -> None:
        for name in ("heartbeat", "suspect_after", "lease"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 < value < math.inf:
                raise ValueError(f"{name} is {value!r}: give seconds, more than 0")
        if self.suspect_after < 2 * self.heartbeat:
            raise ValueError(
                f"suspect_after is {self.suspect_after}: give at least twice heartbeat={self.heartbeat}, as one "
                "heartbeat may be late"
            )
        if self.when_suspect not in ("fail", "wait"):
            raise ValueError(f"when_suspect is {self.when_suspect!r}: give 'fail' or 'wait'")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a worker records and serves so that people can see what it does: see docs/view.md.

    statistics: whether calls are counted and timed, by function and worker. It takes about half a microsecond
        of a call on each side. A thread reads the counts once a second, for the last minute.
    max_names: functions and workers that are counted by themselves; further ones are counted together, as "other".
    address: "[host:]port" at which this worker serves the page of the job, by default for this host only; port 0
        is any free one, which is logged. None for no page. It needs the extra `view`: see docs/view.md.
    may_be_taken: whether this worker goes without its page if another process has the port.
    """

    statistics: bool = True
    max_names: int = 256
    address: str | None = None
    may_be_taken: bool = False

    def __post_init__(self) -> None:
        _check_flags(self, "statistics", "may_be_taken")
        count = self.max_names
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_NAMES:
            raise ValueError(f"max_names is {count!r}: give a whole number from 1 to {MAX_NAMES}")
        if self.address is not None:
            self.host_and_port()

    def host_and_port(self) -> tuple[str, int]:
        """Returns where the page is served. Raises ValueError if `address` is no such place."""
        host, _, port = (self.address or "").rpartition(":")
        host = host.removeprefix("[").removesuffix("]") or DEFAULT_HOST
        if not port.isascii() or not port.isdecimal() or int(port) > 65535:
            raise ValueError(f"the address of the view is {self.address!r}: give a port, or host:port")
        return host, int(port)

    @staticmethod
    def from_environment(environment: Mapping[str, str] = os.environ) -> "View | None":
        """Returns the view that GRADWIRE_VIEW asks for, an address as in the option; None if it is not set.

        All workers of a host may have the same one: the first that takes the port serves the page.

        Raises:
            ValueError: it is no address.
        """
        address = environment.get(VIEW_VARIABLE, "")
        return View(address=address, may_be_taken=True) if address else None


@dataclass(slots=True, kw_only=True)
class RpcBackendOptions:
    """The options of `init_rpc`. They can be changed until it is called, and are checked whenever they are set.

    rpc_timeout: seconds after which a call without a timeout of its own fails; 0 is never.
    init_method: the URL of the rendezvous: env://, tcp://host:port or file:///path.
    init_timeout: seconds to wait for all workers to join.
    num_worker_threads: threads that run incoming calls at a time. Threads that wait for other calls do
        not count, so nested calls cannot use them up. So many threads stay until shutdown once they have started;
        what a function ties to its thread, other than child processes, may end with any further thread.
    host: a name or address of this machine, to listen on and to be reached at; a wildcard ("0.0.0.0", "::")
        listens on all addresses and advertises one of them. None, the default, is a unix socket of this user; with
        credentials or `insecure`, and among workers that share none, it is the address at which the others reach
        this one. GRADWIRE_HOST in the environment says it for a program.
    advertised_host: the name or address by which the others reach this worker, if it is none of this machine, as
        behind NAT. Else GRADWIRE_ADVERTISED_HOST says it.
    ports: the TCP ports on which this worker may listen: 29600, "29600" or "29600-29609"; it uses two of them, and
        one if `transports` are ("grpc",). By default those in GRADWIRE_PORTS, or any.
    credentials: with them, connections are encrypted, and only workers of the job are let in, from any host.
        By default those in the environment (see Credentials.from_environment). All workers need them, or none.
    insecure: allow workers on several hosts or of several users, and addresses that others can reach, without
        credentials: anybody who reaches a worker can run code in it. All workers must agree.
    transports: what may carry the messages between two workers, in order of preference: "unix" sockets between
        workers of one host, "tcp" sockets, and "grpc", which is always there. ("grpc",) needs one port, if any.
    channels: how the bytes of bodies and tensors travel.
    cuda: how tensors on CUDA devices travel.
    broadcasts: when tensors for several workers are sent to all of them at once.
    flow_control: how much may be in flight, and received and not run yet.
    liveness: when another worker counts as suspect or lost, and what calls to it do.
    policy: what this worker accepts from other workers. By default anything, so that they can run any code here.
    pickler: how this worker pickles: "pickle", or "cloudpickle", which sends code of what cannot be imported.
    view: what this worker records and serves about itself; by default what GRADWIRE_VIEW says, or nothing.
    otel: whether calls are traced with OpenTelemetry: see docs/tracing.md; by default what GRADWIRE_OTEL says.
    busy_poll: seconds for which a thread that waits for an answer, or that has just served a call, looks at the
        socket again and again before it sleeps, because it takes longer to wake up; 0 is never. A thread stops
        doing so while it is in vain, and yields the processor (`sched_yield`) between two looks.
    device_maps: by the name of a called worker: from this worker's CUDA devices to that worker's, for the tensors
        of a call. Results come back the opposite way.
    devices: this worker's CUDA devices that take part in calls. By default those in `device_maps`.
    """

    CONSENT: ClassVar[str] = "pass rpc_backend_options=rpc.RpcBackendOptions(insecure=True) to init_rpc"
    """How users allow addresses that other machines can reach; part of error messages."""

    backend_name: ClassVar[str] = "gradwire's"
    """The name of the backend in error messages."""

    rpc_timeout: float = DEFAULT_RPC_TIMEOUT
    init_method: str = DEFAULT_INIT_METHOD
    init_timeout: float = 300.0
    num_worker_threads: int = 16
    host: str | None = None
    advertised_host: str | None = None
    ports: Any = None
    insecure: bool = False
    credentials: Credentials | None = None
    transports: Sequence[str] = TRANSPORTS
    channels: ChannelOptions = field(default_factory=ChannelOptions)
    cuda: CudaOptions = field(default_factory=CudaOptions)
    broadcasts: BroadcastOptions = field(default_factory=BroadcastOptions)
    flow_control: FlowControlOptions = field(default_factory=FlowControlOptions)
    liveness: Liveness = field(default_factory=Liveness)
    policy: Policy = field(default_factory=Policy)
    pickler: str = BY_NAME
    view: View | None = None
    otel: bool | None = None
    busy_poll: float = DEFAULT_BUSY_POLL
    device_maps: Mapping[str, Mapping[Device, Device]] = field(default_factory=dict)
    devices: Sequence[Device] = ()

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, _CHECKS[name](name, value) if name in _CHECKS else value)

    def set_device_map(self, to: str, device_map: Mapping[Device, Device]) -> None:
        """Adds to the device map for calls to a worker.

        Args:
            to: the worker's name.
            device_map: from this worker's devices to the other worker's, one to one.

        Raises:
            ValueError: the map has two devices for one, or contradicts what was set before.
        """
        added = checked_device_map(device_map)
        before = self.device_maps.get(to, {})
        for device, target in added.items():
            if before.get(device, target) != target:
                raise ValueError(
                    "`set_device_map` only supports 1-to-1 mapping, trying to map "
                    f"{device} to {target} and {before[device]}"
                )
        self.device_maps = {**self.device_maps, to: {**before, **added}}

    def find_credentials(self) -> Credentials | None:
        """Returns `credentials`, or else those in the environment; None if there are none."""
        return self.credentials if self.credentials is not None else Credentials.from_environment()

    def find_listening(self) -> ListenSettings:
        """Returns where this worker listens: what the options say, or else the environment."""
        found = ListenSettings.from_environment()
        given = {name: getattr(self, name) for name in ("host", "advertised_host", "ports")}
        return replace(found, **{name: value for name, value in given.items() if value is not None})

    def set_devices(self, devices: Sequence[Device]) -> None:
        """Sets this worker's CUDA devices that take part in calls. Raises ValueError if one is no CUDA device."""
        self.devices = devices


def otel_from_environment(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether GRADWIRE_OTEL is 1. Raises ValueError if it is neither that nor 0."""
    text = environment.get(OTEL_VARIABLE, "")
    if text not in {"", "0", "1"}:
        raise ValueError(f"{OTEL_VARIABLE} is {text!r}: give 1 or 0")
    return text == "1"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_flags(options: object, *flags: str) -> None:
    for name in flags:
        _check_flag(name, getattr(options, name))


# Checks of one option by its name. They return its value as it is kept, or raise ValueError or TypeError.


def _check_flag(name: str, value: Any) -> Any:
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}: give True or False")
    return value


def _check_kind(name: str, value: Any) -> Any:
    if not isinstance(value, _KINDS[name]):
        raise TypeError(f"{name} is {value!r}: give a {_KINDS[name].__name__}")
    return value


def check_rpc_timeout(name: str, value: Any) -> float:
    """Returns a default timeout of calls in seconds. Raises ValueError if it is not one."""
    if not _is_number(value) or not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value!r}: give seconds, or 0 for no timeout")
    return float(value)


def _check_init_timeout(name: str, value: Any) -> Any:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} is {value!r}: give seconds, more than 0")
    return value


def _check_busy_poll(name: str, value: Any) -> float:
    if not _is_number(value) or not 0 <= value <= MAX_BUSY_POLL:
        raise ValueError(f"{name} is {value!r}: give seconds, from 0 for never to {MAX_BUSY_POLL}")
    return float(value)


def _check_host(name: str, value: Any) -> Any:
    if value is not None and not (isinstance(value, str) and value):
        of_this = " of this machine" if name == "host" else ""
        raise ValueError(f"{name} is {value!r}: give a name or address{of_this}, or None")
    return value.removeprefix("[").removesuffix("]") if value else value  # as IPv6 addresses stand in URLs


def _check_credentials(name: str, value: Any) -> Any:
    if value is not None and not isinstance(value, Credentials):
        raise TypeError(f"{name} is of type {type(value).__name__}: give a gradwire.c10d.Credentials, or None")
    return value


def _check_transports(name: str, value: Any) -> Any:
    names = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else None
    if names is None or "grpc" not in names or not set(names) <= set(TRANSPORTS):
        raise ValueError(f"{name} is {value!r}: give some of {TRANSPORTS}, and 'grpc' in any case")
    return names


def _check_pickler(name: str, value: Any) -> str:
    """Raises RpcError if the pickler is not installed."""
    if value not in PICKLERS:
        raise ValueError(f"{name} is {value!r}: give one of {PICKLERS}")
    if value == BY_VALUE:
        try:
            import_module(BY_VALUE)
        except ImportError as error:
            raise RpcError(f"{name}={value!r} needs cloudpickle: pip install cloudpickle ({error})") from error
    return str(value)


def _check_otel(name: str, value: Any) -> Any:
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}: give True or False, or None for what {OTEL_VARIABLE} says")
    return value


def _check_threads(name: str, value: Any) -> Any:
    if value < 1:
        raise ValueError(f"{name} is {value!r}: at least 1 is needed")
    return value


_KINDS = {
    "channels": ChannelOptions,
    "cuda": CudaOptions,
    "broadcasts": BroadcastOptions,
    "flow_control": FlowControlOptions,
    "liveness": Liveness,
    "policy": Policy,
    "view": View,
}
"""The options that are instances of a class."""

_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(_KINDS, _check_kind),
    "rpc_timeout": check_rpc_timeout,
    "init_timeout": _check_init_timeout,
    "host": _check_host,
    "advertised_host": _check_host,
    "ports": lambda name, value: value if value is None else parse_ports(value, name),
    "insecure": _check_flag,
    "credentials": _check_credentials,
    "num_worker_threads": _check_threads,
    "transports": _check_transports,
    "pickler": _check_pickler,
    "view": lambda name, value: value if value is None else _check_kind(name, value),
    "otel": _check_otel,
    "busy_poll": _check_busy_poll,
    "device_maps": lambda _, value: checked_device_maps(value),
    "devices": lambda _, value: checked_devices(value),
}
