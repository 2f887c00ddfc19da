"""Keep fetch sessions in shared memory, so that any handler may serve a session.

A session remembers which partitions a client reads and from where, so that its next
request names only what has changed. Each session has a row of words, with an entry of
words for each partition (ipc/session_layout.py). The session table's mutex guards ids
and epochs. The entries belong to the request that has claimed the session's epoch,
until the next request claims it.

A fetch of too many partitions, or of a partition that does not exist, gets no session:
its client names all partitions in every request, as before KIP-227.

Source: KIP-227; kafka.server.FetchSession.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.ipc.segment import Segment
from mpbroker.ipc.session_layout import (
    ENTRY_FETCH_OFFSET,
    ENTRY_LEADER_EPOCH,
    ENTRY_MAX_BYTES,
    ENTRY_ROW,
    ENTRY_SENT_ERROR,
    ENTRY_SENT_HIGH_WATERMARK,
    ENTRY_SENT_LOG_START,
    MAX_SESSIONS,
    SESSION_CREATED,
    SESSION_ENTRY_COUNT,
    SESSION_ENTRY_WORDS,
    SESSION_EPOCH,
    SESSION_HEADER_WORDS,
    SESSION_ID,
    SESSION_MAX_ENTRIES,
    SESSION_USED,
    SESSION_USES_IDS,
    SESSION_WORDS,
)
from mpbroker.ipc.tables.shared_log_cell import SharedLogCell
from mpbroker.protocol.error_code import ErrorCode

FINAL_EPOCH: Final = -1
INITIAL_EPOCH: Final = 0
NO_SESSION: Final = 0
_MAX_EPOCH: Final = 0x7FFF_FFFF
# A session is not taken from a client that used it within this time.
_MIN_AGE_NS: Final = 120 * 1_000_000_000
TABLE_BYTES: Final = MAX_SESSIONS * SESSION_WORDS * 8


class SessionEntry(NamedTuple):
    """Describes one partition of a session, and what the last answer said of it."""

    row_id: int  # TopicRegistry.row_id()
    fetch_offset: int
    max_bytes: int
    leader_epoch: int
    sent_high_watermark: int = -1  # -1: nothing sent yet
    sent_log_start: int = -1
    sent_error: int = 0


class FetchSessions:
    """Creates, claims and updates fetch sessions in the shared table.

    A session is named by its id in requests. In this class its handle (``base``) is the
    first word of its row.

    Args:
        segment: the table, which has MAX_SESSIONS rows.
        cell: its mutex guards the table; its end counts the rows ever used.
        limit: max.incremental.fetch.session.cache.slots.
        refused: called when a fetch gets no session for lack of room.
    """

    def __init__(
        self,
        segment: Segment,
        cell: SharedLogCell,
        limit: int,
        refused: Callable[[], None] = lambda: None,
    ) -> None:
        self._refused = refused
        self._segment = segment
        self._words = segment.words
        self._cell = cell
        self._limit = max(0, min(limit, MAX_SESSIONS))

    @staticmethod
    def create_segment() -> Segment:
        return Segment.create("mpbroker-sessions", TABLE_BYTES)

    def create(
        self, entries: list[SessionEntry], now_ns: int, *, uses_ids: bool
    ) -> int:
        """Start a fetch session; return its id.

        Return NO_SESSION if there is no room for it, or ``entries`` is empty.
        """
        if not entries:
            return NO_SESSION
        if len(entries) > SESSION_MAX_ENTRIES:
            self._refused()
            return NO_SESSION
        words = self._words
        with self._cell.locked():
            base = self._free_row(now_ns)
            if base is None:
                self._refused()
                return NO_SESSION
            # Not by the module random: importing it would delay every start.
            random = int.from_bytes(os.urandom(4), "big")
            session_id = random % 0x7FFF_FFFE + 1
            # The id is cleared first and stored last: if this process is killed in
            # between, no request finds a session with parts of two.
            words[base + SESSION_ID] = NO_SESSION
            words[base + SESSION_EPOCH] = 1
            words[base + SESSION_USED] = now_ns
            words[base + SESSION_CREATED] = now_ns
            words[base + SESSION_USES_IDS] = uses_ids
            self._store(base, entries)
            words[base + SESSION_ID] = session_id
        return session_id

    def _free_row(self, now_ns: int) -> int | None:
        """Return the first word of a row for a new session.

        It is a free row. If there is none, it is the row of the session that was unused
        for longest. Return None if all sessions were used in the last two minutes.
        """
        words = self._words
        oldest, oldest_used = None, now_ns - _MIN_AGE_NS
        for base in self._rows():
            if words[base + SESSION_ID] == NO_SESSION:
                return base
            used = words[base + SESSION_USED]
            if used < oldest_used:
                oldest, oldest_used = base, used
        rows = self._cell.end
        if rows < self._limit:
            self._cell.end = rows + 1
            return rows * SESSION_WORDS
        return oldest

    def _rows(self) -> range:
        """Return where in the table each row begins that ever had a fetch session.

        To read other rows would allocate their memory.
        """
        rows = min(self._limit, self._cell.end)
        return range(0, rows * SESSION_WORDS, SESSION_WORDS)

    def find(self, session_id: int) -> int | None:
        """Return the first word of a session's row; None if no session has this id.

        Only for the request that has created the session. Other requests call `claim`.
        """
        with self._cell.locked():
            return self._find(session_id)

    def _find(self, session_id: int) -> int | None:
        if session_id == NO_SESSION:
            return None  # free rows have this id
        words = self._words
        for base in self._rows():
            if words[base + SESSION_ID] == session_id:
                return base
        return None

    def claim(
        self, session_id: int, epoch: int, now_ns: int, claimed: int, *, uses_ids: bool
    ) -> tuple[ErrorCode, int]:
        """Claim a fetch session for the request that carries its next epoch.

        Args:
            session_id: the session's id.
            epoch: the request's epoch.
            now_ns: monotonic.
            claimed: the epoch that an earlier execution of the same request claimed,
                plus 1; 0: there was none.
            uses_ids: whether the request names topics by id. The session must do the
                same.

        Returns:
            An error and -1, or NONE and the session's handle.
        """
        words = self._words
        with self._cell.locked():
            base = self._find(session_id)
            if base is None:
                return ErrorCode.FETCH_SESSION_ID_NOT_FOUND, -1
            if bool(words[base + SESSION_USES_IDS]) != uses_ids:
                return ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR, -1
            following = 1 if epoch == _MAX_EPOCH else epoch + 1
            expected = words[base + SESSION_EPOCH]
            again = claimed == epoch + 1 and expected == following
            if expected != epoch and not again:
                return ErrorCode.INVALID_FETCH_SESSION_EPOCH, -1
            words[base + SESSION_EPOCH] = following
            words[base + SESSION_USED] = now_ns
        return ErrorCode.NONE, base

    def close(self, session_id: int) -> None:
        """End a fetch session. Do nothing if it has ended already."""
        with self._cell.locked():
            base = self._find(session_id)
            if base is not None:
                self._words[base + SESSION_ID] = NO_SESSION

    # -- entries: by the request that has claimed the epoch ---------------------------

    def entries(self, base: int) -> list[SessionEntry]:
        words = self._words
        count = min(max(0, words[base + SESSION_ENTRY_COUNT]), SESSION_MAX_ENTRIES)
        first = base + SESSION_HEADER_WORDS
        flat = words[first : first + count * SESSION_ENTRY_WORDS].tolist()
        return [
            SessionEntry._make(flat[start : start + len(SessionEntry._fields)])
            for start in range(0, len(flat), SESSION_ENTRY_WORDS)
        ]

    def store(self, session_id: int, base: int, entries: list[SessionEntry]) -> bool:
        """Replace a fetch session's entries, which are one for each partition.

        Return False, and store nothing, if they are too many or the session has ended.
        """
        if len(entries) > SESSION_MAX_ENTRIES:
            return False
        with self._cell.locked():
            if self._words[base + SESSION_ID] != session_id:
                return False
            self._store(base, entries)
        return True

    def _store(self, base: int, entries: list[SessionEntry]) -> None:
        words = self._words
        word = base + SESSION_HEADER_WORDS
        for entry in entries:
            words[word + ENTRY_ROW] = entry.row_id
            words[word + ENTRY_FETCH_OFFSET] = entry.fetch_offset
            words[word + ENTRY_MAX_BYTES] = entry.max_bytes
            words[word + ENTRY_LEADER_EPOCH] = entry.leader_epoch
            words[word + ENTRY_SENT_HIGH_WATERMARK] = entry.sent_high_watermark
            words[word + ENTRY_SENT_LOG_START] = entry.sent_log_start
            words[word + ENTRY_SENT_ERROR] = entry.sent_error
            word += SESSION_ENTRY_WORDS
        words[base + SESSION_ENTRY_COUNT] = len(entries)

    def sent(self, base: int, index: int) -> tuple[int, int, int]:
        """Return the high watermark, log start and error that ``note_sent`` stored."""
        word = base + SESSION_HEADER_WORDS + index * SESSION_ENTRY_WORDS
        words = self._words
        return (
            words[word + ENTRY_SENT_HIGH_WATERMARK],
            words[word + ENTRY_SENT_LOG_START],
            words[word + ENTRY_SENT_ERROR],
        )

    def note_sent(
        self,
        session_id: int,
        base: int,
        index: int,
        high_watermark: int,
        log_start: int,
        error: int,
    ) -> None:
        """Store the offsets and the error that the last answer had for a partition.

        Store nothing if the session has ended: another may have its row by now.
        """
        word = base + SESSION_HEADER_WORDS + index * SESSION_ENTRY_WORDS
        words = self._words
        with self._cell.locked():
            if words[base + SESSION_ID] != session_id:
                return
            words[word + ENTRY_SENT_HIGH_WATERMARK] = high_watermark
            words[word + ENTRY_SENT_LOG_START] = log_start
            words[word + ENTRY_SENT_ERROR] = error


assert tuple(SessionEntry._fields) == (
    "row_id",
    "fetch_offset",
    "max_bytes",
    "leader_epoch",
    "sent_high_watermark",
    "sent_log_start",
    "sent_error",
)
assert (ENTRY_ROW, ENTRY_FETCH_OFFSET, ENTRY_MAX_BYTES, ENTRY_LEADER_EPOCH) == (
    0,
    1,
    2,
    3,
)
