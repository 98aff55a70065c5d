"""Lists the extensions that every agent has by default."""

from collections.abc import Sequence

from .autograd.extension import Autograd
from .nn.remote_module import ModuleReducers
from .rpc.calls.handler import Calls
from .rpc.calls.streams import Streams
from .rpc.contracts.extension import ExtensionFactory
from .rpc.profiling.extension import Profiling
from .rref.forks import References
from .tracing.group_profile import GroupProfile
from .tracing.open_telemetry import open_telemetry
from .view.overview import Viewing
from .view.page import Page
from .view.statistics import CallStatistics

__all__ = ["DEFAULT_EXTENSIONS"]

DEFAULT_EXTENSIONS: Sequence[ExtensionFactory] = (
    Profiling,
    Calls,
    Streams,
    References,
    Autograd,
    ModuleReducers,
    Viewing,
    Page,
    GroupProfile,
    open_telemetry,  # after those whose handlers it traces
    CallStatistics,  # the last: it measures the handlers of the others
)
"""The extensions, in the order in which their hooks run."""
