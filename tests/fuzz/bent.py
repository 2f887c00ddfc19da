"""Bend recorded requests: their lengths, counts, types, values, ends, and their order.

A volley is what a hostile peer sends at once, over one connection or a few. It is a
function of the corpus, a seed and a number, so it is sent again by its number.
"""

from __future__ import annotations

import struct
from random import Random
from typing import Any, Final, NamedTuple

import crc32c

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.errors import ProtocolError
from mpbroker.protocol.fields import BOOLEAN, BYTES, RECORDS, STRING, UUID, Field
from mpbroker.protocol.headers import RequestHeader, parse_request_header
from mpbroker.protocol.message import Message
from mpbroker.protocol.messages.produce import ProduceRequest
from tests.fuzz.recorder import Corpus
from tests.fuzz.scenarios import frame, mutate
from tests.support.message_cases import MESSAGES

# Larger ones are not about requests, but about memory, which tests/neighbours has.
LARGEST_FRAME: Final = 1 << 20

_REQUESTS: Final = {each.api_key: each for each in MESSAGES if each.is_request()}
_EXTREMES: Final = (0, 1, -1, 2, 127, 128, 255, 32767, -32768, 2**31 - 1, 2**63 - 1)
_COPIES: Final = (2, 3, 100, 5000)
_TEXTS: Final = (
    *("", "\0", ".", "..", "../../x", "ö" * 124, "x" * 249, "x" * 250, "y" * 32767),
    *("__consumer_offsets", "__transaction_state", "__cluster_metadata"),
)
_OF_ALL: Final = {4, 8}  # configurations of brokers, and levels of their loggers
# Where the fields of a magic-2 batch lie.
_BATCH_LENGTH: Final = 8
_BATCH_CRC: Final = 17
_BATCH_ATTRIBUTES: Final = 21


class Shot(NamedTuple):
    """One request.

    Attributes:
        payload: as it was recorded, without its length.
        seed: how it is bent; None: not at all.
    """

    payload: bytes
    seed: int | None


class Stream(NamedTuple):
    """What goes over one connection.

    Attributes:
        listener: the name of the listener that it is for.
        shots: requests in order.
        waits: whether each is sent when the one before it is answered.
    """

    listener: str
    shots: list[Shot]
    waits: bool


def volley(corpus: Corpus, seed: int, number: int) -> list[Stream]:
    """Return what is sent at once: mostly one connection's worth, at times a few."""
    rng = Random(f"bent:{seed}:{number}")
    return [_stream(rng, corpus) for _ in range(rng.choice([1, 1, 1, 1, 2, 4]))]


def _stream(rng: Random, corpus: Corpus) -> Stream:
    conversation = rng.choice(corpus.conversations)
    first = rng.randrange(len(conversation.frames)) if rng.random() < 0.5 else 0
    chosen = conversation.frames[first : first + rng.randint(1, 10)]
    if rng.random() < 0.2:
        rng.shuffle(chosen)
    if rng.random() < 0.2:  # another client's requests between
        other = rng.choice(corpus.conversations)
        for each in other.frames[: rng.randint(1, 4)]:
            chosen.insert(rng.randint(0, len(chosen)), each)
    share = rng.choice([0.0, 0.3, 0.3, 1.0])
    shots = [
        Shot(each, rng.getrandbits(32) if rng.random() < share else None)
        for each in chosen
    ]
    return Stream(conversation.listener, shots, rng.random() < 0.7)


def framed(corpus: Corpus, shot: Shot) -> bytes:
    """Return a request as it is sent, with its length; nothing if it may hurt."""
    if shot.seed is None:
        return b"" if _may_hurt(shot.payload) else frame(shot.payload)
    rng = Random(shot.seed)
    payload = rng.choice(_WAYS)(rng, shot.payload, corpus)[:LARGEST_FRAME]
    if _may_hurt(payload):
        return b""
    size = len(payload)
    if rng.random() < 0.05:  # a length that is not true
        size = rng.choice([size - 1, size + 1, size + 4, size * 2, 0, 3, -1, 2**31 - 1])
    return struct.pack(">i", size) + payload


# -- ways to bend a request ----------------------------------------------------------


def _in_bytes(rng: Random, payload: bytes, corpus: Corpus) -> bytes:
    return bytes(mutate(rng, bytearray(payload)))


def _cut_off(rng: Random, payload: bytes, corpus: Corpus) -> bytes:
    return payload[: rng.randint(0, len(payload))]


def _spliced(rng: Random, payload: bytes, corpus: Corpus) -> bytes:
    """Return the beginning of one request and the end of another."""
    other = rng.choice(rng.choice(corpus.conversations).frames)
    return payload[: rng.randint(8, 60)] + other[rng.randint(0, len(other)) :]


def _of_another_version(rng: Random, payload: bytes, corpus: Corpus) -> bytes:
    version = rng.choice([0, 1, 2, 5, 9, 12, 13, 20, -1, 32767])
    return payload[:2] + struct.pack(">h", version) + payload[4:]


def _of_another_api(rng: Random, payload: bytes, corpus: Corpus) -> bytes:
    return struct.pack(">h", rng.choice(list(_REQUESTS))) + payload[2:]


def _in_fields(rng: Random, payload: bytes, corpus: Corpus) -> bytes:
    """Change one to three fields, and encode the request again."""
    read = decode(payload)
    if read is None:
        return _in_bytes(rng, payload, corpus)
    header, message = read
    most_copies = rng.choice(_COPIES)
    for _ in range(rng.randint(1, 3)):
        places = sites(message, header.api_version)
        if not places:
            break
        owner, row = rng.choice(places)
        value = getattr(owner, row.name)
        if row.is_array and value and rng.random() < 0.3:
            setattr(owner, row.name, list(value) * most_copies)
            most_copies = 2  # or arrays in arrays would have millions
        else:
            setattr(owner, row.name, _bent_value(rng, row, value))
    return encoded(payload, header, message) or _in_bytes(rng, payload, corpus)


def _in_records(rng: Random, payload: bytes, corpus: Corpus) -> bytes:
    """Bend a batch of records, mostly with a checksum that is right."""
    read = decode(payload)
    if read is None or not isinstance(read[1], ProduceRequest):
        return _in_fields(rng, payload, corpus)
    header, message = read
    for topic in message.topic_data:
        for partition in topic.partition_data:
            partition.records = _bent_batch(rng, bytes(partition.records or b""))
    return encoded(payload, header, message) or payload


def _bent_batch(rng: Random, batch: bytes) -> bytes:
    bent = bytearray(batch)
    if len(bent) <= _BATCH_ATTRIBUTES:
        return batch * 2
    match rng.randint(0, 3):
        case 0:  # a field of the header: attributes, counts, times, producer
            at = rng.randrange(_BATCH_ATTRIBUTES, min(len(bent), 61))
            bent[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF])
        case 1:
            bent = mutate(rng, bent)
        case 2:
            return batch * rng.choice([2, 3, 20])
        case _:
            bent += rng.randbytes(rng.randint(1, 40))
    if len(bent) > _BATCH_ATTRIBUTES and rng.random() < 0.8:
        struct.pack_into(">i", bent, _BATCH_LENGTH, len(bent) - _BATCH_LENGTH - 4)
        crc = crc32c.crc32c(bytes(bent[_BATCH_ATTRIBUTES:]))
        struct.pack_into(">I", bent, _BATCH_CRC, crc)
    return bytes(bent)


_WAYS: Final = (
    *([_in_fields] * 8),
    *([_in_bytes] * 4),
    *([_in_records] * 3),
    *(_cut_off, _spliced, _of_another_version, _of_another_api),
)


# -- messages ------------------------------------------------------------------------


def decode(payload: bytes) -> tuple[RequestHeader, Message] | None:
    """Return the header and the message of a request; None if it is none."""
    try:
        header = parse_request_header(payload)
        kind = _REQUESTS.get(ApiKey(header.api_key))
        if kind is None or header.api_version not in kind.valid_versions:
            return None
        return header, kind.decode(header.api_version, payload, header.size)
    except (ProtocolError, ValueError):
        return None


def encoded(payload: bytes, header: RequestHeader, message: Message) -> bytes | None:
    """Return the request with another message; None if it has no such encoding."""
    try:
        return payload[: header.size] + message.encode(header.api_version)
    except (ProtocolError, ValueError, TypeError, AttributeError, struct.error):
        return None


def sites(value: Any, version: int) -> list[tuple[Any, Field]]:
    """Return all fields of a message and of the structs in it."""
    found: list[tuple[Any, Field]] = []
    for row in value.__fields__:
        if not row.present_in(version):
            continue
        found.append((value, row))
        inner = getattr(value, row.name)
        if row.struct is not None and inner is not None:
            for each in (inner if row.is_array else [inner])[:20]:
                found += sites(each, version)
    return found


def _bent_value(rng: Random, row: Field, value: Any) -> Any:
    if rng.random() < 0.1:
        return None
    if row.is_array:
        elements = list(value or [])
        match rng.randint(0, 2):
            case 0:
                return []
            case 1:
                return elements[::-1] + elements
            case _:
                return elements[: rng.randint(0, len(elements))]
    if row.struct is not None:
        return value
    kind = row.kind
    if kind is STRING:
        return rng.choice([*_TEXTS, f"{value}x", str(value)[:-1]])
    if kind is BYTES or kind is RECORDS:
        held = bytes(value or b"")
        return rng.choice([b"", held[: len(held) // 2], held * 2, rng.randbytes(30)])
    if kind is BOOLEAN:
        return not value
    if kind is UUID:
        return rng.choice([bytes(16), bytes(15) + b"\1", rng.randbytes(16)])
    if isinstance(value, int):
        return rng.choice([*_EXTREMES, value + 1, value - 1, -value])
    return value


def _may_hurt(payload: bytes) -> bool:
    """Return whether a request is one by which an administrator may hurt all clients.

    Quotas for all, features, settings of the broker, and internal topics: what follows
    from their change is no fault.
    """
    read = decode(payload)
    if read is None:
        return False
    message: Any = read[1]
    if getattr(message, "validate_only", False):
        return False
    match message.api_key:
        case ApiKey.ALTER_CLIENT_QUOTAS | ApiKey.UPDATE_FEATURES:
            return True
        case ApiKey.DELETE_TOPICS | ApiKey.DELETE_RECORDS | ApiKey.CREATE_PARTITIONS:
            return b"__" in payload
        case ApiKey.ALTER_CONFIGS | ApiKey.INCREMENTAL_ALTER_CONFIGS:
            kinds = {each.resource_type for each in message.resources}
            return bool(kinds & _OF_ALL) or b"__" in payload
    return False
