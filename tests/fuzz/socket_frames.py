"""Frames of sockets that carry envelopes, well formed and not."""

from gradwire.proto.v1 import agent_pb2
from gradwire.rpc.contracts.options import MAX_ATTACHED_BYTES
from gradwire.rpc.transports.socket_frames import HEADER, SEGMENT, FrameKind, numbers_frame
from hypothesis import strategies as st

from tests.fuzz.rpc_wire_targets import ENVELOPES

__all__ = ["SEGMENT_BYTES", "SOCKET_FRAMES"]

SEGMENT_BYTES = 4096
"""Of the segments that are announced as they are."""


def segment_frame(kind: FrameKind, number: int, size: int) -> bytes:
    return HEADER.pack(SEGMENT.size, kind) + SEGMENT.pack(number, size)


def frame(kind: int, content: bytes) -> bytes:
    return HEADER.pack(len(content), kind) + content


SOCKET_FRAMES = st.one_of(
    ENVELOPES.map(lambda each: frame(FrameKind.ENVELOPE, each.SerializeToString())),
    st.builds(
        segment_frame,
        st.sampled_from([FrameKind.SEGMENT, FrameKind.SHARED_SEGMENT]),
        st.sampled_from([1, 2, 3, 2**64 - 1]),
        st.sampled_from([SEGMENT_BYTES, SEGMENT_BYTES, 0, 2**63]),
    ),
    st.builds(
        numbers_frame,
        st.sampled_from([FrameKind.RELEASED, FrameKind.DROPPED]),
        st.lists(st.sampled_from([1, 2, 2**64 - 1]), max_size=3),
    ),
    st.builds(frame, st.sampled_from([FrameKind.END, 6, 7, 8, 255]), st.binary(max_size=9)),
    st.builds(
        lambda nbytes, after: (
            frame(FrameKind.ATTACHED, agent_pb2.Envelope(attached_nbytes=nbytes).SerializeToString()) + after
        ),
        st.sampled_from([0, 1, 9, MAX_ATTACHED_BYTES, MAX_ATTACHED_BYTES + 1, 2**64 - 1]),
        st.binary(max_size=9),
    ),
    st.builds(frame, st.sampled_from([FrameKind.PULSE, FrameKind.PULSE_READ]), st.just(b"")),
    st.builds(HEADER.pack, st.sampled_from([2**20, 2**20 + 1, 2**32 - 1]), st.integers(0, 5)),
)
