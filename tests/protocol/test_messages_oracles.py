"""Our bytes are those that other implementations of the protocol read and write.

kio aborts the process on malformed input: it is only ever given what we encoded.
"""

from __future__ import annotations

import importlib
import io
import re
import uuid
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest
from kio import serial as kio_serial

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.fields import Struct
from mpbroker.protocol.message import Message
from tests.support.message_cases import PAIRS, is_of_kafka, pair_name, random_message

# kafka-python reads its schemas by a deprecated function
pytestmark = pytest.mark.filterwarnings("ignore:(read|open)_text:DeprecationWarning")

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
KAFKA_PYTHON_MODULES = (
    "admin",
    "consumer",
    "metadata",
    "producer",
    "sasl",
    "admin.transactions",
)


def present_values(value: Any, version: int) -> Any:
    """Return a message as nested lists of (name, value) of the version's fields."""
    if isinstance(value, list):
        return [present_values(item, version) for item in value]
    if isinstance(value, Struct):
        return [
            (row.name, present_values(getattr(value, row.name), version))
            for row in value.__fields__
            if row.present_in(version) and is_of_kafka(row)
        ]
    return value


# -- kio ---------------------------------------------------------------------------


def kio_class(message: type[Message], version: int) -> Any:
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", message.__name__).lower()
    api, _, direction = name.rpartition("_")
    try:
        module = importlib.import_module(f"kio.schema.{api}.v{version}.{direction}")
    except ModuleNotFoundError:
        pytest.skip(f"kio has no {message.__name__} v{version}")
    return getattr(module, message.__name__)


def kio_values(value: Any) -> Any:
    if isinstance(value, tuple):
        return [kio_values(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return [
            (name, kio_values(getattr(value, name)))
            for name in value.__dataclass_fields__
            if not name.startswith("__")
        ]
    if isinstance(value, timedelta):
        return value // timedelta(milliseconds=1)
    if isinstance(value, datetime):
        return (value - EPOCH) // timedelta(milliseconds=1)
    if isinstance(value, uuid.UUID):
        return value.bytes
    return value


def same_as_kio(ours: Any, theirs: Any, path: str = "") -> None:
    if ours is None and isinstance(theirs, list):
        # an absent tagged struct: kio makes one of default values
        assert all(value in (-1, None) for _, value in theirs), path
    elif isinstance(ours, list) and ours and isinstance(ours[0], tuple):
        assert len(ours) == len(theirs), path
        for (name, value), (their_name, their_value) in zip(ours, theirs, strict=True):
            # kio drops the unit, as its values have a unit of their own
            assert their_name in (name, name.removesuffix("_ms")), path
            same_as_kio(value, their_value, f"{path}.{name}")
    elif isinstance(ours, list):
        assert len(ours) == len(theirs), path
        for index, (value, their_value) in enumerate(zip(ours, theirs, strict=True)):
            same_as_kio(value, their_value, f"{path}[{index}]")
    elif theirs is None:
        # kio has None for the zero uuid and for the timestamp -1
        assert ours in (None, bytes(16), -1), path
    else:
        assert ours == theirs, path


@pytest.mark.parametrize(("message", "version"), PAIRS, ids=pair_name)
def test_kio_reads_our_bytes_and_writes_the_same(
    message: type[Message], version: int
) -> None:
    entity = kio_class(message, version)
    read, write = kio_serial.entity_reader(entity), kio_serial.entity_writer(entity)
    rng = Random(7 * version)
    for _ in range(4):
        ours = random_message(rng, message, version)
        encoded = ours.encode(version)
        theirs, size = read(encoded, 0)
        assert size == len(encoded)
        same_as_kio(present_values(ours, version), kio_values(theirs))
        sink = io.BytesIO()
        write(sink, theirs)
        assert sink.getvalue() == encoded


# -- kafka-python ------------------------------------------------------------------


def kafka_python_class(message: type[Message], version: int) -> Any:
    for name in KAFKA_PYTHON_MODULES:
        module = importlib.import_module(f"kafka.protocol.{name}")
        found = getattr(module, message.__name__, None)
        if found is not None and found.min_version <= version <= found.max_version:
            return found
    pytest.skip(f"kafka-python has no {message.__name__} v{version}")


@pytest.mark.parametrize(("message", "version"), PAIRS, ids=pair_name)
def test_kafka_python_reads_our_bytes_and_writes_the_same(
    message: type[Message], version: int
) -> None:
    entity = kafka_python_class(message, version)
    rng = Random(11 * version)
    for _ in range(4):
        ours = random_message(rng, message, version)
        if message.api_key is ApiKey.API_VERSIONS and hasattr(ours, "error_code"):
            ours.error_code = 0  # an error it takes for an answer in version 0
        encoded = ours.encode(version)
        theirs = entity.decode(encoded, version=version)
        theirs._header = None  # which it forgets, and then misses
        same_as_kafka_python(present_values(ours, version), theirs.to_dict(json=False))
        assert bytes(theirs.encode(version=version)) == encoded


def same_as_kafka_python(ours: Any, theirs: Any, path: str = "") -> None:
    if isinstance(theirs, dict):
        assert len(ours) == len(theirs), path  # a few names are its own
        for (name, value), their_value in zip(ours, theirs.values(), strict=True):
            if name.endswith("authorized_operations"):
                continue  # it makes a set of these bits
            same_as_kafka_python(value, their_value, f"{path}.{name}")
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs), path
        for index, (value, their_value) in enumerate(zip(ours, theirs, strict=True)):
            same_as_kafka_python(value, their_value, f"{path}[{index}]")
    elif isinstance(theirs, uuid.UUID):
        assert ours == theirs.bytes, path
    elif theirs is None:
        assert ours in (None, bytes(16)), path
    else:
        assert ours == theirs, path
