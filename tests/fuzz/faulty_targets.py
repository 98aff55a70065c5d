"""Parsers with faults, for the tests of the fuzzer: each has one if an input has an x in it."""

import os
import time

from hypothesis import strategies as st

from tests.fuzz.target import Target

__all__ = ["TARGETS"]

INPUTS = st.text("abcx", max_size=8).map(str.encode)


def _take_memory(data: bytes) -> None:
    if b"x" in data:
        bytes(2**20)


def _crash(data: bytes) -> None:
    if b"x" in data:
        raise KeyError("a fault")


def _end_process(data: bytes) -> None:
    if b"x" in data:
        os._exit(3)


def _hang(data: bytes) -> None:
    while b"x" in data:
        time.process_time()


TARGETS = (
    Target(name="memory", parse=_take_memory, inputs=INPUTS, max_bytes=2**16),
    Target(name="crash", parse=_crash, inputs=INPUTS, max_bytes=2**16),
    Target(name="exit", parse=_end_process, inputs=INPUTS, max_bytes=2**16),
    Target(name="hang", parse=_hang, inputs=INPUTS, max_bytes=2**16, max_seconds=0.5),
    Target(name="none", parse=len, inputs=INPUTS, max_bytes=2**16),
)
