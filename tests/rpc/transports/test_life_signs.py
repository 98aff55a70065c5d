"""What the kernel tells of peers that have said nothing."""

import asyncio
import os
import socket

from gradwire.rpc.transports.liveness import ReceivedTimes


def test_the_descriptors_are_looked_at_once_for_all_peers_that_are_silent(monkeypatch):
    looks = []
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: looks.append(path) or listdir(path))

    async def check() -> None:
        received = ReceivedTimes(asyncio.get_running_loop())
        with socket.create_server(("127.0.0.1", 0)) as listener:
            host, port = listener.getsockname()
            assert not received.has_received(f"{host}:{port}", 1000.0)
            with socket.create_connection((host, port)) as connection, listener.accept()[0] as accepted:
                connection.settimeout(0)
                accepted.send(b"x")
                assert not received.has_received(f"{host}:{port}", 1000.0)
                assert len(looks) == 1
                await asyncio.sleep(0)
                assert received.has_received(f"{host}:{port}", 1000.0)
                assert received.has_received(f"[::ffff:{host}]:{port}", 1000.0)
                assert not received.has_received(f"{host}:{port}", 0.0)
                assert not received.has_received(f"127.0.0.2:{port}", 1000.0)
                assert len(looks) == 2

    asyncio.run(check())
