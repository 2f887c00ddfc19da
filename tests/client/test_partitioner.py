"""Keys go where Kafka's Java client sends them."""

import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.client.partitioner import murmur2, partition_for_key

with warnings.catch_warnings():
    # It reads its schemas with a function that Python 3.11 deprecates.
    warnings.filterwarnings("ignore", "(read|open)_text", DeprecationWarning)
    from kafka.partitioner.default import murmur2 as murmur2_of_kafka_python


# The vectors of Kafka's own UtilsTest, as signed numbers.
@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_murmur2_gives_what_kafkas_gives(key, expected):
    assert murmur2(key) == expected & 0xFFFFFFFF


@given(st.binary(max_size=40))
def test_murmur2_agrees_with_another_clients_for_any_bytes(key):
    assert murmur2(key) == murmur2_of_kafka_python(key) & 0xFFFFFFFF


@given(st.binary(max_size=20), st.integers(1, 1000))
def test_a_key_goes_to_a_partition_there_is(key, count):
    assert 0 <= partition_for_key(key, count) < count


def test_the_sign_bit_is_dropped_not_negated():
    assert murmur2(b"foobar") >> 31 == 1
    assert partition_for_key(b"foobar", 7) == (-790332482 & 0x7FFFFFFF) % 7
