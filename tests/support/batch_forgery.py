"""Record batches that say what a test wants them to say, true or not."""

from __future__ import annotations

from mpbroker.protocol.records.record_batch import BatchHeader, compute_crc, pack_header

NOW_MS = 1_700_000_000_000


def varint(value: int, min_bytes: int = 1) -> bytes:
    """Zig-zag; ``min_bytes`` pads with continuation bytes that add nothing."""
    raw = (value << 1) ^ (value >> 63)
    out = bytearray()
    while raw > 0x7F or len(out) + 1 < min_bytes:
        out.append(raw & 0x7F | 0x80)
        raw >>= 7
    out.append(raw)
    return bytes(out)


def sized(value: bytes | None) -> bytes:
    return varint(-1) if value is None else varint(len(value)) + value


def record(
    index: int,
    *,
    timestamp_delta: bytes = b"\x00",
    offset_delta: bytes | None = None,
    key: bytes | None = b"\x02k",
    value: bytes = b"\x02v",
    headers: bytes = b"\x00",
    length: bytes | None = None,
) -> bytes:
    """A record of already encoded fields; ``length`` overrides the true one."""
    fields = (
        b"\x00",
        timestamp_delta,
        varint(index) if offset_delta is None else offset_delta,
        b"\x01" if key is None else key,
        value,
        headers,
    )
    body = b"".join(fields)
    return (varint(len(body)) if length is None else length) + body


def batch(payload: bytes, record_count: int, **changes: int) -> bytes:
    """A batch around ``payload``: every field plausible but the ``changes``."""
    header = BatchHeader(
        base_offset=0,
        batch_length=0,
        partition_leader_epoch=-1,
        magic=2,
        crc=0,
        attributes=0,
        last_offset_delta=record_count - 1,
        base_timestamp=NOW_MS,
        max_timestamp=NOW_MS,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        record_count=record_count,
    )._replace(**changes)
    return bytes(pack_header(header, payload)) + payload


def with_true_crc(data: bytes) -> bytes:
    """Mend the CRC of a batch that was changed on the way."""
    return data[:17] + compute_crc(data).to_bytes(4, "big") + data[21:]
