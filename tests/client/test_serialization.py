"""Serializers of Kafka's names: bytes as Kafka's own classes write them."""

from uuid import UUID

import pytest

from mpbroker.client.errors import ConfigError
from mpbroker.client.serialization import load_deserializer, load_serializer

# Written by Apache Kafka's classes.
BYTES = [
    ("String", "é", b"\xc3\xa9"),
    ("Boolean", True, b"\x01"),
    ("Short", -2, b"\xff\xfe"),
    ("Integer", 258, b"\0\0\1\2"),
    ("Long", -1, b"\xff" * 8),
    ("Float", 1.5, b"\x3f\xc0\0\0"),
    ("Double", 1.5, b"\x3f\xf8" + bytes(6)),
    ("UUID", UUID(int=1), b"00000000-0000-0000-0000-000000000001"),
]


@pytest.mark.parametrize(("name", "value", "data"), BYTES)
def test_kafkas_names_give_kafkas_bytes(name, value, data):
    package = "org.apache.kafka.common.serialization"
    serializer = load_serializer("value.serializer", f"{package}.{name}Serializer")
    assert serializer is not None
    assert serializer("t", value) == data
    assert serializer("t", None) is None
    deserializer = load_deserializer("value.deserializer", f"{name}Deserializer")
    assert deserializer is not None
    assert deserializer("t", data) == value


def test_bytes_need_no_serializer():
    assert load_serializer("key.serializer", "ByteArraySerializer") is None
    assert load_deserializer("key.deserializer", "BytesDeserializer") is None


def test_a_function_is_found_by_its_name():
    assert load_serializer("key.serializer", "math:sqrt") is not None
    for wrong in ("math:", "math:nothing", "no.such.module:x", "JsonSerializer", ""):
        with pytest.raises(ConfigError, match=r"key\.serializer=.*MODULE:FUNCTION"):
            load_serializer("key.serializer", wrong)
