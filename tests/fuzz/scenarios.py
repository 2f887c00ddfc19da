"""What a hostile peer may send: every scenario is a function of one random generator.

No socket here. A scenario is a list of chunks to write and what the broker owes for
them; the same seed and number always give the same scenario, so a failure is repeated
by its number alone.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from enum import Enum
from random import Random
from typing import Final, NamedTuple

from mpbroker.protocol.headers import encode_request_header
from mpbroker.protocol.message import Message
from tests.bench import wire
from tests.fuzz.batches import TIMESTAMP_MS, corrupt_batch
from tests.fuzz.recent import TOPIC, plausible_request
from tests.support.message_cases import MESSAGES, random_message

MAX_REQUEST_BYTES: Final = 104_857_600  # socket.request.max.bytes, its default
_EXTREMES: Final = (0, 1, -1, 127, 128, 32767, -32768, 2**31 - 1, -(2**31), 2**63 - 1)
_MAX_VERSION: Final = 32767

REQUESTS: Final = [
    (cls, version)
    for cls in MESSAGES
    if cls.__name__.endswith("Request")
    for version in cls.valid_versions
]


class Owed(Enum):
    """What the broker must do after the last chunk."""

    ANSWERS = "answer the expected correlation ids, and go on serving"
    CLOSE = "answer the expected correlation ids, then close"
    ANYTHING = "answer, refuse or close, as long as it is well-formed"


class Scenario(NamedTuple):
    """A connection's worth of input."""

    name: str
    chunks: list[bytes]
    owed: Owed
    correlation_ids: list[int]
    half_close: bool = False  # shut our side down after the last chunk
    drip: bool = False  # the last chunk goes byte by byte, between other scenarios


def scenario(seed: int, number: int) -> Scenario:
    """Return the scenario of this number."""
    rng = Random(f"{seed}:{number}")
    return rng.choice(_KINDS)(rng)


# -- what is well-formed -------------------------------------------------------------


def valid_requests(rng: Random, count: int) -> tuple[list[bytes], list[int]]:
    """Return framed requests that must all be answered, and their correlation ids."""
    ids = [rng.randint(-(2**31), 2**31 - 1) for _ in range(count)]
    frames = []
    for correlation_id in ids:
        request = rng.choice(_ANSWERED)()
        stamped = bytearray(request)
        struct.pack_into(">i", stamped, wire.CORRELATION_ID_AT, correlation_id)
        frames.append(bytes(stamped))
    return frames, ids


def _produce() -> bytes:
    return wire.produce(
        TOPIC,
        0,
        wire.record_batch([wire.RecordSpec(b"value")], timestamp_ms=TIMESTAMP_MS),
    )


_ANSWERED: Final[list[Callable[[], bytes]]] = [
    wire.api_versions,
    lambda: wire.metadata([TOPIC]),
    lambda: wire.metadata(None),
    _produce,
    lambda: wire.fetch(TOPIC, 0, 0, max_bytes=1000),
    lambda: wire.fetch("no-such-topic", 0, 0, max_bytes=1000),
]


def _random_request(rng: Random) -> tuple[bytes, int]:
    """Return any request of any version with random values, and its correlation id."""
    cls, version = rng.choice(REQUESTS)
    message: Message = random_message(rng, cls, version)
    correlation_id = rng.randint(0, 2**31 - 1)
    head = encode_request_header(
        cls.api_key, version, correlation_id, rng.choice([None, "", "fuzz"])
    )
    return frame(head + message.encode(version)), correlation_id


def frame(payload: bytes) -> bytes:
    return struct.pack(">i", len(payload)) + payload


def _cut(rng: Random, data: bytes) -> list[bytes]:
    """Cut bytes into a few chunks anywhere."""
    cuts = sorted(rng.randint(0, len(data)) for _ in range(rng.randint(0, 5)))
    edges = [0, *cuts, len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges) if a < b]


# -- scenarios -----------------------------------------------------------------------


def pipelined(rng: Random) -> Scenario:
    frames, ids = valid_requests(rng, rng.randint(1, 20))
    return Scenario("pipelined", _cut(rng, b"".join(frames)), Owed.ANSWERS, ids)


def dripped(rng: Random) -> Scenario:
    frames, ids = valid_requests(rng, 1)
    return Scenario("dripped", frames, Owed.ANSWERS, ids, drip=True)


def half_closed(rng: Random) -> Scenario:
    frames, ids = valid_requests(rng, rng.randint(1, 5))
    # What follows our FIN is owed nothing: Kafka drops the connection when it sees it.
    return Scenario("half-closed", frames, Owed.ANYTHING, ids, half_close=True)


def random_bytes(rng: Random) -> Scenario:
    data = rng.randbytes(rng.choice([1, 3, 4, 5, 8, 100, 5000]))
    return Scenario("random bytes", _cut(rng, data), Owed.ANYTHING, [], half_close=True)


def random_payload(rng: Random) -> Scenario:
    data = frame(rng.randbytes(rng.choice([0, 1, 2, 7, 8, 20, 200, 20_000])))
    return Scenario("random payload", _cut(rng, data), Owed.ANYTHING, [])


def lying_length(rng: Random) -> Scenario:
    frames, ids = valid_requests(rng, rng.randint(0, 3))
    length = rng.choice(
        [-1, -(2**31), MAX_REQUEST_BYTES + 1, 2**31 - 1, rng.randint(-(2**31), -1)]
    )
    bad = struct.pack(">i", length) + rng.randbytes(rng.choice([0, 1, 100]))
    return Scenario("lying length", [*frames, bad], Owed.CLOSE, ids)


def foreign_protocol(rng: Random) -> Scenario:
    data = rng.choice(
        [
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
            b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"POST / HTTP/1.1\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"SSH-2.0-OpenSSH_9.2\r\n",
        ]
    )
    return Scenario("foreign protocol", _cut(rng, data), Owed.CLOSE, [])


def unfinished(rng: Random) -> Scenario:
    """A length, less than that, and then the end of the connection."""
    size = rng.choice([10, 1000, 15_000, 20_000, 1_000_000, 50_000_000])
    sent = rng.randint(0, min(size - 1, 50_000))
    data = struct.pack(">i", size) + bytes(sent)
    return Scenario(
        "unfinished", [data], Owed.ANYTHING, [], half_close=rng.random() < 0.5
    )


def mutated(rng: Random) -> Scenario:
    kind = rng.random()
    if kind < 0.3:
        request, _ = _random_request(rng)
    elif kind < 0.65:
        request = frame(plausible_request(rng)[0])
    else:
        (request,), _ = valid_requests(rng, 1)
    payload = bytes(mutate(rng, bytearray(request[4:])))
    # It may have been hit too.
    ids = [struct.unpack_from(">i", payload, 4)[0]] if len(payload) >= 8 else []
    return Scenario("mutated", _cut(rng, frame(payload)), Owed.ANYTHING, ids)


def mutate(rng: Random, data: bytearray) -> bytearray:
    # Most of the time after the header, which a flipped bit too soon turns into an
    # unknown API and no more.
    low = 8 if rng.random() < 0.9 else 0
    for _ in range(rng.randint(1, 4)):
        if len(data) <= low:
            break
        at = rng.randint(low, len(data) - 1)
        match rng.randint(0, 5):
            case 0:
                data[at] ^= 1 << rng.randint(0, 7)
            case 1:
                data[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF])
            case 2:
                del data[at:]
            case 3:
                data[at:at] = rng.randbytes(rng.randint(1, 20))
            case 4:
                data[at:at] = rng.choice([b"\xff\xff\xff\xff\x0f", b"\xff" * 10])
            case _:
                size = rng.choice([2, 4, 8])
                bits = size * 8
                value = rng.choice(_EXTREMES) & (1 << bits) - 1
                data[at : at + size] = value.to_bytes(size, "big")
    return data


def random_request(rng: Random) -> Scenario:
    request, correlation_id = _random_request(rng)
    return Scenario("random request", [request], Owed.ANYTHING, [correlation_id])


def plausible(rng: Random) -> Scenario:
    """Some requests that name what there is, at once; joins may wait for others."""
    frames, ids = [], []
    for _ in range(rng.choice([1, 1, 3])):
        payload, correlation_id = plausible_request(rng)
        frames.append(frame(payload))
        ids.append(correlation_id)
    return Scenario("plausible", frames, Owed.ANYTHING, ids)


def unknown_api(rng: Random) -> Scenario:
    frames, ids = valid_requests(rng, rng.randint(0, 2))
    key = rng.choice([-1, 95, 200, 32767, -32768])
    header = struct.pack(">hhih", key, rng.randint(0, _MAX_VERSION), 1, -1)
    return Scenario("unknown API", [*frames, frame(header)], Owed.CLOSE, ids)


def unsupported_api_versions(rng: Random) -> Scenario:
    version = rng.randint(20, _MAX_VERSION)
    header = struct.pack(">hhih", 18, version, 77, -1) + b"\0"
    frames, ids = valid_requests(rng, 1)
    # KIP-511: answered in version 0, so that the client can come down.
    return Scenario(
        "ApiVersions too new", [frame(header), *frames], Owed.ANSWERS, [77, *ids]
    )


def garbage_after_valid(rng: Random) -> Scenario:
    frames, ids = valid_requests(rng, rng.randint(1, 5))
    tail = struct.pack(">i", -5) + rng.randbytes(rng.randint(0, 300))
    data = b"".join(frames) + tail
    return Scenario("garbage after valid", _cut(rng, data), Owed.CLOSE, ids)


def corrupt_produce(rng: Random) -> Scenario:
    batch = corrupt_batch(rng)
    request = bytearray(wire.produce(TOPIC, 0, batch, rng.choice([1, -1])))
    struct.pack_into(">i", request, wire.CORRELATION_ID_AT, 99)
    return Scenario("corrupt batch", [bytes(request)], Owed.ANSWERS, [99])


_KINDS: Final[list[Callable[[Random], Scenario]]] = [
    pipelined,
    dripped,
    half_closed,
    random_bytes,
    random_payload,
    lying_length,
    foreign_protocol,
    unfinished,
    mutated,
    mutated,
    mutated,
    random_request,
    random_request,
    plausible,
    plausible,
    plausible,
    unknown_api,
    unsupported_api_versions,
    garbage_after_valid,
    corrupt_produce,
    corrupt_produce,
]
