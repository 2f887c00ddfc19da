"""Record batches that lie: about their CRC, their counts, or their inside."""

from __future__ import annotations

import gzip
import struct
from random import Random

import crc32c

from tests.bench import wire

# Fixed, so that a scenario is the same every time: the topic must keep old records.
TIMESTAMP_MS = 1_700_000_000_000

# Where the fields of a magic-2 batch lie.
_LENGTH = 8
_MAGIC = 16
_CRC = 17
_ATTRIBUTES = 21
_LAST_OFFSET_DELTA = 23
_COUNT = 57
_RECORDS = 61


def corrupt_batch(rng: Random) -> bytes:
    """Return a batch that no broker may append, or one that only looks so."""
    records = [
        wire.RecordSpec(rng.randbytes(rng.randint(0, 50)), rng.choice([None, b"k"]))
        for _ in range(rng.randint(1, 5))
    ]
    batch = bytearray(wire.record_batch(records, timestamp_ms=TIMESTAMP_MS))
    match rng.randint(0, 8):
        case 0:
            batch[rng.randint(_ATTRIBUTES, len(batch) - 1)] ^= 1 << rng.randint(0, 7)
        case 1:
            batch[rng.randint(0, len(batch) - 1)] ^= 1 << rng.randint(0, 7)
            _mend_crc(batch)
        case 2:
            struct.pack_into(">i", batch, _COUNT, rng.choice([0, -1, 2, 2**31 - 1]))
            _mend_crc(batch)
        case 3:
            delta = rng.choice([-1, 0, 100, 2**31 - 1])
            struct.pack_into(">i", batch, _LAST_OFFSET_DELTA, delta)
            _mend_crc(batch)
        case 4:
            struct.pack_into(">h", batch, _ATTRIBUTES, rng.randint(0, 255))
            _mend_crc(batch)
        case 5:
            length = rng.choice([0, -1, 48, 49, 2**31 - 1, len(batch)])
            struct.pack_into(">i", batch, _LENGTH, length)
        case 6:
            batch[_MAGIC] = rng.choice([0, 1, 3, 0xFF])
        case 7:
            return bytes(batch[: rng.randint(0, len(batch) - 1)])
        case _:
            return _bomb(rng)
    return bytes(batch)


def _bomb(rng: Random) -> bytes:
    """A few KB that inflate to megabytes, or to nothing that makes sense."""
    inside = bytes(rng.choice([1 << 20, 8 << 20])) if rng.random() < 0.5 else b"x" * 40
    return wire.batch_of(
        gzip.compress(inside, mtime=0),
        rng.choice([1, 1000]),
        attributes=1,
        timestamp_ms=TIMESTAMP_MS,
    )


def _mend_crc(batch: bytearray) -> None:
    struct.pack_into(">I", batch, _CRC, crc32c.crc32c(bytes(batch[_ATTRIBUTES:])))
