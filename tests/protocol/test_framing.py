"""Frames come out of a stream as they went in, wherever it was cut."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.protocol.errors import FrameLengthError, ProtocolError
from mpbroker.protocol.framing import FrameDecoder, encode_frame, encode_frame_parts


def decode(chunks: list[bytes], max_frame_bytes: int = 1 << 20) -> list[bytes]:
    decoder = FrameDecoder(max_frame_bytes)
    frames = []
    for chunk in chunks:
        decoder.feed(chunk)
        while (frame := decoder.next_frame()) is not None:
            frames.append(frame)
    return frames


@given(st.lists(st.binary(max_size=40), max_size=5), st.integers(1, 7))
def test_frames_do_not_depend_on_how_the_stream_was_cut(
    payloads: list[bytes], step: int
) -> None:
    stream = b"".join(map(encode_frame, payloads))
    cut = [stream[i : i + step] for i in range(0, len(stream), step)]
    assert decode([stream]) == decode(cut) == payloads


@given(st.binary(max_size=200))
def test_any_bytes_give_frames_or_a_protocol_error_and_nothing_else(
    data: bytes,
) -> None:
    with suppress(ProtocolError):
        decode([data], max_frame_bytes=64)


@pytest.mark.parametrize("length", [-1, -(2**31), 65, 2**31 - 1, 0x16030100])
def test_a_length_outside_the_limit_is_refused_before_the_payload_comes(
    length: int,
) -> None:
    with pytest.raises(FrameLengthError, match=f"{length} is not in 0..64"):
        decode([length.to_bytes(4, "big", signed=True)], max_frame_bytes=64)


def test_a_frame_of_exactly_the_limit_is_taken() -> None:
    assert decode([encode_frame(b"x" * 64)], max_frame_bytes=64) == [b"x" * 64]


def test_a_frame_is_built_from_parts() -> None:
    parts = [b"ab", memoryview(b"cd"), bytearray(b"e")]
    assert encode_frame(parts) == encode_frame(b"abcde") == b"\0\0\0\5abcde"
    assert encode_frame(memoryview(b"abcde")) == b"\0\0\0\5abcde"


def test_bytes_of_an_unfinished_frame_are_counted() -> None:
    decoder = FrameDecoder()
    decoder.feed(encode_frame(b"abc") + b"\0\0\0\5ab")
    assert decoder.next_frame() == b"abc"
    assert decoder.next_frame() is None
    assert decoder.buffered_bytes == 6


def test_frames_remain_whole_when_consumed_bytes_are_dropped() -> None:
    payloads = [bytes([n]) * 40_000 for n in range(9)]
    stream = b"".join(map(encode_frame, payloads))
    cut = [stream[i : i + 90_001] for i in range(0, len(stream), 90_001)]
    assert decode(cut) == payloads


@given(
    st.lists(
        st.binary(max_size=9) | st.sampled_from([bytes(2047), bytes(2048), bytes(9000)])
    )
)
def test_parts_of_a_frame_are_its_bytes_and_large_ones_no_copies(
    payload: list[bytes],
) -> None:
    parts = encode_frame_parts(payload)
    assert b"".join(parts) == encode_frame(payload)
    for large in payload:
        if len(large) >= 2048:
            assert any(part is large for part in parts)
    assert len(parts) <= 2 * sum(len(part) >= 2048 for part in payload) + 1
