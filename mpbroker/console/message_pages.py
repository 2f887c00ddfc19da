"""Show records in the console: a page from an offset or a time on.

Records are read by Fetch requests of a bounded size, without a group. Each answer to
the browser is made from a bounded number of bytes and says from which offset to go on.
So a search and a live tail are loops in the browser: they show their progress, and they
end when the browser stops asking.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgpack

from mpbroker.base.errors import MpbrokerError
from mpbroker.base.named_tuple import NamedTuple
from mpbroker.client.admin.topic_admin import EARLIEST, LATEST, list_offsets
from mpbroker.client.cluster import Cluster, TopicPartition, only
from mpbroker.client.consumer.fetcher import AbortedProducers
from mpbroker.client.errors import check_error
from mpbroker.client.partitioner import partition_for_key
from mpbroker.console.plain_values import plain
from mpbroker.console.record_places import skipped_to
from mpbroker.console.schemas import Decoder, Undecoded, schema_id_of
from mpbroker.protocol.messages.fetch import (
    AbortedTransaction,
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    PartitionData,
)
from mpbroker.protocol.records.batch_header import BatchHeader, iter_batches
from mpbroker.protocol.records.control_record import parse_control_type
from mpbroker.protocol.records.record_batch import (
    Record,
    iter_payload,
    records_payload,
)

MAX_ROWS: Final = 200
FORMATS: Final = ("auto", "json", "text", "msgpack", "registry", "hex")
_PAGE_BYTES: Final = 1024 * 1024
MAX_DECOMPRESSED: Final = 64 * 1024 * 1024
_SHOWN_BYTES: Final = 8 * 1024  # of a key or value
_MAX_HEADERS: Final = 50
_NAME_CHARS: Final = 200  # of a header's name
_HEADERS_CHARS: Final = 32 * 1024  # of all headers of a record; the last may have more
_NAMED_TOPICS: Final = 12  # the last version of Fetch that names topics
_READ_UNCOMMITTED, _READ_COMMITTED = 0, 1
_JSON: Final = json.JSONEncoder(indent=2, ensure_ascii=False)
_MARKERS: Final = {0: "abort marker", 1: "commit marker"}


class Batch(NamedTuple):
    """A fetched record batch, and the state of its transaction.

    Attributes:
        data: the whole batch.
        state: "committed", "aborted" or "undecided"; "" without a transaction.
        place: where it begins in what was fetched.
    """

    header: BatchHeader
    data: memoryview
    state: str
    place: int


class Fetched(NamedTuple):
    """What was fetched from an offset on.

    Attributes:
        at: the offset.
        end: the offset after the last record of the partition.
        records: batches; the last may be cut off.
        aborted: the aborted transactions in it; None: transactions are undecided.
    """

    at: int
    end: int
    records: bytes | bytearray | memoryview
    aborted: Sequence[AbortedTransaction] | None

    @property
    def is_empty(self) -> bool:
        """Whether it has no whole batch with records from the offset on."""
        return all(
            header.next_offset <= self.at for header, _ in iter_batches(self.records)
        )

    def batches(self) -> Iterator[Batch]:
        """Yield the batches with records from the offset on."""
        aborted = AbortedProducers(self.aborted or ())
        place = 0
        for header, data in iter_batches(self.records):
            is_hidden = aborted.hide(header, data)  # also of a batch before the offset
            if header.next_offset > self.at:
                state = ""
                if header.is_transactional and not header.is_control:
                    state = "aborted" if is_hidden else "committed"
                    if self.aborted is None:
                        state = "undecided"
                yield Batch(header, data, state, place)
            place += len(data)


class Partition(NamedTuple):
    """A partition, and the broker that leads it."""

    where: TopicPartition
    leader: int

    def offset_at(self, cluster: Cluster, timestamp: int) -> int:
        """Return the first offset at or after a time, or else the end offset.

        Args:
            cluster: the client, connected to the brokers.
            timestamp: ms since 1970, EARLIEST or LATEST.
        """
        asked = {self.where: timestamp}
        leaders = {self.where: self.leader}
        found = list_offsets(cluster, asked, leaders)[self.where].offset
        if found < 0:  # no record is that late
            latest = {self.where: LATEST}
            found = list_offsets(cluster, latest, leaders)[self.where].offset
        return found


def partition_of(cluster: Cluster, topic: str, number: int, key: str = "") -> Partition:
    """Return a partition by its number; if that is negative, by a record's key.

    Raises:
        MpbrokerError: there is no such partition, or it has no leader.
    """
    found = cluster.topic(topic, wait=False).partitions
    if number < 0:
        number = partition_for_key(key.encode(), len(found)) if found else 0
    for each in found:
        if each.partition_index == number and each.leader_id >= 0:
            return Partition(TopicPartition(topic, number), each.leader_id)
    raise MpbrokerError(f"{topic}-{number}: there is no such partition, or no leader")


class Look(NamedTuple):
    """How keys and values are shown.

    Attributes:
        form: one of FORMATS.
        decode: decodes values by a schema registry; None: there is no registry.
    """

    form: str
    decode: Decoder | None = None


def read_messages(
    cluster: Cluster, partition: Partition, offset: int, count: int, look: Look
) -> dict[str, Any]:
    """Return up to ``count`` records from an offset on, and the next offset to read.

    Records of aborted and undecided transactions are included, and markers, too.

    Args:
        cluster: the client, connected to the brokers.
        partition: the partition to read.
        offset: the first offset; the start of the log, if that is greater.
        count: the number of records; at most MAX_ROWS are returned.
        look: how to show keys and values.
    """
    count = max(1, min(count, MAX_ROWS))
    start = partition.offset_at(cluster, EARLIEST)
    at = max(offset, start)
    fetched = fetch(cluster, partition, at, _PAGE_BYTES)
    rows: list[dict[str, Any]] = []
    following = at
    for batch in fetched.batches():
        if len(rows) >= count:
            break
        for record in records_from(batch, at):
            if record.offset >= at:
                rows.append(row_of(batch, record, look))
                following = record.offset + 1
                if len(rows) >= count:
                    break
        else:
            following = batch.header.next_offset
    return {
        "partition": partition.where.partition,
        "start": start,
        "end": fetched.end,
        "next": following,
        "rows": rows,
    }


def records_from(batch: Batch, offset: int) -> Iterator[Record]:
    """Yield the records of a batch, from some before an offset on.

    Raises:
        RecordBatchError, DecompressionError: the batch is malformed.
    """
    header = batch.header
    data = records_payload(header, batch.data, MAX_DECOMPRESSED)
    place, skipped = skipped_to(data, offset - header.base_offset)
    return iter_payload(
        data[place:] if place else data,
        header.record_count - skipped,
        header.base_offset,
        header.base_timestamp,
        header.max_timestamp if header.timestamp_type else None,
    )


def fetch(cluster: Cluster, partition: Partition, at: int, max_bytes: int) -> Fetched:
    """Fetch batches from an offset on."""
    # read_committed first: only its response names aborted transactions. It ends where
    # the first undecided transaction begins.
    answer = _ask(cluster, partition, at, max_bytes, _READ_COMMITTED)
    aborted = answer.aborted_transactions or ()
    found = Fetched(at, answer.high_watermark, _bytes_of(answer), aborted)
    if at < found.end and found.is_empty:
        answer = _ask(cluster, partition, at, max_bytes, _READ_UNCOMMITTED)
        found = Fetched(at, found.end, _bytes_of(answer), None)
    return found


def _bytes_of(answer: PartitionData) -> bytes | bytearray | memoryview:
    records = answer.records
    return records if isinstance(records, (bytes, bytearray, memoryview)) else b""


def _ask(
    cluster: Cluster, partition: Partition, at: int, max_bytes: int, isolation: int
) -> PartitionData:
    topic, number = partition.where
    asked = FetchPartition(
        partition=number, fetch_offset=at, partition_max_bytes=max_bytes
    )
    request = FetchRequest(
        max_wait_ms=0,
        min_bytes=0,
        max_bytes=max_bytes,
        isolation_level=isolation,
        topics=[FetchTopic(topic=topic, partitions=[asked])],
    )
    broker = cluster.broker(partition.leader)
    answer = broker.request(request, FetchResponse, max_version=_NAMED_TOPICS)
    check_error(answer.error_code, str(partition.where))
    found = only(only(answer.responses, broker.address).partitions, broker.address)
    check_error(found.error_code, f"{partition.where} at offset {at}")
    return found


# -- how a record is shown -------------------------------------------------------------


def row_of(batch: Batch, record: Record, look: Look) -> dict[str, Any]:
    header = batch.header
    row: dict[str, Any] = {
        "offset": record.offset,
        "timestamp": record.timestamp,
        "log_append_time": bool(header.timestamp_type),
        "transaction": batch.state,
        "producer_id": header.producer_id if header.producer_id >= 0 else None,
    }
    if header.is_control:
        kind = parse_control_type(record)
        return row | {"control": _MARKERS.get(kind, f"control record of type {kind}")}
    headers = _headers(record, look)
    return row | {
        "key": shown(record.key, look.form, look.decode),
        "value": shown(record.value, look.form, look.decode),
        "headers": headers,
        "more_headers": len(record.headers) - len(headers),
    }


def _headers(record: Record, look: Look) -> list[tuple[str, dict[str, Any]]]:
    """Return the first headers of a record, of a bounded number and size."""
    found, room = list[tuple[str, dict[str, Any]]](), _HEADERS_CHARS
    for name, value in list(record.headers)[:_MAX_HEADERS]:
        if room <= 0:
            break
        text = name[:_NAME_CHARS].encode("utf-8", "replace").decode()
        if len(name) > _NAME_CHARS:
            text += f"\u2026 ({len(name)} characters)"
        found.append((text, shown(value, look.form)))
        room -= len(text) + len(found[-1][1]["text"])
    return found


def shown(
    data: bytes | None, form: str, decode: Decoder | None = None
) -> dict[str, Any]:
    """Return a key or value as text for people, with its format and its size in bytes.

    Bytes that are not of the wished format are shown as hex. "auto" takes the first
    format that fits; "registry" is "auto" that says why the registry does not help.

    Args:
        data: the bytes; None is null.
        form: the wished format.
        decode: see `Look`.
    """
    if data is None:
        return {"format": "null", "text": "", "bytes": 0, "is_cut": False}
    note = ""
    if decode is not None and _may_have_schema(data, form):
        try:
            schema_id, (kind, content, note) = decode(data)
            text = _as_json(content)
            return _cut(data, kind, text) | {"schema": schema_id, "note": note}
        except Undecoded as error:
            note = str(error)
        except (ValueError, RecursionError) as error:
            note = f"it cannot be shown as JSON: {error}"
    wished: tuple[str, ...] = (form,)
    if form in ("auto", "registry"):
        wished = ("json", "text", "msgpack")
    for each in wished:
        text_or_none = _READERS[each](data, is_sure=len(wished) == 1)
        if text_or_none is not None:
            break
    else:
        each, text_or_none = "hex", _hex(data, is_sure=True)
    return _cut(data, each, text_or_none) | ({"note": note} if note else {})


def _may_have_schema(data: bytes, form: str) -> bool:
    """Return whether the registry is asked about a value."""
    return form == "registry" or (form == "auto" and schema_id_of(data) > 0)


def _cut(data: bytes, form: str, text: str) -> dict[str, Any]:
    # JSON can spell halves of characters ("\\ud800"), which no answer can hold.
    text = text.encode("utf-8", "replace").decode()
    return {
        "format": form,
        "text": text[:_SHOWN_BYTES],
        "bytes": len(data),
        "is_cut": len(text) > _SHOWN_BYTES or (form == "hex" and len(data) > 1024),
    }


def _as_json(content: Any) -> str:
    """Return the beginning of a value's JSON, a little more than is shown of it.

    The whole may be a thousand times as long as the value: each line of it is indented
    by its depth, and each name in it may be any length. The depth needs no bound of its
    own, since 100 levels fill the beginning.
    """
    found, size = list[str](), 0
    for each in _JSON.iterencode(content):
        found.append(each)
        size += len(each)
        if size > _SHOWN_BYTES:
            break
    return "".join(found)


def _json(data: bytes, *, is_sure: bool) -> str | None:
    if not is_sure and data[:1] not in (b"{", b"["):
        return None
    if len(data) > 16 * _SHOWN_BYTES:
        return None  # too long to show as a whole
    try:
        return _as_json(json.loads(data))
    except (ValueError, RecursionError):
        return None


def _text(data: bytes, *, is_sure: bool) -> str | None:
    # A character has at most four bytes, so only the last one can be cut.
    try:
        text = data[: 4 * _SHOWN_BYTES].decode()
    except UnicodeDecodeError as error:
        if error.start < 4 * _SHOWN_BYTES - 4 or len(data) <= 4 * _SHOWN_BYTES:
            return None
        text = data[: error.start].decode()
    if is_sure or all(each.isprintable() or each in "\t\r\n" for each in text):
        return text
    return None


def _msgpack(data: bytes, *, is_sure: bool) -> str | None:
    if len(data) > 16 * _SHOWN_BYTES:
        return None
    try:
        found = msgpack.unpackb(data, strict_map_key=False, timestamp=0)
        if not is_sure and not isinstance(found, (dict, list)):
            return None  # nearly any byte is a number of msgpack
        return _as_json(plain(found))
    except (ValueError, RecursionError, TypeError):
        return None


def _hex(data: bytes, *, is_sure: bool) -> str:
    return data[:1024].hex(" ", 1)


_READERS: Final = {"json": _json, "text": _text, "msgpack": _msgpack, "hex": _hex}
