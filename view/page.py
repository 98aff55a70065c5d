"""Serves the page of the job from one worker, as long as its agent is there."""

from typing import final

from ..rpc.contracts.agent import RpcAgent
from ..rpc.contracts.extension import Extension
from .server import PageServer, start_page
from .statistics import view_of

__all__ = ["Page"]


@final
class Page(Extension):
    """The page of the job, if the options of the agent want it. It has no hooks on messages."""

    def __init__(self, agent: RpcAgent) -> None:
        super().__init__(agent)
        view = view_of(agent)
        self.server: PageServer | None = None
        """Serves the page; None if this worker does not."""
        if view is not None and view.address is not None:
            self.server = start_page(agent, view)

    def close(self) -> None:
        """Stops to serve the page."""
        if self.server is not None:
            self.server.close()
