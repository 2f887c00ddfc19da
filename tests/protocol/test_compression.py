"""Codecs: what goes in comes out, bounded, and read as Kafka's clients write it."""

from __future__ import annotations

import random
import struct
import tracemalloc
import zlib

import cramjam
import lz4.frame
import pytest
from aiokafka import codec as aiokafka_codec
from hypothesis import given, settings
from hypothesis import strategies as st

from mpbroker.protocol.errors import ProtocolError
from mpbroker.protocol.records.compression import (
    Codec,
    DecompressionError,
    DecompressionLimitError,
    compress,
    decompress,
)
from tests.support.kafka_python import codec as kafka_codec

REAL_CODECS = [Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD]
MEMBER_CODECS = [Codec.GZIP, Codec.LZ4, Codec.ZSTD]
NOISE = random.Random(7).randbytes(300_000)
SAMPLES = [b"", b"a", b"abc" * 40_000, NOISE]
MIB = 1 << 20

every_codec = pytest.mark.parametrize("codec", list(Codec), ids=lambda c: c.name)
real_codec = pytest.mark.parametrize("codec", REAL_CODECS, ids=lambda c: c.name)
member_codec = pytest.mark.parametrize("codec", MEMBER_CODECS, ids=lambda c: c.name)


@every_codec
@pytest.mark.parametrize("data", SAMPLES, ids=len)
def test_what_is_compressed_comes_back(codec, data):
    assert decompress(codec, compress(codec, data), len(data), strict=True) == data


@settings(max_examples=50)
@given(st.sampled_from(list(Codec)), st.binary(max_size=2000))
def test_any_bytes_come_back_from_a_view(codec, data):
    view = memoryview(bytearray(b"?" + compress(codec, memoryview(data)) + b"?"))[1:-1]
    assert decompress(codec, view, len(data) + 3) == data


@every_codec
@pytest.mark.parametrize("data", SAMPLES[1:], ids=len)
def test_one_byte_more_than_the_limit_is_refused(codec, data):
    with pytest.raises(DecompressionLimitError, match=str(len(data) - 1)):
        decompress(codec, compress(codec, data), len(data) - 1)


@real_codec
def test_a_bomb_costs_no_more_than_its_limit(codec):
    bomb = compress(codec, bytes(64 * MIB))
    tracemalloc.start()
    try:
        with pytest.raises(DecompressionLimitError):
            decompress(codec, bomb, 2 * MIB)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The room, the copy that grows it, and a block of the codec.
    assert peak < 8 * MIB


@real_codec
def test_a_bomb_in_many_members_is_bounded_by_their_sum(codec):
    member = compress(codec, bytes(MIB))
    assert len(decompress(codec, member * 2, 2 * MIB)) == 2 * MIB
    with pytest.raises(DecompressionLimitError):
        decompress(codec, member * 3, 2 * MIB)


@real_codec
def test_members_one_after_the_other_are_one_text(codec):
    parts = [NOISE[:70_000], b"", b"second", b"a" * 9000]
    data = b"".join(compress(codec, part) for part in parts)
    assert decompress(codec, data, 1 << 20) == b"".join(parts)


@member_codec
def test_a_thousand_empty_members_are_an_attack(codec):
    with pytest.raises(DecompressionError, match="members"):
        decompress(codec, compress(codec, b"") * 1001, 100)


@real_codec
@pytest.mark.parametrize("data", [b"", b"\xff", b"not compressed at all", NOISE[:99]])
def test_garbage_is_one_kind_of_error(codec, data):
    with pytest.raises(DecompressionError) as caught:
        decompress(codec, data, 1000)
    assert isinstance(caught.value, ProtocolError)


@member_codec
def test_any_cut_is_noticed(codec):
    whole = compress(codec, NOISE[:200])
    for size in range(len(whole)):
        with pytest.raises(DecompressionError):
            decompress(codec, whole[:size], 1000)


@settings(max_examples=100)
@given(st.sampled_from(REAL_CODECS), st.data())
def test_damage_gives_bytes_or_a_decompression_error(codec, data):
    damaged = bytearray(compress(codec, b"some text, " * 30))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(damaged) - 1))
        damaged[position] = data.draw(st.integers(0, 255))
    for strict in (False, True):
        try:
            assert len(decompress(codec, damaged, 5000, strict=strict)) <= 5000
        except DecompressionError:
            pass


# -- snappy ----------------------------------------------------------------------------


def test_snappy_is_written_as_java_reads_it():
    data = compress(Codec.SNAPPY, b"x" * 40_000)
    assert data[:16] == b"\x82SNAPPY\x00" + struct.pack(">ii", 1, 1)
    (size,) = struct.unpack_from(">i", data, 16)
    assert cramjam.snappy.decompress_raw_len(data[20 : 20 + size]) == 32_768


def test_snappy_is_read_raw_as_librdkafka_sends_it():
    raw = bytes(cramjam.snappy.compress_raw(b"text " * 100))
    assert decompress(Codec.SNAPPY, raw, 500) == b"text " * 100
    with pytest.raises(DecompressionLimitError):
        decompress(Codec.SNAPPY, raw, 499)


def test_a_snappy_length_that_its_bytes_cannot_reach_is_not_allocated():
    with pytest.raises(DecompressionError, match="cannot inflate"):
        decompress(Codec.SNAPPY, b"\x80\x80\x80\x10abcdefgh", 1 << 30)


@pytest.mark.parametrize("size", [-1, 0, 5, 2**31 - 1])
def test_a_snappy_block_must_fit_its_stream(size):
    header = compress(Codec.SNAPPY, b"")
    with pytest.raises(DecompressionError, match="block"):
        decompress(Codec.SNAPPY, header + struct.pack(">i", size) + b"abcd", 100)


def test_snappy_headers_of_little_endian_writers_are_read():
    data = bytearray(compress(Codec.SNAPPY, b"text"))
    data[8:16] = struct.pack("<ii", 1, 1)
    assert decompress(Codec.SNAPPY, data, 4) == b"text"


# -- lz4 -------------------------------------------------------------------------------


def test_lz4_without_checksum_or_content_size_is_read():
    frame = lz4.frame.compress(
        SAMPLES[2], block_linked=False, store_size=False, content_checksum=False
    )
    assert decompress(Codec.LZ4, frame, len(SAMPLES[2]), strict=True) == SAMPLES[2]


def test_lz4_with_every_checksum_is_read():
    frame = lz4.frame.compress(
        NOISE, block_linked=False, content_checksum=True, block_checksum=True
    )
    assert decompress(Codec.LZ4, frame, len(NOISE), strict=True) == NOISE


def test_linked_lz4_blocks_are_read_unless_java_must():
    frame = lz4.frame.compress(SAMPLES[2], block_linked=True)
    assert decompress(Codec.LZ4, frame, len(SAMPLES[2])) == SAMPLES[2]
    with pytest.raises(DecompressionError, match="independent"):
        decompress(Codec.LZ4, frame, len(SAMPLES[2]), strict=True)


def test_a_second_lz4_frame_is_read_unless_java_must():
    frames = compress(Codec.LZ4, b"one") + compress(Codec.LZ4, b"two")
    assert decompress(Codec.LZ4, frames, 6) == b"onetwo"
    with pytest.raises(DecompressionError, match="exactly one frame"):
        decompress(Codec.LZ4, frames, 6, strict=True)


# -- zstd ------------------------------------------------------------------------------


def test_zstd_without_a_content_size_is_read():
    compressor = cramjam.zstd.Compressor()
    compressor.compress(SAMPLES[2])
    frame = bytes(compressor.finish())
    assert decompress(Codec.ZSTD, frame, len(SAMPLES[2])) == SAMPLES[2]


# -- levels and names ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "levels"),
    [
        (Codec.GZIP, [-1, 1, 9]),
        (Codec.SNAPPY, [None]),
        (Codec.LZ4, [1, 9, 17]),
        (Codec.ZSTD, [-131072, 1, 3, 19]),
    ],
)
def test_every_level_that_kafka_allows_works(codec, levels):
    for level in levels:
        assert decompress(codec, compress(codec, b"abc" * 9, level), 27) == b"abc" * 9


def test_a_higher_level_is_used():
    text = b"".join(b"%d," % (i * i) for i in range(5000))
    for codec, low, high in (
        (Codec.GZIP, 1, 9),
        (Codec.LZ4, 9, 17),
        (Codec.ZSTD, 1, 19),
    ):
        assert len(compress(codec, text, high)) < len(compress(codec, text, low))


def test_codecs_are_found_by_kafkas_names():
    assert [Codec.from_name(n) for n in ("none", "gzip", "snappy", "lz4", "zstd")] == [
        *Codec
    ]
    with pytest.raises(ValueError, match="brotli"):
        Codec.from_name("brotli")


# -- other people's codecs -------------------------------------------------------------


@pytest.mark.parametrize("data", SAMPLES[1:], ids=len)
@real_codec
def test_aiokafka_reads_ours_and_we_read_aiokafkas(codec, data):
    name = codec.name.lower()
    ours = compress(codec, data)
    assert bytes(getattr(aiokafka_codec, f"{name}_decode")(ours)) == data
    theirs = getattr(aiokafka_codec, f"{name}_encode")(data)
    assert decompress(codec, theirs, len(data), strict=True) == data


@pytest.mark.parametrize("data", SAMPLES[1:], ids=len)
@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.LZ4], ids=lambda c: c.name)
def test_kafka_python_reads_ours_and_we_read_kafka_pythons(codec, data):
    name = codec.name.lower()
    assert getattr(kafka_codec, f"{name}_decode")(compress(codec, data)) == data
    theirs = getattr(kafka_codec, f"{name}_encode")(data)
    assert decompress(codec, theirs, len(data), strict=True) == data


def test_gzip_is_not_taken_for_zlib():
    with pytest.raises(DecompressionError):
        decompress(Codec.GZIP, zlib.compress(b"abc"), 10)
