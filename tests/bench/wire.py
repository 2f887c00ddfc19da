"""The few Kafka requests that the benchmarks need, written from the protocol guide.

Kept apart from `mpbroker.protocol` on purpose: the same bytes go to any broker and any
checkout, and a mistake in our codecs cannot hide behind itself. All are flexible
versions that every broker of the last years speaks.

Source: Kafka protocol guide, "The Messages"; KIP-482 for the compact encodings.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import crc32c

PRODUCE: Final = (0, 9)
FETCH: Final = (1, 12)
LIST_OFFSETS: Final = (2, 6)
METADATA: Final = (3, 9)
FIND_COORDINATOR: Final = (10, 4)
API_VERSIONS: Final = (18, 3)
CREATE_TOPICS: Final = (19, 5)
DELETE_TOPICS: Final = (20, 4)
INIT_PRODUCER_ID: Final = (22, 2)

CLIENT_ID: Final = b"mpbroker-bench"
CORRELATION_ID_AT: Final = 8  # in a framed request: size, api key, version, then this

ERROR_NONE: Final = 0
TOPIC_ALREADY_EXISTS: Final = 36
NO_TAGS: Final = b"\0"


class AnswerError(Exception):
    """A broker answered something else than it was asked for."""


def uvarint(value: int) -> bytes:
    """Encode an unsigned varint."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def varint(value: int) -> bytes:
    """Encode a zig-zag varint, as records use it."""
    return uvarint(value << 1 if value >= 0 else (-value << 1) - 1)


def compact(data: bytes | None) -> bytes:
    """Encode COMPACT_STRING, COMPACT_BYTES or COMPACT_RECORDS; None is null."""
    return b"\0" if data is None else uvarint(len(data) + 1) + data


def array(items: Sequence[bytes]) -> bytes:
    """Encode a COMPACT_ARRAY of items that are encoded already."""
    return uvarint(len(items) + 1) + b"".join(items)


def request(api: tuple[int, int], body: bytes, correlation_id: int = 0) -> bytes:
    """Return a framed request with header version 2."""
    header = struct.pack(">hhih", *api, correlation_id, len(CLIENT_ID)) + CLIENT_ID
    return struct.pack(">i", len(header) + 1 + len(body)) + header + NO_TAGS + body


def api_versions() -> bytes:
    return request(API_VERSIONS, compact(b"bench") + compact(b"1") + NO_TAGS)


def metadata(topics: Sequence[str] | None, *, creates: bool = False) -> bytes:
    """Ask for these topics, or all if None; create those that are missing, or none."""
    names = (
        b"\0"
        if topics is None
        else array([compact(name.encode()) + NO_TAGS for name in topics])
    )
    return request(METADATA, names + bytes([creates, 0, 0]) + NO_TAGS)


def find_coordinator(group: str) -> bytes:
    keys = array([compact(group.encode())])
    return request(FIND_COORDINATOR, b"\0" + keys + NO_TAGS)


def latest_offset(topic: str, partition: int) -> bytes:
    """Ask for a partition's high watermark."""
    part = struct.pack(">iiq", partition, -1, -1) + NO_TAGS
    topics = array([compact(topic.encode()) + array([part]) + NO_TAGS])
    return request(LIST_OFFSETS, struct.pack(">ib", -1, 0) + topics + NO_TAGS)


def create_topics(names: Iterable[str]) -> bytes:
    """Create topics of one partition each."""
    topics = array([_new_topic(name, 1, {}) for name in names])
    return request(CREATE_TOPICS, topics + struct.pack(">ib", 30_000, 0) + NO_TAGS)


def _new_topic(name: str, partitions: int, config: Mapping[str, str]) -> bytes:
    entries = [
        compact(key.encode()) + compact(value.encode()) + NO_TAGS
        for key, value in config.items()
    ]
    return (
        compact(name.encode())
        + struct.pack(">ih", partitions, 1)
        + array([])
        + array(entries)
        + NO_TAGS
    )


def delete_topics(names: Iterable[str]) -> bytes:
    """Delete topics."""
    topics = array([compact(name.encode()) for name in names])
    return request(DELETE_TOPICS, topics + struct.pack(">i", 30_000) + NO_TAGS)


def produce(
    topic: str,
    partition: int,
    records: bytes,
    acks: int = 1,
    transactional_id: str | None = None,
) -> bytes:
    return produce_to_several(topic, [(partition, records)], acks, transactional_id)


def produce_to_several(
    topic: str,
    batches: Sequence[tuple[int, bytes]],
    acks: int = 1,
    transactional_id: str | None = None,
) -> bytes:
    """Return a Produce of records to each of some partitions."""
    parts = [
        struct.pack(">i", partition) + compact(records) + NO_TAGS
        for partition, records in batches
    ]
    body = compact(topic.encode()) + array(parts) + NO_TAGS
    writer = None if transactional_id is None else transactional_id.encode()
    head = compact(writer) + struct.pack(">hi", acks, 30_000)
    return request(PRODUCE, head + array([body]) + NO_TAGS)


def fetch(
    topic: str,
    partition: int,
    offset: int,
    *,
    max_bytes: int,
    max_wait_ms: int = 0,
    min_bytes: int = 1,
) -> bytes:
    part = struct.pack(">iiqiqi", partition, -1, offset, -1, -1, max_bytes) + NO_TAGS
    body = compact(topic.encode()) + array([part]) + NO_TAGS
    head = struct.pack(
        ">iiiibii", -1, max_wait_ms, min_bytes, max(max_bytes, 1 << 20), 0, 0, -1
    )
    return request(FETCH, head + array([body]) + array([]) + compact(b"") + NO_TAGS)


def produce_error_at(topic: str, nth: int = 0) -> int:
    """Return where a partition's error code lies in a Produce answer's payload."""
    name = len(compact(topic.encode()))
    return 4 + 1 + 1 + name + 1 + 4 + nth * (4 + 2 + 8 + 8 + 8 + 3)


def fetch_error_at(topic: str) -> int:
    """Return where the partition's error code lies in a Fetch answer's payload."""
    name = len(compact(topic.encode()))
    return 4 + 1 + 4 + 2 + 4 + 1 + name + 1 + 4


class RecordSpec(NamedTuple):
    """One record of a batch."""

    value: bytes
    key: bytes | None = None


def record_batch(
    records: Sequence[RecordSpec],
    *,
    timestamp_ms: int | None = None,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    attributes: int = 0,
) -> bytes:
    """Return an uncompressed magic-2 record batch with base offset 0."""
    encoded = bytearray()
    for delta, record in enumerate(records):
        key = b"\x01" if record.key is None else varint(len(record.key)) + record.key
        value = varint(len(record.value)) + record.value
        body = b"\0\0" + varint(delta) + key + value + b"\0"
        encoded += varint(len(body)) + body
    return batch_of(
        bytes(encoded),
        len(records),
        timestamp_ms=timestamp_ms,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        attributes=attributes,
    )


def batch_of(
    encoded_records: bytes,
    count: int,
    *,
    timestamp_ms: int | None = None,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    attributes: int = 0,
) -> bytes:
    """Put a batch header, true in every field, before records encoded already.

    Timestamps are now unless said: retention deletes what is a week old, and the state
    of a producer whose last batch is a day old is forgotten.
    """
    if timestamp_ms is None:
        timestamp_ms = time.time_ns() // 1_000_000
    after_crc = (
        struct.pack(
            ">hiqqqhii",
            attributes,
            count - 1,
            timestamp_ms,
            timestamp_ms,
            producer_id,
            producer_epoch,
            base_sequence,
            count,
        )
        + encoded_records
    )
    crc = crc32c.crc32c(after_crc)
    length = 4 + 1 + 4 + len(after_crc)
    return struct.pack(">qiibI", 0, length, 0, 2, crc) + after_crc


def batch_of_size(size: int, value_size: int = 1024) -> bytes:
    """Return a batch of as many `value_size` records as stay within `size` bytes."""
    count = max(1, (size - 61) // (value_size + 16))
    return record_batch([RecordSpec(filler(value_size, i)) for i in range(count)])


def filler(size: int, seed: int = 0) -> bytes:
    """Return `size` bytes of text that compresses about as well as log lines do."""
    words = []
    length = 0
    state = seed * 2654435761 + 12345
    while length < size:
        state = (state * 6364136223846793005 + 1442695040888963407) & (1 << 64) - 1
        word = b"%x " % (state >> 46)
        words.append(b"client=" + word if state >> 63 else word)
        length += len(words[-1])
    return b"".join(words)[:size]


class Reader:
    """Take flexible-version fields off an answer, front to back."""

    def __init__(self, payload: bytes, position: int = 0) -> None:
        self._payload = payload
        self.position = position

    def unpack(self, layout: str) -> tuple[int, ...]:
        """Return the fields of a struct layout, big-endian."""
        values = struct.unpack_from(">" + layout, self._payload, self.position)
        self.position += struct.calcsize(">" + layout)
        return values

    def uvarint(self) -> int:
        value = shift = 0
        while True:
            byte = self._payload[self.position]
            self.position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    def varint(self) -> int:
        value = self.uvarint()
        return value >> 1 ^ -(value & 1)

    def compact(self) -> bytes | None:
        length = self.uvarint() - 1
        return None if length < 0 else self.take(length)

    def take(self, length: int) -> bytes:
        """Return the next `length` bytes."""
        self.position += length
        return self._payload[self.position - length : self.position]

    def count(self) -> int:
        return self.uvarint() - 1

    def skip_tags(self) -> None:
        for _ in range(self.uvarint()):
            self.uvarint()
            self.position += self.uvarint()


class FetchedPartition(NamedTuple):
    """The one partition of a Fetch answer."""

    error_code: int
    high_watermark: int
    log_start_offset: int
    records: bytes


class ProducedPartition(NamedTuple):
    """The one partition of a Produce answer."""

    error_code: int
    base_offset: int


class StoredRecord(NamedTuple):
    """A record read back from an uncompressed batch."""

    offset: int
    producer_id: int
    key: bytes | None
    value: bytes | None


def parse_produce(payload: bytes) -> ProducedPartition:
    return parse_produce_to_several(payload)[0]


def parse_produce_to_several(payload: bytes) -> list[ProducedPartition]:
    """What became of each partition of a request that named one topic."""
    reader = Reader(payload, 4)
    reader.skip_tags()
    reader.count()
    reader.compact()
    partitions = []
    for _ in range(reader.count()):
        _partition, error, base_offset = reader.unpack("ihq")
        partitions.append(ProducedPartition(error, base_offset))
        reader.unpack("qq")
        for _ in range(reader.count()):
            reader.unpack("i")
            reader.compact()
            reader.skip_tags()
        reader.compact()
        reader.skip_tags()
    return partitions


def parse_fetch(payload: bytes) -> FetchedPartition:
    reader = Reader(payload, 4)
    reader.skip_tags()
    _throttle, error, _session = reader.unpack("ihi")
    if error or reader.count() < 1:
        return FetchedPartition(error, -1, -1, b"")
    reader.compact()
    reader.count()
    _partition, error, high_watermark, _lso, start = reader.unpack("ihqqq")
    for _ in range(max(0, reader.count())):
        reader.unpack("qq")
        reader.skip_tags()
    reader.unpack("i")
    return FetchedPartition(error, high_watermark, start, reader.compact() or b"")


def iter_records(batches: bytes) -> list[StoredRecord]:
    """Return the records of whole, uncompressed batches; a cut last one is left out.

    Raises:
        AnswerError: a batch's CRC-32C does not match its bytes.
    """
    found: list[StoredRecord] = []
    position = 0
    while position + 61 <= len(batches):
        base_offset, length = struct.unpack_from(">qi", batches, position)
        end = position + 12 + length
        if end > len(batches):
            break
        crc = struct.unpack_from(">I", batches, position + 17)[0]
        if crc32c.crc32c(batches[position + 21 : end]) != crc:
            raise AnswerError(f"batch at offset {base_offset} fails its CRC-32C")
        producer_id, _epoch, _sequence, count = struct.unpack_from(
            ">qhii", batches, position + 43
        )
        reader = Reader(batches, position + 61)
        for _ in range(count):
            reader.varint()
            reader.unpack("b")
            reader.varint()
            delta = reader.varint()
            key = _varint_bytes(reader)
            value = _varint_bytes(reader)
            for _ in range(reader.varint()):
                _varint_bytes(reader)
                _varint_bytes(reader)
            found.append(StoredRecord(base_offset + delta, producer_id, key, value))
        position = end
    return found


def _varint_bytes(reader: Reader) -> bytes | None:
    length = reader.varint()
    if length < 0:
        return None
    return reader.take(length)


class Connection:
    """A blocking connection that asks one question at a time."""

    def __init__(self, address: tuple[str, int], timeout_s: float = 30.0) -> None:
        self._socket = socket.create_connection(address, timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._correlation_id = 0

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def use_tls(self, context: ssl.SSLContext) -> None:
        """Say everything from now on over TLS."""
        self._socket = context.wrap_socket(self._socket, server_hostname="localhost")

    def close(self) -> None:
        self._socket.close()

    def fileno(self) -> int:
        return self._socket.fileno()

    def ask(self, framed: bytes) -> bytes:
        """Send a framed request under a new correlation id; return the payload.

        Raises:
            AnswerError: the answer bears another correlation id.
            OSError: the connection broke, or the answer did not come in time.
        """
        self.send(framed)
        return self.receive()

    def send(self, framed: bytes) -> None:
        """Send a framed request under a new correlation id."""
        self._correlation_id += 1
        stamped = bytearray(framed)
        struct.pack_into(">i", stamped, CORRELATION_ID_AT, self._correlation_id)
        self._socket.sendall(stamped)

    def receive(self) -> bytes:
        """Return the payload of the answer to the request sent last."""
        size = struct.unpack(">i", self._exactly(4))[0]
        payload = self._exactly(size)
        answered = struct.unpack_from(">i", payload)[0]
        if answered != self._correlation_id:
            raise AnswerError(
                f"correlation id {answered} in answer to {self._correlation_id}"
            )
        return payload

    def _exactly(self, size: int) -> bytes:
        buffer = bytearray(size)
        view = memoryview(buffer)
        while view:
            received = self._socket.recv_into(view)
            if not received:
                raise ConnectionResetError("the broker closed the connection")
            view = view[received:]
        return bytes(buffer)

    def create_topic(
        self, name: str, partitions: int = 1, config: dict[str, str] | None = None
    ) -> bool:
        """Create a topic; return False if it existed already.

        Raises:
            AnswerError: the broker refused.
        """
        topic = _new_topic(name, partitions, config or {})
        body = array([topic]) + struct.pack(">ib", 30_000, 0) + NO_TAGS
        reader = Reader(self.ask(request(CREATE_TOPICS, body)), 4)
        reader.skip_tags()
        reader.unpack("i")
        reader.count()
        reader.compact()
        error = reader.unpack("h")[0]
        message = reader.compact() or b""
        if error not in (ERROR_NONE, TOPIC_ALREADY_EXISTS):
            raise AnswerError(f"create {name}: error {error} {message.decode()}")
        return error == ERROR_NONE

    def delete_topic(self, name: str) -> None:
        """Delete a topic.

        Raises:
            AnswerError: the broker refused.
        """
        reader = Reader(self.ask(delete_topics([name])), 4)
        reader.skip_tags()
        reader.unpack("i")
        reader.count()
        reader.compact()
        error = reader.unpack("h")[0]
        if error:
            raise AnswerError(f"delete {name}: error {error}")

    def end_offset(self, topic: str, partition: int) -> int:
        """Return the partition's high watermark.

        Raises:
            AnswerError: the broker refused.
        """
        reader = Reader(self.ask(latest_offset(topic, partition)), 4)
        reader.skip_tags()
        reader.unpack("i")
        reader.count()
        reader.compact()
        reader.count()
        _index, error, _timestamp, offset = reader.unpack("ihqq")
        if error:
            raise AnswerError(f"list offsets of {topic}-{partition}: error {error}")
        return offset

    def init_producer_id(self) -> tuple[int, int]:
        """Return a fresh producer id and its epoch.

        Raises:
            AnswerError: the broker refused.
        """
        body = compact(None) + struct.pack(">i", 60_000) + NO_TAGS
        reader = Reader(self.ask(request(INIT_PRODUCER_ID, body)), 4)
        reader.skip_tags()
        _throttle, error, producer_id, epoch = reader.unpack("ihqh")
        if error:
            raise AnswerError(f"InitProducerId: error {error}")
        return producer_id, epoch

    def read_all(
        self, topic: str, partition: int, offset: int = 0
    ) -> list[StoredRecord]:
        """Return every record from an offset on, checked by CRC, offset by offset.

        Raises:
            AnswerError: an error code, a bad CRC, or offsets that do not go up by one.
        """
        records: list[StoredRecord] = []
        while True:
            answer = parse_fetch(
                self.ask(fetch(topic, partition, offset, max_bytes=4 << 20))
            )
            if answer.error_code:
                raise AnswerError(f"fetch {topic}: error {answer.error_code}")
            found = [r for r in iter_records(answer.records) if r.offset >= offset]
            if not found:
                if offset < answer.high_watermark:
                    raise AnswerError(
                        f"{topic}-{partition}: nothing at {offset}, below the high "
                        f"watermark {answer.high_watermark}"
                    )
                return records
            for record in found:
                if record.offset != offset:
                    raise AnswerError(f"offset {record.offset} where {offset} was due")
                offset += 1
            records += found
