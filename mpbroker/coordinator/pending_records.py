"""PendingRecords: the offsets of open transactions among the records of a shard.

A log has records in their order, and a marker says what becomes of those of a producer.
A shard has one value for each key. So an offset that a transaction has written gets a
key of its own, of the producer and the offset's key, until the transaction ends:

    key      int16 -1, the producer's id as int64, then the offset's key
    value    the producer's epoch as int16, the offset's number as int64, a byte that is
             1 if a later record of the same offset counts, then the offset's value

Kafka has no keys of version -1, and an mpbroker that does not know them skips them.

The numbers tell which of two transactions has written an offset later. What was written
outside of any transaction, and later, outdoes the offsets of all open transactions.
`GroupOffsets` does the same in memory.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Final

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.coordinator.coordinator_topic import LoadedRecord
from mpbroker.coordinator.outbox import TransactionalRecord

_KEY: Final = struct.Struct(">hq")
_VALUE: Final = struct.Struct(">hq?")
_VERSION: Final = -1
_PREFIX: Final = struct.pack(">h", _VERSION)

Records = list[tuple[bytes, bytes | None]]


class _Pending(NamedTuple):
    epoch: int
    number: int
    is_outdone: bool
    value: bytes


class PendingRecords:
    """Knows a shard's offsets of open transactions, and makes their records."""

    def __init__(self) -> None:
        # By the offset's key, then by the producer.
        self._offsets: dict[bytes, dict[int, _Pending]] = {}
        self._count = 0

    def __bool__(self) -> bool:
        return bool(self._offsets)

    def load(self, records: Iterable[tuple[bytes, bytes]]) -> list[LoadedRecord]:
        """Take a shard's records; return them in an order in which they can be applied.

        The last ones count. An offset that was outdone comes before what has outdone
        it.
        """
        plain: list[LoadedRecord] = []
        pending: list[tuple[_Pending, LoadedRecord]] = []
        for key, value in records:
            if not key.startswith(_PREFIX):
                plain.append(LoadedRecord(key, value, -1, None))
                continue
            _, producer_id = _KEY.unpack_from(key)
            offset_key = key[_KEY.size :]
            epoch, number, is_outdone = _VALUE.unpack_from(value)
            found = _Pending(epoch, number, is_outdone, value[_VALUE.size :])
            self._offsets.setdefault(offset_key, {})[producer_id] = found
            self._count = max(self._count, found.number + 1)
            pending.append(
                (found, LoadedRecord(offset_key, found.value, producer_id, None))
            )
        pending.sort(key=lambda each: each[0].number)
        return [
            *(record for found, record in pending if found.is_outdone),
            *plain,
            *(record for found, record in pending if not found.is_outdone),
        ]

    def put(self, records: Sequence[TransactionalRecord]) -> Records:
        """Return the records for offsets that transactions write."""
        made: Records = []
        for each in records:
            found = _Pending(each.producer_epoch, self._count, False, each.value)
            self._count += 1
            self._offsets.setdefault(each.key, {})[each.producer_id] = found
            made.append(_record(each.producer_id, each.key, found))
        return made

    def outdo(self, records: Iterable[tuple[bytes, bytes | None]]) -> Records:
        """Return what is to be written with records that are in no transaction.

        An offset that is deleted is not to come back with the end of a transaction.
        """
        made: Records = []
        if not self._offsets:
            return made
        for key, value in records:
            if value is None:
                of_key = self._offsets.pop(key, {})
                made += [(_key(producer_id, key), None) for producer_id in of_key]
            else:
                made += self._outdo(key, self._count)
        return made

    def _outdo(self, key: bytes, before: int) -> Records:
        of_key = self._offsets.get(key, {})
        made: Records = []
        for producer_id, found in of_key.items():
            if found.number < before and not found.is_outdone:
                of_key[producer_id] = found._replace(is_outdone=True)
                made.append(_record(producer_id, key, of_key[producer_id]))
        return made

    def end(self, producer_id: int, *, commit: bool) -> Records:
        """Return the records that commit or drop a producer's offsets.

        There is one at least, also if the producer has no offsets here.
        """
        made: Records = [(_key(producer_id, b""), None)]
        for key in [key for key, each in self._offsets.items() if producer_id in each]:
            found = self._offsets[key].pop(producer_id)
            made.append((_key(producer_id, key), None))
            if commit and not found.is_outdone:
                made += self._outdo(key, found.number)
                made.append((key, found.value))
            if not self._offsets[key]:
                del self._offsets[key]
        return made


def _key(producer_id: int, key: bytes) -> bytes:
    return _KEY.pack(_VERSION, producer_id) + key


def _record(producer_id: int, key: bytes, found: _Pending) -> tuple[bytes, bytes]:
    head = _VALUE.pack(found.epoch, found.number, found.is_outdone)
    return _key(producer_id, key), head + found.value
