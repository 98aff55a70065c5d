"""Addresses of the agents that tests start in their own process."""

from gradwire.net.user_sockets import SocketDirectory
from gradwire.rpc.membership.addresses import ListenAddress


def address_here() -> ListenAddress:
    """Returns an address that only processes of this user reach."""
    return ListenAddress(SocketDirectory.of_this_user())
