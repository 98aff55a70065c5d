"""The output of processes is copied line by line, and nothing is lost."""

import fcntl
import io
import os
import struct
import subprocess
import termios

from gradwire.cli.spawn import MAX_LINE_BYTES, PrefixedOutput

from tests.remote_functions import wait_until


def test_lines_are_copied_with_names():
    target = io.BytesIO()
    with PrefixedOutput() as output:
        with output.pipe("a", target) as first, output.pipe("b", target) as second:
            os.write(first, b"one\ntw")
            os.write(second, b"\n")
            os.write(first, b"o\nthree")
        # what a process that goes on holds open
        with output.pipe("c", target) as third:
            held = os.dup(third)
        os.write(held, b"four\n")
    os.close(held)
    lines = target.getvalue().splitlines()
    assert [line for line in lines if line.startswith(b"[a]")] == [b"[a] one", b"[a] two", b"[a] three"]
    assert sorted(line for line in lines if not line.startswith(b"[a]")) == [b"[b] ", b"[c] four"]


def test_a_line_without_end_takes_bounded_memory():
    target = io.BytesIO()
    with PrefixedOutput() as output, output.pipe("a", target) as pipe:
        for _ in range(4):
            os.write(pipe, b"x" * MAX_LINE_BYTES)
    parts = target.getvalue().splitlines()
    assert len(parts) > 1
    assert b"".join(part.removeprefix(b"[a] ") for part in parts) == b"x" * 4 * MAX_LINE_BYTES


def test_a_reader_that_has_left_stops_nobody():
    reading, writing = os.pipe()
    os.close(reading)
    with PrefixedOutput() as output, open(writing, "wb", buffering=0) as target, output.pipe("a", target) as pipe:
        for _ in range(4):
            os.write(pipe, b"x" * MAX_LINE_BYTES + b"\n")


def test_a_process_that_writes_for_ever_keeps_nobody_waiting():
    """It is one that a process has started and left."""

    class SlowTarget(io.BytesIO):
        def write(self, data: bytes) -> int:
            wait_until(lambda: struct.unpack("i", fcntl.ioctl(held, termios.FIONREAD, bytes(4))) > (0,))
            return super().write(data)

    with PrefixedOutput() as output, output.pipe("a", SlowTarget()) as pipe:
        held = os.dup(pipe)
        endless = subprocess.Popen(["yes"], stdout=pipe)
    os.close(held)
    assert endless.wait(60) < 0  # by SIGPIPE
