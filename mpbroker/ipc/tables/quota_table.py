"""The quota table: rates of clients, counted by all handlers together.

A row counts one QuotaKind for one user, client id or both. It has Kafka's windowed
samples: charges are added to the current sample until it is as old as a window, then
the oldest sample becomes the current one. The rate is the sum of the samples, divided
by the time since the oldest began; windows without a sample count as time without
charges. One sample more is kept than is counted, since the oldest mostly began before
the counted windows. Changes of topics are counted by a token bucket instead.

A row's mutex guards it, for about ten loads and three stores. If a process is killed
there, each number is still valid by itself, and one charge is too many or missing. So
there is nothing to repair.

There are few rows, so clients share them over time: a client's key determines the
PROBES rows that it may use. A row that was not charged for as long as its samples count
may be given to another client. Then its generation changes, which is checked under the
mutex, so a process that remembers the row for the old client notices. If other clients
use all of a client's rows, the client is not counted, and the header counts this:
thousands of clients a second with quotas of their own are too many.

The C code that does the same as ``charge`` is native/ipc/quota_table.c.

Source: Kafka's SampledStat, Rate, TokenBucket, QuotaUtils.throttleTime.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from struct import Struct
from typing import Final

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.ipc.quota_layout import (
    MAX_QUOTA_ROWS,
    MAX_QUOTA_SAMPLES,
    QUOTA_CHARGED,
    QUOTA_CURRENT,
    QUOTA_GENERATION,
    QUOTA_KEY,
    QUOTA_KIND,
    QUOTA_REFUSED,
    QUOTA_ROW_MUTEX,
    QUOTA_ROW_WORDS,
    QUOTA_SAMPLE_WORDS,
    QUOTA_SAMPLES,
    QUOTA_SEGMENT_WORDS,
    QUOTA_TABLE_MUTEX,
    QUOTA_TEXT,
    QUOTA_TEXT_LENGTH,
    QUOTA_THROTTLE_MS,
    QUOTA_THROTTLES,
    QUOTA_TOKENS,
    QUOTA_TOKENS_AT,
    QUOTA_USED,
    quota_row,
)
from mpbroker.ipc.robust_mutex import RobustMutex
from mpbroker.ipc.segment import Segment

PROBES: Final = 64
_TEXT_BYTES: Final = (QUOTA_SAMPLES - QUOTA_TEXT) * 8
_KEY: Final = Struct("=qq")
_DOUBLE: Final = Struct("=d")
_WORD: Final = Struct("=q")
_NS_PER_S: Final = 1_000_000_000
_NS_PER_MS: Final = 1_000_000
_MAX_KNOWN: Final = 10_000
_START: Final = 0
_VALUE: Final = 1
_LAST: Final = 2
GONE: Final = -1


class QuotaKind(IntEnum):
    """The kinds of quotas, and their units."""

    PRODUCE = 0  # bytes
    FETCH = 1  # bytes
    REQUEST = 2  # ns of processes' time
    CONTROLLER_MUTATION = 3  # partitions


class QuotaRow:
    """A client's row of the quota table: its rate for one kind of quota.

    It may be used until another client gets the row; see `QuotaTable.is_current`.
    """

    __slots__ = (
        "_at",
        "_mutex",
        "_samples",
        "_window_ns",
        "_words",
        "generation",
        "row",
    )

    def __init__(
        self, segment: Segment, row: int, generation: int, samples: int, window_ns: int
    ) -> None:
        self._words = segment.words
        self._at = quota_row(row)
        self._mutex = RobustMutex(segment, self._at + QUOTA_ROW_MUTEX)
        self._samples = samples
        self._window_ns = window_ns
        self.row = row
        self.generation = generation

    def charge(self, amount: int, bound: float, now_ns: int) -> int:
        """Charge an amount to a client's quota, or refund it if it is negative.

        Args:
            amount: in the unit of the row's QuotaKind.
            bound: the quota, in the same unit a second.
            now_ns: monotonic.

        Returns:
            The ms that the client must wait to be within its quota again; 0 if it is
            within its quota; GONE if another client has the row, and nothing was
            counted.
        """
        words, at = self._words, self._at
        self._mutex.acquire()
        try:
            if words[at + QUOTA_GENERATION] != self.generation:
                return GONE
            self._record(amount, now_ns)
            total, oldest = self._total(now_ns)
            throttle_ms = self._throttle_ms(total, oldest, bound, now_ns)
            if throttle_ms:
                self._note_throttle(throttle_ms)
            return throttle_ms
        finally:
            self._mutex.release()

    def _note_throttle(self, throttle_ms: int) -> None:
        words, at = self._words, self._at
        words[at + QUOTA_THROTTLES] += 1
        words[at + QUOTA_THROTTLE_MS] += throttle_ms

    def _record(self, amount: int, now_ns: int) -> None:
        words, at = self._words, self._at
        current = words[at + QUOTA_CURRENT]
        if not 0 <= current <= self._samples:
            current = 0  # it was written with other settings
        sample = at + QUOTA_SAMPLES + current * QUOTA_SAMPLE_WORDS
        start = words[sample + _START]
        if not start or now_ns - start >= self._window_ns:
            if start:
                current = (current + 1) % (self._samples + 1)
                sample = at + QUOTA_SAMPLES + current * QUOTA_SAMPLE_WORDS
            # A start of 0 says that the sample is empty: a process that is killed in
            # between leaves no sample with words of two windows.
            words[sample + _START] = 0
            words[sample + _VALUE] = 0
            words[sample + _LAST] = now_ns
            words[sample + _START] = now_ns
            words[at + QUOTA_CURRENT] = current
        words[sample + _VALUE] += amount
        words[sample + _LAST] = now_ns
        words[at + QUOTA_USED] = now_ns
        words[at + QUOTA_CHARGED] += amount

    def _total(self, now_ns: int) -> tuple[int, int]:
        """Return the charges in the counted windows, and when the oldest began.

        The charges are added up; the time is in ns.
        """
        first = self._at + QUOTA_SAMPLES
        end = first + (self._samples + 1) * QUOTA_SAMPLE_WORDS
        samples = self._words[first:end].tolist()
        since = now_ns - self._samples * self._window_ns
        total, oldest = 0, now_ns
        for place in range(0, len(samples), QUOTA_SAMPLE_WORDS):
            start = samples[place]
            if start and samples[place + _LAST] > since:
                total += samples[place + _VALUE]
                oldest = min(oldest, start)
        return total, oldest

    def _throttle_ms(self, total: int, oldest: int, bound: float, now_ns: int) -> int:
        elapsed = elapsed_ns(now_ns - oldest, self._samples, self._window_ns)
        excess = total * _NS_PER_S / elapsed - bound
        if excess <= 0:
            return 0
        return int(excess / bound * (elapsed / _NS_PER_MS) + 0.5)

    def mutate(
        self, permits: float, bound: float, burst: float, now_ns: int, *, strict: bool
    ) -> tuple[bool, int]:
        """Take permits out of the row's token bucket.

        Args:
            permits: how many tokens to take.
            bound: tokens that are added a second.
            burst: the capacity of the bucket.
            now_ns: monotonic.
            strict: take none while there is a debt; otherwise the debt grows.

        Returns:
            Whether the permits were taken, and the ms until the debt is paid; (True,
            GONE) if another client has the row, and nothing was counted.
        """
        words, at = self._words, self._at
        self._mutex.acquire()
        try:
            if words[at + QUOTA_GENERATION] != self.generation:
                return True, GONE
            tokens = self._tokens(bound, burst, now_ns)
            taken = not strict or tokens >= 0
            if taken:
                tokens = min(burst, tokens - permits)
                words[at + QUOTA_TOKENS] = _WORD.unpack(_DOUBLE.pack(tokens))[0]
                words[at + QUOTA_TOKENS_AT] = words[at + QUOTA_USED] = now_ns
                words[at + QUOTA_CHARGED] += int(permits)
            if tokens >= 0 or (strict and taken):
                return taken, 0
            throttle_ms = int(-tokens / bound * 1000 + 0.5)
            self._note_throttle(throttle_ms)
            return taken, throttle_ms
        finally:
            self._mutex.release()

    def _tokens(self, bound: float, burst: float, now_ns: int) -> float:
        words, at = self._words, self._at
        since = words[at + QUOTA_TOKENS_AT]
        if not since:
            return burst
        tokens: float = _DOUBLE.unpack(_WORD.pack(words[at + QUOTA_TOKENS]))[0]
        return min(burst, tokens + (now_ns - since) / _NS_PER_S * bound)


class QuotaTable:
    """The quota table, as one process sees it.

    Args:
        segment: the table.
        samples: quota.window.num.
        window_ns: quota.window.size.seconds, in ns.
    """

    def __init__(self, segment: Segment, samples: int, window_ns: int) -> None:
        self._segment = segment
        self._words = segment.words
        self._mutex = RobustMutex(segment, QUOTA_TABLE_MUTEX)
        self.samples = min(samples, MAX_QUOTA_SAMPLES)
        self.window_ns = window_ns
        self._known: dict[tuple[int, str, str], QuotaRow] = {}

    @staticmethod
    def create_segment() -> Segment:
        segment = Segment.create("mpbroker-quotas", QUOTA_SEGMENT_WORDS * 8)
        RobustMutex.initialise(segment, QUOTA_TABLE_MUTEX)
        return segment

    @property
    def view(self) -> memoryview:
        """The bytes of the whole table, for the C code."""
        return self._segment.view

    def find(
        self, kind: QuotaKind, user: str, client_id: str, now_ns: int
    ) -> QuotaRow | None:
        """Return a client's row for a kind of quota; give it a row if it has none.

        Returns:
            None if there is no room for the client.
        """
        place = (int(kind), user, client_id)
        row = self._known.get(place)
        if row is not None and self.is_current(row):
            return row
        key = _key(place)
        with self._mutex:
            row = self._probe(key, place, now_ns)
        if row is not None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[place] = row
        return row

    def is_current(self, row: QuotaRow) -> bool:
        """Return whether a row still belongs to the client for which it was found."""
        word = quota_row(row.row) + QUOTA_GENERATION
        current: bool = self._words[word] == row.generation
        return current

    def _probe(
        self, key: tuple[int, int], place: tuple[int, str, str], now_ns: int
    ) -> QuotaRow | None:
        words = self._words
        free, longest = -1, self.samples * self.window_ns
        for step in range(PROBES):
            row = (key[0] + step) % MAX_QUOTA_ROWS
            at = quota_row(row)
            generation = words[at + QUOTA_GENERATION]
            if generation and not generation & 1:
                if (words[at + QUOTA_KEY], words[at + QUOTA_KEY + 1]) == key:
                    return self._row(row, generation)
                idle = now_ns - words[at + QUOTA_USED]
                if idle > longest:
                    free, longest = row, idle
            else:
                free, longest = row, 1 << 62
        if free < 0:
            words[QUOTA_REFUSED] += 1
            return None
        return self._give(free, key, place, now_ns)

    def _row(self, row: int, generation: int) -> QuotaRow:
        return QuotaRow(self._segment, row, generation, self.samples, self.window_ns)

    def _give(
        self, row: int, key: tuple[int, int], place: tuple[int, str, str], now_ns: int
    ) -> QuotaRow:
        """Give a row to a client, under the mutex of the row.

        The caller holds the mutex of the table.
        """
        words, at = self._words, quota_row(row)
        if not words[at + QUOTA_GENERATION]:
            RobustMutex.initialise(self._segment, at + QUOTA_ROW_MUTEX)
        with RobustMutex(self._segment, at + QUOTA_ROW_MUTEX):
            # Odd, which means free, until all words are the new client's.
            words[at + QUOTA_GENERATION] |= 1
            for word in range(at + QUOTA_KEY, at + QUOTA_ROW_WORDS):
                words[word] = 0
            words[at + QUOTA_KEY], words[at + QUOTA_KEY + 1] = key
            words[at + QUOTA_KIND] = place[0]
            words[at + QUOTA_USED] = now_ns
            text = "\0".join(place[1:]).encode(errors="replace")[:_TEXT_BYTES]
            start = (at + QUOTA_TEXT) * 8
            self._segment.view[start : start + len(text)] = text
            words[at + QUOTA_TEXT_LENGTH] = len(text)
            words[at + QUOTA_GENERATION] += 1
        return self._row(row, words[at + QUOTA_GENERATION])


def elapsed_ns(since_oldest_ns: int, samples: int, window_ns: int) -> int:
    """Return the ns by which to divide a sum of samples to get a rate.

    It is the time since the oldest sample began, but at least ``samples`` - 1 windows.
    """
    missing = samples - 1 - since_oldest_ns // window_ns
    return max(since_oldest_ns + max(missing, 0) * window_ns, _NS_PER_MS)


def _key(place: tuple[int, str, str]) -> tuple[int, int]:
    # Imported here, since it loads OpenSSL, which is not needed without quotas.
    from hashlib import blake2b

    text = "\0".join((str(place[0]), *place[1:]))
    digest = blake2b(text.encode(errors="replace"), digest_size=16).digest()
    high, low = _KEY.unpack(digest)
    return high, low


class QuotaReading(NamedTuple):
    """A client's values for one kind of quota, for metrics."""

    kind: int
    user: str
    client_id: str
    rate: float  # a second, in the unit of its kind; for a token bucket, its tokens
    charged: int
    throttles: int
    throttle_ms: int


def read_quotas(
    segment: Segment, samples: int, window_ns: int, now_ns: int, idle_ns: int
) -> Iterator[QuotaReading]:
    """Yield the values of all clients that were charged within the last ``idle_ns``."""
    words = segment.words
    for row in range(MAX_QUOTA_ROWS):
        at = quota_row(row)
        generation = words[at + QUOTA_GENERATION]
        if (
            not generation
            or generation & 1
            or now_ns - words[at + QUOTA_USED] > idle_ns
        ):
            continue
        reader = QuotaRow(segment, row, generation, samples, window_ns)
        kind = words[at + QUOTA_KIND]
        if kind == QuotaKind.CONTROLLER_MUTATION:
            (rate,) = _DOUBLE.unpack(_WORD.pack(words[at + QUOTA_TOKENS]))
        else:
            total, oldest = reader._total(now_ns)
            rate = total * _NS_PER_S / elapsed_ns(now_ns - oldest, samples, window_ns)
        start = (at + QUOTA_TEXT) * 8
        length = min(words[at + QUOTA_TEXT_LENGTH], _TEXT_BYTES)
        text = bytes(segment.view[start : start + length]).decode(errors="replace")
        if (
            length == _TEXT_BYTES
        ):  # cut off: add a part of the key to tell clients apart
            text += f"...{words[at + QUOTA_KEY] & 0xFFFF_FFFF:08x}"
        user, _, client_id = text.partition("\0")
        yield QuotaReading(
            kind,
            user,
            client_id,
            rate,
            words[at + QUOTA_CHARGED],
            words[at + QUOTA_THROTTLES],
            words[at + QUOTA_THROTTLE_MS],
        )
