"""`gradwire top`: what it shows of a job, and what it says if it cannot."""

import codecs
import fcntl
import io
import logging
import logging.handlers
import math
import os
import pty
import re
import select
import socket
import stat
import struct
import subprocess
import termios
import threading
import time
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner
from gradwire import c10d, rpc
from gradwire.cli.group import gradwire
from gradwire.net.addresses import address_for_others, is_local
from gradwire.rpc.contracts.agent import current_agent
from gradwire.view.access import LinkFile
from gradwire.view.overview import overview_of
from gradwire.view.page import Page
from gradwire.view.top import Choice, render
from rich.console import Console

from tests.remote_functions import add, set_event, wait_for, wait_until

FUNCTIONS = (
    *(math.ceil, math.cos, math.cosh, math.erf, math.exp, math.fabs, math.floor, math.gamma, math.log, math.sin),
    *(math.sinh, math.sqrt, math.tan, math.tanh, abs, ascii, bin, bool, callable, chr, complex, float, hash, hex),
    *(id, int, oct, repr, round, str),
)

TOKEN = "5f0c9a1be27d4386a1f4c7d29b0e8653"


def url():
    """Returns where the page is, as the worker has logged it."""
    return link().partition("?")[0]


def link():
    """Returns the URL of the page with its key."""
    return current_agent().extension(Page).server.url


def top(*arguments, **environment):
    environment = {"COLUMNS": "200", "GRADWIRE_TOKEN": "", **environment}
    return CliRunner().invoke(gradwire, ["top", "--once", *arguments], env=environment)


def rendered(overview):
    """Returns the state of a job as the command prints it."""
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render(overview))
    return console.export_text()


def test_the_state_is_shown(workers):
    a, _ = workers.rpc(2, view=rpc.View(address="0"))
    a.run(lambda: [rpc.rpc_sync("worker1", add, (1, 2)) for _ in range(3)] and None)
    done = top(a.run(url))
    assert done.exit_code == 0
    assert "2 workers, asked by worker0" in done.output
    assert re.search(r"worker0 +worker1 +\S+\.add +3 +0 +0", done.output)
    refused = top(a.run(url), GRADWIRE_VIEW_KEY="0" * 32)
    assert refused.exit_code == 1
    assert "set GRADWIRE_VIEW_KEY" in refused.output


def test_the_key_is_where_only_the_user_can_read_it(workers, tmp_path):
    def start():
        log = logging.getLogger("gradwire.view")
        log.addHandler(handler := logging.handlers.BufferingHandler(100))
        options = rpc.RpcBackendOptions(init_method=f"file://{tmp_path}/store", view=rpc.View(address="0"))
        rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=options)
        log.removeHandler(handler)
        return [record.getMessage() for record in handler.buffer]

    (a,) = workers(1)
    (logged,) = a.run(start)
    address, whole = a.run(url), a.run(link)
    key = whole.partition("?key=")[2]
    assert address in logged
    assert key not in logged
    (path,) = re.findall(r"link with its key that is in (\S+),", logged)
    assert (Path(path).read_text().strip(), stat.S_IMODE(os.stat(path).st_mode)) == (whole, 0o600)

    refused = top(whole)
    assert (refused.exit_code, "must not have the key" in refused.output) == (1, True)
    assert key not in refused.output
    elsewhere = tmp_path / "another user"
    elsewhere.mkdir(mode=0o700)
    assert top(address, XDG_RUNTIME_DIR=str(elsewhere)).exit_code == 1
    assert top(address, XDG_RUNTIME_DIR=str(elsewhere), GRADWIRE_VIEW_KEY=key).exit_code == 0
    a.run(rpc.shutdown)
    assert not Path(path).exists()


@pytest.mark.parametrize("is_own", [True, False])
def test_another_host_is_not_told_the_key_of_a_page_here_with_the_same_port(monkeypatch, tmp_path, is_own):
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    address = address_for_others()
    if is_local(address):
        pytest.skip("this host has a loopback address only")
    with socket.create_server((address, 0)) as server:
        port = server.getsockname()[1]
        LinkFile(port).write(f"http://127.0.0.1:{port}/?key=secret")
        if not is_own:
            monkeypatch.setattr(psutil, "net_if_addrs", dict)
        received = []

        def receive():
            connection, _ = server.accept()
            with connection:
                received.append(connection.recv(1000))

        thread = threading.Thread(target=receive)
        thread.start()
        assert top(f"http://{address}:{port}/").exit_code == 1
        thread.join()
    assert (b"secret" in received[0]) == is_own


def test_with_the_token_no_key_is_needed(workers):
    (a,) = workers.rpc(1, view=rpc.View(address="0"), credentials=c10d.Credentials(token=TOKEN))
    bare = a.run(url)
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
    wait |= {"missing_at": {"b": "train.py:5 in load"}, "stuck": True}
    ending = {**wait, "operation": "shutdown", "missing": ["b"], "missing_at": {}, "stuck": False}
    overview = {"time": 100.0, "seconds": 2.0, "asked_by": "a", "workers": silent, "timeline": rates}
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render({**overview, "waits": [wait, ending]}))
    text, colours = console.export_text(clear=False), console.export_html(inline_styles=True)
    assert "3 calls/s, 2.0 MiB/s; in the last minute 1 lost, 0 returned" in text
    assert "barrier for 10.0 s: waits for b, c\n  called at train.py:7\n  b is at train.py:5 in load" in text
    assert "  c does not answer" in text
    assert "shutdown for 10.0 s: serves until the end of b" in text
    assert re.search(r'style="color: #\w+[^>]*>barrier for', colours)
    assert not re.search(r'style="color: #\w+[^>]*>shutdown for', colours)


def test_a_lost_worker_hides_nothing_of_the_others(workers):
    a, b = workers.rpc(2, view=rpc.View(address="0"))
    a.run(rpc.rpc_sync, "worker1", os.getpid)
    b.kill()
    a.run(lambda: wait_until(lambda: "worker1" in rpc.debug_info()["lost_workers"]))
    shown = top(a.run(url)).output
    assert re.search(r"worker1 +lost: its process has ended", shown)
    assert re.search(r"worker +state +up +CPU +memory", shown)
    assert re.search(r"worker0 +answers +\d+ s +\d+ % +[\d.]+ MiB", shown)


def test_calls_that_have_long_been_in_flight_come_first(workers):
    a, _ = workers.rpc(2, view=rpc.View())
    overview = a.run(state_with_a_call_in_flight)
    assert re.search(r"\.add +3 +0 +0 .*\.wait_for +0 +1 +\d+ s +0 *\n", rendered(overview), re.DOTALL)
    (call,) = [each for each in overview["workers"][0]["state"]["calls"]["sent"] if each["in_flight"]]
    call["oldest_s"] += 300.0
    assert re.search(r"\.wait_for +0 +1 +5 min +0 *\n.*\.add +3 +0 +0 ", rendered(overview), re.DOTALL)


def state_with_a_call_in_flight():
    waiting = rpc.rpc_async("worker1", wait_for, ("go on",))
    for _ in range(3):
        rpc.rpc_sync("worker1", add, (1, 2))
    found = overview_of(current_agent())
    rpc.rpc_sync("worker1", set_event, ("go on",))
    waiting.wait()
    return found


def test_in_a_terminal_the_reason_of_a_loss_is_cut_before_figures_are(workers, python):
    a, b = workers.rpc(2, view=rpc.View(address="0"))
    a.run(rpc.rpc_sync, "worker1", os.getpid)
    b.kill()
    a.run(lambda: wait_until(lambda: "worker1" in rpc.debug_info()["lost_workers"]))
    terminal = Terminal(python.executable, 80, 24, ("-m", "gradwire", "top", a.run(url)))
    try:
        screen = terminal.read(r"worker1 +lost.*q quit")
        assert re.search(r"worker1 +lost: its [^\n]*…", screen)
        assert re.search(r"worker +state +up +CPU +memory +running +queued +unanswered +sent", screen)
        assert re.search(r"worker0 +answers +\d+ s +\d+ % +[\d.]+ MiB +0 +0 +0 +[\d.]+ K?i?B", screen)
    finally:
        terminal.close()


def test_what_somebody_else_answers_is_shown_as_text(free_port):
    with socket.create_server(("127.0.0.1", free_port)) as server:

        def answer():
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"\x1b]0;title\x07 nonsense\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        done = top(f"http://127.0.0.1:{free_port}/")
        thread.join()
    assert done.exit_code == 1
    assert "does not answer" in done.output
    assert "\x1b" not in done.output


def test_a_window_that_is_too_small_says_which_tables_are_not_shown():
    rates = {"calls": [3, 0], "bytes": [0, 0], "lost": [0, 0], "returned": [0, 0]}
    silent = [{"name": f"w{i}", "state": None, "error": "no answer"} for i in range(30)]
    waits = [{"operation": "barrier", "group": "", "since": 90.0, "missing": [each["name"] for each in silent]}]
    waits[0] |= {"call_site": "a.py:1", "missing_at": {}, "stuck": True}
    overview = {
        "time": 100.0,
        "seconds": 2.0,
        "asked_by": "a",
        "workers": silent,
        "timeline": rates,
        "waits": waits,
    }
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(render({**overview, "waits": waits}, Choice(24, 80)))
    text = console.export_text()
    assert len(text.splitlines()) <= 24
    assert "more lines" in text
    assert "more workers" in text
    assert Choice().after("j").within(1) == Choice()


def fail(number):
    raise ValueError(f"number {number} is odd")


def have_many_calls():
    for number in range(1, 4, 2):
        with pytest.raises(ValueError, match="is odd"):
            rpc.rpc_sync("worker1", fail, (number,))
    for function in FUNCTIONS:
        rpc.rpc_sync("worker1", function, (7,))


class Terminal:
    """A program in a terminal of a size."""

    def __init__(self, program, columns, lines, arguments, **environment):
        self.columns, self.lines = columns, lines
        self.master, end = pty.openpty()
        fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("4H", lines, columns, 0, 0))
        environment = {**os.environ, "TERM": "xterm", "GRADWIRE_TOKEN": "", **environment}
        for name in ("COLUMNS", "LINES"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            [program, *arguments], stdin=end, stdout=end, stderr=end, env=environment, start_new_session=True
        )
        os.close(end)
        self.screen = ""
        self.decoder = codecs.getincrementaldecoder("utf-8")()  # a read may end within a character

    def read(self, pattern):
        """Reads until what is on the screen since the last read matches; returns it, without colours."""
        deadline = time.monotonic() + 60
        self.screen = ""
        while not re.search(pattern, self.screen, re.S):
            assert select.select([self.master], [], [], max(0.0, deadline - time.monotonic()))[0], self.screen
            self.screen += re.sub(
                r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.decoder.decode(os.read(self.master, 1 << 16))
            )
        return self.screen

    def press(self, keys):
        os.write(self.master, keys.encode())

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.master)


@pytest.mark.parametrize(("columns", "lines"), [(100, 30), (80, 24)])
def test_in_a_terminal_it_says_what_does_not_fit(workers, python, tmp_path, columns, lines):
    a, _ = workers.rpc(2, view=rpc.View(address="0"))
    a.run(have_many_calls)
    arguments = ("-m", "gradwire", "top", "--interval", "0.3", a.run(url))
    terminal = Terminal(python.executable, columns, lines, arguments)
    try:
        screen = terminal.read(r"2 workers, asked by worker0.*q quit")
        (tmp_path / "screen.txt").write_text(screen)
        assert re.search(r"worker0 +answers", screen)
        assert "ValueError: number 3 is odd" in screen
        hidden = re.search(r"(\d+) more calls", screen)
        assert hidden is not None
        terminal.press("c")
        alone = screen
        while "answers" in alone:  # as it is in what was drawn before the key was read
            alone = terminal.read(r"2 workers, asked by worker0.*worker1 .*q quit")
        shown = len(re.findall(r"worker0 +worker1", alone))
        assert f"{len(FUNCTIONS) + 1 - shown} more calls" in alone
        assert shown > lines - 9
        terminal.press("\x1b[B" * 3 + "k")  # as many come at once while the page is asked
        terminal.read("2 above")
        terminal.press("q")
        assert terminal.process.wait(30) == 0
    finally:
        terminal.close()
