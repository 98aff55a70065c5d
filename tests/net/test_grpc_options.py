"""gRPC ignores options that it does not know, so a wrong name shows up only when the option is needed."""

from pathlib import Path

import pytest
from gradwire.c10d.stores import remote as store_client
from gradwire.c10d.stores import server as store_server
from gradwire.c10d.stores.limits import StoreLimits
from gradwire.rpc.transports import grpc_endpoint
from grpc._cython import cygrpc

OPTIONS = {
    name
    for options in (
        grpc_endpoint.client_options(1.0),
        grpc_endpoint.server_options(1.0, 5.0),
        store_client._CLIENT_OPTIONS,
        store_server.server_options(StoreLimits(), "localhost"),
    )
    for name, _ in options
}


@pytest.fixture(scope="module")
def library() -> bytes:
    return Path(cygrpc.__file__).read_bytes()


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_grpc_knows_the_option(library, name):
    assert f"{name}\0".encode() in library
