"""Read and write the metadata and assignments of consumers in classic groups.

The broker passes these bytes from member to member, and decodes them only for two
purposes: to know a group's topics (OffsetDelete, expiry of offsets), and to convert a
group from the classic protocol to KIP-848 or back.

Source: Kafka's ConsumerProtocolSubscription.json and ConsumerProtocolAssignment.json;
versions 0 to 3. Each version adds fields at the end.
"""

from __future__ import annotations

from struct import Struct, error
from typing import Final

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.protocol.primitives import AS_JAVA, Buffer

CONSUMER_PROTOCOL: Final = "consumer"  # the protocol type of such groups

_INT16: Final = Struct(">h")
_INT32: Final = Struct(">i")
_OWNED_SINCE: Final = 1
_GENERATION_SINCE: Final = 2
_RACK_SINCE: Final = 3


class Subscription(NamedTuple):
    """The subscription that a consumer sends in its JoinGroup."""

    topics: list[str]
    user_data: bytes | None
    owned: dict[str, list[int]]  # partitions by topic, for cooperative assignors
    generation_id: int  # the generation in which it owned them; -1: unknown
    rack_id: str | None


class _Reader:
    """Reads integers, strings and arrays; IndexError: the bytes end too early."""

    def __init__(self, data: Buffer) -> None:
        self._data = bytes(data)
        self._position = 0

    def int16(self) -> int:
        (value,) = _INT16.unpack_from(self._data, self._position)
        self._position += 2
        return int(value)

    def int32(self) -> int:
        (value,) = _INT32.unpack_from(self._data, self._position)
        self._position += 4
        return int(value)

    def count(self, least_bytes: int) -> int:
        """Read the length of an array whose elements have this many bytes at least."""
        count = self.int32()
        if count * least_bytes > len(self._data) - self._position:
            raise IndexError(count)
        return max(0, count)

    def take(self, length: int) -> bytes:
        end = self._position + length
        if length < 0 or end > len(self._data):
            raise IndexError(length)
        taken = self._data[self._position : end]
        self._position = end
        return taken

    def string(self) -> str:
        return self.take(self.int16()).decode("utf-8", AS_JAVA)

    def nullable_string(self) -> str | None:
        length = self.int16()
        return None if length < 0 else self.take(length).decode("utf-8", AS_JAVA)

    def nullable_bytes(self) -> bytes | None:
        length = self.int32()
        return None if length < 0 else self.take(length)

    def topic_partitions(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for _ in range(self.count(6)):
            topic = self.string()
            partitions = [self.int32() for _ in range(self.count(4))]
            found.setdefault(topic, []).extend(partitions)
        return found


def read_subscription(data: Buffer) -> Subscription | None:
    """Decode a consumer's subscription; return None if the bytes are not one."""
    reader = _Reader(data)
    try:
        version = reader.int16()
        if version < 0:
            return None
        topics = [reader.string() for _ in range(reader.count(2))]
        user_data = reader.nullable_bytes()
        owned = reader.topic_partitions() if version >= _OWNED_SINCE else {}
        generation = reader.int32() if version >= _GENERATION_SINCE else -1
        rack = reader.nullable_string() if version >= _RACK_SINCE else None
    except (IndexError, error, UnicodeDecodeError):
        return None
    return Subscription(topics, user_data, owned, generation, rack)


def subscribed_topics(data: Buffer) -> list[str] | None:
    """Decode only the topics of a subscription; return None if the bytes are not one.

    The topics come first in the encoding.
    """
    reader = _Reader(data)
    try:
        if reader.int16() < 0:
            return None
        return [reader.string() for _ in range(reader.count(2))]
    except (IndexError, error, UnicodeDecodeError):
        return None


def read_assignment(data: Buffer) -> dict[str, list[int]] | None:
    """Decode a member's assignment: partitions by topic name.

    Return None if the bytes are not an assignment, and {} if there are none.
    """
    if not len(data):
        return {}
    reader = _Reader(data)
    try:
        if reader.int16() < 0:
            return None
        return reader.topic_partitions()
    except (IndexError, error, UnicodeDecodeError):
        return None


def version_of(data: Buffer) -> int:
    """Return the version of a member's metadata; 0 if the bytes have no version."""
    return max(0, _INT16.unpack_from(data)[0]) if len(data) >= _INT16.size else 0


def write_assignment(partitions: dict[str, list[int]], version: int = 0) -> bytes:
    """Encode a member's assignment as the leader of a classic group would."""
    parts = [_INT16.pack(version), _INT32.pack(len(partitions))]
    for topic, numbers in partitions.items():
        name = topic.encode()
        parts += [_INT16.pack(len(name)), name, _INT32.pack(len(numbers))]
        parts += [_INT32.pack(number) for number in numbers]
    parts.append(_INT32.pack(-1))  # no user data
    return b"".join(parts)
