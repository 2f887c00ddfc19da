"""Write records for `consume`: as key and value, in a `-f` format, or as JSON.

Bytes are written as they are; in JSON, bytes that are not UTF-8 become
``{"base64": "..."}``.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

import orjson

from mpbroker.cli.records.delimiter import unescape
from mpbroker.client.cluster import TopicPartition
from mpbroker.protocol.records.record_batch import Record


class Stamped(Protocol):
    """Any object that has the timestamp type of records, such as a batch header."""

    @property
    def timestamp_type(self) -> int: ...


RecordWriter = Callable[[TopicPartition, Stamped, Iterable[Record]], list[bytes]]
_Part = Callable[[TopicPartition, Record], bytes]


def _bytes_or(value: bytes | None, null: bytes) -> bytes:
    return null if value is None else value


def _size(value: bytes | None) -> int:
    return -1 if value is None else len(value)


def _headers_text(record: Record, null: bytes) -> bytes:
    return b",".join(
        name.encode("utf-8", "surrogateescape") + b"=" + _bytes_or(value, null)
        for name, value in record.headers
    )


def _fields(null: bytes) -> dict[str, _Part]:
    """Return the function that writes a part of a record, by the letter after `%`."""
    return {
        "t": lambda partition, record: partition.topic.encode(),
        "p": lambda partition, record: b"%d" % partition.partition,
        "o": lambda partition, record: b"%d" % record.offset,
        "T": lambda partition, record: b"%d" % record.timestamp,
        "k": lambda partition, record: _bytes_or(record.key, null),
        "K": lambda partition, record: b"%d" % _size(record.key),
        "s": lambda partition, record: _bytes_or(record.value, null),
        "S": lambda partition, record: b"%d" % _size(record.value),
        "R": lambda partition, record: _size(record.value).to_bytes(
            4, "big", signed=True
        ),
        "h": lambda partition, record: _headers_text(record, null),
        "%": lambda partition, record: b"%",
    }


FORMAT_HELP: Final = """\
%t topic, %p partition, %o offset, %T timestamp (ms), %k key, %K key length, %s value,
%S value length, %R value length as 4 bytes, %h headers (n=v,...), %% percent sign;
lengths are -1 for null; \\n \\t \\r \\0 \\xNN"""


def format_writer(text: str, null: bytes) -> RecordWriter:
    """Return a writer for a `-f` format.

    Raises:
        ValueError: a letter after a `%`, or an escape, is unknown; the text names it.
    """
    fields = _fields(null)
    parts: list[_Part] = []
    pieces = text.split("%")
    _add_text(parts, pieces[0])
    index = 1
    while index < len(pieces):
        piece = pieces[index]
        if piece:
            if piece[0] not in fields:
                raise ValueError(f"%{piece[0]} is not known; there are {FORMAT_HELP}")
            parts.append(fields[piece[0]])
            _add_text(parts, piece[1:])
        elif index + 1 < len(pieces):  # "%%": two signs with nothing between them
            index += 1
            parts.append(fields["%"])
            _add_text(parts, pieces[index])
        else:
            raise ValueError(
                "a % at the end has no letter; for a percent sign write %%"
            )
        index += 1

    def write(
        partition: TopicPartition, header: Stamped, records: Iterable[Record]
    ) -> list[bytes]:
        return [
            b"".join([part(partition, record) for part in parts]) for record in records
        ]

    return write


def _add_text(parts: list[_Part], text: str) -> None:
    data = unescape(text)
    if data:
        parts.append(lambda partition, record: data)


def plain_writer(
    delimiter: bytes, key_delimiter: bytes | None, with_offset: bool, null: bytes
) -> RecordWriter:
    """Return a writer of values; if keys have a delimiter, of keys before them.

    Args:
        delimiter: what to write after each record.
        key_delimiter: what to write after each key; None: write no keys.
        with_offset: whether to write an offset and ``key_delimiter`` before each key.
        null: what to write for a null key or value.
    """
    if key_delimiter is None:

        def write_values(
            partition: TopicPartition, header: Stamped, records: Iterable[Record]
        ) -> list[bytes]:
            return [
                (null if record.value is None else record.value) + delimiter
                for record in records
            ]

        return write_values

    def write_keys(
        partition: TopicPartition, header: Stamped, records: Iterable[Record]
    ) -> list[bytes]:
        return [
            b"".join(
                [
                    b"%d%b" % (record.offset, key_delimiter) if with_offset else b"",
                    _bytes_or(record.key, null),
                    key_delimiter,
                    _bytes_or(record.value, null),
                    delimiter,
                ]
            )
            for record in records
        ]

    return write_keys


def json_bytes(value: bytes | None) -> Any:
    """Return bytes for JSON: UTF-8 as str, others as ``{"base64": ...}``.

    None stays None.
    """
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": b64encode(value).decode()}


def json_writer(broker_of: Callable[[TopicPartition], int]) -> RecordWriter:
    """Return a writer of kcat's JSON objects, one line for each record."""

    def write(
        partition: TopicPartition, header: Stamped, records: Iterable[Record]
    ) -> list[bytes]:
        broker = broker_of(partition)
        tstype = "logappend" if header.timestamp_type else "create"
        return [
            orjson.dumps(
                {
                    "topic": partition.topic,
                    "partition": partition.partition,
                    "offset": record.offset,
                    "tstype": tstype,
                    "ts": record.timestamp,
                    "broker": broker,
                    "headers": _json_headers(record),
                    "key": json_bytes(record.key),
                    "payload": json_bytes(record.value),
                }
            )
            + b"\n"
            for record in records
        ]

    return write


def _json_headers(record: Record) -> list[Any]:
    flat: list[Any] = []
    for name, value in record.headers:
        flat.append(json_bytes(name.encode("utf-8", "surrogateescape")))
        flat.append(json_bytes(value))
    return flat
