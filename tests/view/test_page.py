"""The page: what it answers, whom it admits, and how it ends."""

import contextlib
import json
import os
import re
import socket
import ssl
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from gradwire import c10d, rpc
from gradwire.errors import RpcError
from gradwire.rpc.contracts.agent import current_agent
from gradwire.view import access, app
from gradwire.view.app import MAX_CONNECTIONS, MAX_REQUEST_BYTES
from gradwire.view.page import Page
from prometheus_client.parser import text_string_to_metric_families

from tests.remote_functions import add, wait_until

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 30.0
TOKEN = "5f0c9a1be27d4386a1f4c7d29b0e8653"


def url():
    server = current_agent().extension(Page).server
    return server.url if server is not None else None


def get(url, path, *, key=None, context=None):
    """Returns the status and the text of an answer; the key is that of the URL unless another is given."""
    base, _, given = url.partition("/?key=")
    request = urllib.request.Request(f"{base}{path}?key={given if key is None else key}")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def get_job(url):
    """Returns the state of a job once all workers have answered, who have 2 s for that."""
    found = []

    def all_have_answered():
        status, text = get(url, "/api/job")
        assert status == 200
        found[:] = json.loads(text)["workers"]
        return all(each["state"] is not None for each in found)

    wait_until(all_have_answered, pause=0.1)
    return found


def test_the_page_shows_what_the_workers_count(workers):
    a, b = workers.rpc(2, view=rpc.View(address="0"))
    there = a.run(url)
    assert there.startswith("http://127.0.0.1:")
    assert b.run(url) != there
    a.run(lambda: [rpc.rpc_sync("worker1", add, (1, 2)) for _ in range(7)] and None)
    first, second = get_job(there)
    (sent,) = [each for each in first["state"]["calls"]["sent"] if each["function"].endswith(".add")]
    (served,) = [each for each in second["state"]["calls"]["served"] if each["function"].endswith(".add")]
    assert sent["count"] == served["count"] == 7
    _, text = get(there, "/api/stacks/worker1")
    assert any(thread["is_main"] for thread in json.loads(text)["threads"])
    assert get(there, "/api/stacks/nobody")[0] == 404
    _, text = get(there, "/")
    assert "<script nonce=" in text
    assert "{{" not in text
    families = {each.name: each for each in text_string_to_metric_families(get(there, "/metrics")[1])}
    (sample,) = [
        each
        for each in families["gradwire_calls_sent_seconds"].samples
        if each.name.endswith("_count") and each.labels["function"].endswith(".add")
    ]
    assert (sample.labels["worker"], sample.labels["callee"], sample.value) == ("worker0", "worker1", 7)
    growing = "messages_sent", "bytes_sent", "link_bytes_sent", "link_bytes_received", "calls_sent_failed"
    assert {families[f"gradwire_{name}"].type for name in growing} == {"counter"}
    buckets = [each for each in families["gradwire_calls_sent_seconds"].samples if each.name.endswith("_bucket")]
    assert sum(each.value for each in buckets if each.labels["le"] == "+Inf") == 7
    known = {each.name for family in families.values() for each in family.samples}
    dashboard = json.loads((ROOT / "examples" / "grafana" / "gradwire.json").read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"gradwire_\w+", target["expr"])
    }
    assert len(asked) > 10
    assert asked - known <= {"gradwire_collective_missing"}  # nobody waits here


def test_requests_without_the_key_are_refused(workers):
    (a,) = workers.rpc(1, view=rpc.View(address="0"))
    there = a.run(url)
    for path in ("/", "/api/job", "/api/stacks/worker0", "/metrics", "/nothing"):
        status, text = get(there, path, key="0" * 32)
        assert status == 403
        assert "worker0" not in text
    assert get(there, "/nothing")[0] == 404
    host, port = there.removeprefix("http://").partition("/")[0].split(":")
    with socket.create_connection((host, int(port)), TIMEOUT_S) as connection:
        connection.sendall(b"GET /" + b"a" * (MAX_REQUEST_BYTES * 3 // 2))  # which is read whole before the answer
        with connection.makefile("rb") as answer:
            assert b" 400 " in answer.readline()


def test_the_server_ends_with_its_agent(workers):
    (a,) = workers.rpc(1, view=rpc.View(address="0"))
    there = a.run(url)
    get(there, "/api/job")

    def leave():
        rpc.shutdown()
        wait_until(lambda: not any("-view" in thread.name for thread in threading.enumerate()))

    a.run(leave)
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(there, timeout=TIMEOUT_S)


def test_with_a_token_the_page_is_encrypted_and_its_key_comes_from_the_token(workers):
    credentials = c10d.Credentials(token=TOKEN)
    a, b = workers.rpc(2, view=rpc.View(address="0"), credentials=credentials)
    there = a.run(url)
    assert there.startswith("https://")
    assert there.partition("?")[2] == b.run(url).partition("?")[2]
    assert TOKEN not in there
    context = ssl.create_default_context(cafile=None)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    assert get(there, "/api/job", context=context)[0] == 200
    assert get(there, "/api/job", context=context, key="")[0] == 403


def test_others_cannot_reach_the_page_of_a_job_without_credentials(workers):
    with pytest.raises(RpcError, match="served to other machines"):
        workers.rpc(1, view=rpc.View(address="0.0.0.0:0"))


def hide(package):
    """Has the page begin anew with what it imports, in a process without a package."""
    for name in [each for each in sys.modules if each.partition(".")[0] == package]:
        del sys.modules[name]
    sys.modules[package] = None
    for name in ("app", "metrics"):
        sys.modules.pop(f"gradwire.view.{name}", None)


@pytest.mark.parametrize("package", ["prometheus_client", "starlette", "uvicorn"])
def test_a_package_that_is_missing_is_named(workers, package):
    (a,) = workers(1)
    a.run(hide, package)
    with pytest.raises(RpcError, match=rf"the view needs {package}[.\w]*: pip install"):
        workers.join_rpc([a], view=rpc.View(address="0"))


def test_another_problem_of_an_import_is_not_taken_for_a_missing_package(workers):
    def spoil():
        del access.LinkFile
        sys.modules.pop("gradwire.view.app", None)

    (a,) = workers(1)
    a.run(spoil)
    with pytest.raises(ImportError, match="cannot import name 'LinkFile'"):
        workers.join_rpc([a], view=rpc.View(address="0"))


def test_one_worker_of_a_host_takes_the_port_of_the_environment(workers):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        (a,) = workers.rpc(1, view=rpc.View(address=port, may_be_taken=True))
        assert a.run(url) is None


def connect(url):
    host, port = url.partition("://")[2].partition("/")[0].split(":")
    return socket.create_connection((host, int(port)), TIMEOUT_S)


@pytest.mark.parametrize("token", [None, TOKEN], ids=["plain", "encrypted"])
def test_those_who_say_nothing_keep_nobody_out(workers, token):
    credentials = None if token is None else c10d.Credentials(token=token)
    (a,) = workers.rpc(1, view=rpc.View(address="0"), credentials=credentials)
    there = a.run(url)
    context = None
    if token is not None:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    descriptors = a.run(lambda: len(os.listdir("/proc/self/fd")))
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connect(there)) for _ in range(2 * MAX_CONNECTIONS)]
        assert get(there, "/api/job", context=context)[0] == 200
        assert a.run(lambda: len(os.listdir("/proc/self/fd"))) <= descriptors + MAX_CONNECTIONS + 5
        assert silent[0].recv(1) == b""


@pytest.mark.parametrize(
    "beginning",
    [b"", b"GET /metrics HTTP/1.1\r\nHost: a\r\n", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n1"],
    ids=["nothing", "headers", "body"],
)
def test_a_request_must_arrive_in_time(workers, beginning):
    (a,) = workers(1)

    def join():
        app.REQUEST_TIMEOUT_S = 0.2

    a.run(join)
    workers.join_rpc([a], view=rpc.View(address="0"))
    with connect(a.run(url)) as connection:
        connection.settimeout(0.05)
        deadline = time.monotonic() + TIMEOUT_S
        with contextlib.suppress(ConnectionError):
            connection.sendall(beginning)
            while time.monotonic() < deadline:
                try:
                    if not connection.recv(1 << 16):
                        break
                except TimeoutError:
                    connection.sendall(beginning[-1:])  # which lengthens nothing
        assert time.monotonic() < deadline
