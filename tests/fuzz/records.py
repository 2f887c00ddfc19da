"""Fuzz the compiled loops over records beside their Python twins.

    python -m tests.fuzz.records --seconds 10

No broker runs: the walk over records, the reader of columns and the encoder get
records with damage, counts that lie, and fields that are none. The compiled function
must return what the twin returns, or refuse what the twin refuses. With a build that
AddressSanitizer watches, any access outside the records ends the process.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from random import Random
from typing import Any, Final

from mpbroker.protocol.records import record_columns, record_encode, record_walk
from mpbroker.protocol.records.batch_header import RecordBatchError
from mpbroker.protocol.records.record_columns import (
    EncodedRecords,
    read_columns_in_python,
)
from mpbroker.protocol.records.record_encode import encode_records_in_python
from mpbroker.protocol.records.record_walk import NO_FAULT, walk_records_in_python

_LENGTHS: Final = (0, 1, 6, 62, 63, 64, 65, 200, 8100, 8130, 8192, 20_000)
_TIMES: Final = (0, 1, 1_700_000_000_000, 2**62, -1, -(2**62))
_HOSTILE: Final = (
    b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",  # the longest varint
    b"\xff\xff\xff\xff\x0f",  # -2^31
    b"\xfe\xff\xff\xff\x0f",  # 2^31 - 1
    b"\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x00",  # too long
    b"\x01",  # -1
    b"\x80",
)
_COUNTS: Final = (-1, 0, 1, 2, 100, 2**31 - 1, -(2**31))
# They stand where bytes, numbers or tuples belong.
_STRANGERS: Final[tuple[Any, ...]] = (
    *(None, "text", 7, 1.5, b"b", bytearray(b"x"), 2**63, -(2**70), True, object()),
    *((), (b"h",), [b"h", b"v"], ((b"h", b"v", b"w"),), ((None, b"v"),), [None]),
)


class DifferentTwinsError(Exception):
    """The compiled function and its twin do not agree."""


def run(rng: Random, number: int) -> None:
    """Play one case.

    Raises:
        DifferentTwinsError: the twins do not agree.
    """
    records = [_record(rng) for _ in range(rng.choice([0, 1, 2, 3, 9]))]
    if number % 3 == 0:
        _encode(rng, records)
        return
    data = bytearray(encode_records_in_python(records)[0])
    for _ in range(rng.choice([0, 1, 1, 2, 5])):
        _damage(rng, data)
    count = rng.choice([len(records), len(records), *_COUNTS])
    _compare_reading(bytes(data), count, rng)


def _record(rng: Random) -> tuple[int, Any, Any, Any]:
    def field() -> bytes | None:
        return None if rng.random() < 0.2 else rng.randbytes(rng.choice(_LENGTHS[:9]))

    headers = tuple((b"name", field()) for _ in range(rng.choice([0, 0, 0, 1, 2, 70])))
    value = rng.randbytes(rng.choice(_LENGTHS)) if rng.random() < 0.1 else field()
    return rng.choice(_TIMES[:4]), field(), value, headers


def _damage(rng: Random, data: bytearray) -> None:
    at = rng.randint(0, len(data))
    match rng.randint(0, 3):
        case 0:
            del data[at:]
        case 1:
            data[at:at] = rng.choice(_HOSTILE)
        case 2:
            data[at : at + 1] = rng.choice(_HOSTILE)
        case _:
            if at < len(data):
                data[at] ^= 1 << rng.randint(0, 7)


def _compare_reading(data: bytes, count: int, rng: Random) -> None:
    start = rng.choice([0, 0, 0, len(data), rng.randint(0, len(data))])
    walked = record_walk.walk_records(data, start, count, -1)
    expected = walk_records_in_python(data, start, count, -1)
    if tuple(walked) != tuple(expected):
        raise DifferentTwinsError(f"walk: {walked}, and by hand {expected}")
    bounds = data, count, rng.choice([-1, 0, 1, 5, 2**31])
    times = rng.choice([0, 7, 2**40]), rng.choice(_TIMES), rng.random() < 0.5
    parts = [EncodedRecords(*bounds, *times)] * rng.choice([1, 1, 1, 2])
    arguments = parts, rng.random() < 0.7
    try:
        by_hand: Any = read_columns_in_python(*arguments)
    except (RecordBatchError, OverflowError):
        by_hand = None
    try:
        columns: Any = record_columns._read_columns(*arguments)
    except OverflowError:
        columns = None
    if columns is not None and columns[0] != NO_FAULT:
        columns = None
    if columns != by_hand:
        raise DifferentTwinsError(f"columns: {columns}, and by hand {by_hand}")


def _encode(rng: Random, records: list[tuple[int, Any, Any, Any]]) -> None:
    expected = encode_records_in_python(records)
    encoded = record_encode.encode_records(records)
    if encoded != expected:
        raise DifferentTwinsError(f"encoded {encoded}, and by hand {expected}")
    if not records:
        return
    strange: list[Any] = [list(record) for record in records]
    record = rng.choice(strange)
    record[rng.randint(0, 3)] = rng.choice(_STRANGERS)
    if rng.random() < 0.2:
        record.append(b"more")
    hostile: Any = [tuple(each) for each in strange]
    if rng.random() < 0.1:
        hostile = rng.choice([None, (), tuple(hostile), [rng.choice(_STRANGERS)]])
    for encode in (record_encode.encode_records, record_encode.encode_batch):
        try:
            encode(hostile)
        except (TypeError, OverflowError):
            pass


def main(argv: Sequence[str]) -> int:
    """Run until the time is over; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.records")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--seed", type=int, help="default: the time")
    arguments = parser.parse_args(argv)
    seed = int(time.time()) if arguments.seed is None else arguments.seed
    deadline = time.monotonic() + arguments.seconds
    number = 0
    while time.monotonic() < deadline:
        try:
            run(Random(f"{seed}:{number}"), number)
        except BaseException:
            print(f"FAILED: case {number} of seed {seed}", file=sys.stderr)
            raise
        number += 1
    print(f"seed {seed}: {number} cases of records, the twins agree")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
