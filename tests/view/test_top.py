"""`gradwire top`: what it shows of a job, and what it says if it cannot."""

import io
import re

from click.testing import CliRunner
from gradwire import c10d, rpc
from gradwire.cli.group import gradwire
from gradwire.rpc.contracts.agent import current_agent
from gradwire.view.page import Page
from gradwire.view.top import render
from rich.console import Console

from tests.remote_functions import add

TOKEN = "5f0c9a1be27d4386a1f4c7d29b0e8653"


def url():
    return current_agent().extension(Page).server.url


def top(*arguments, **environment):
    environment = {"COLUMNS": "200", "GRADWIRE_TOKEN": "", **environment}
    return CliRunner().invoke(gradwire, ["top", "--once", *arguments], env=environment)


def test_the_state_is_shown(workers):
    a, _ = workers.rpc(2, view=rpc.View(address="0"))
    a.run(lambda: [rpc.rpc_sync("worker1", add, (1, 2)) for _ in range(3)] and None)
    done = top(a.run(url))
    assert done.exit_code == 0
    assert "2 workers, asked by worker0" in done.output
    assert re.search(r"worker0 +worker1 +\S+\.add +3 +0 +0", done.output)
    refused = top(a.run(url)[:-1] + "x")
    assert refused.exit_code == 1
    assert "needs the key" in refused.output


def test_with_the_token_no_key_is_needed(workers):
    (a,) = workers.rpc(1, view=rpc.View(address="0"), credentials=c10d.Credentials(token=TOKEN))
    bare = a.run(url).partition("?")[0]
    done = top(bare, GRADWIRE_TOKEN=TOKEN)
    assert done.exit_code == 0, done.output
    assert "1 worker," in done.output
    assert "set the credentials" in top(bare).output
    assert "does not answer" in top(bare, GRADWIRE_TOKEN=TOKEN[::-1]).output


def test_what_is_no_url_is_refused():
    assert "is no URL of a view" in top("worker0").output


def test_who_is_missing_is_named_with_the_lines():
    rates = {"calls": [3, 0], "bytes": [2 << 20, 0], "lost": [1, 0], "returned": [0, 0]}
    wait = {"operation": "barrier", "group": "", "since": 90.0, "missing": ["b", "c"], "call_site": "train.py:7"}
    silent = [{"name": name, "state": None, "error": "no answer"} for name in "ac"]
    overview = {"time": 100.0, "seconds": 2.0, "asked_by": "a", "workers": silent, "timeline": rates}
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render({**overview, "waits": [{**wait, "missing_at": {"b": "train.py:5 in load"}}]}))
    text = console.export_text()
    assert "3 calls/s, 2.0 MiB/s; in the last minute 1 lost, 0 returned" in text
    assert "barrier for 10.0 s: waits for b, c\n  called at train.py:7\n  b is at train.py:5 in load" in text
    assert "  c does not answer" in text
