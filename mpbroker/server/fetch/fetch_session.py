"""Keep fetch sessions in shared memory, so that any handler may serve a session.

A session remembers which partitions a client reads and from where, so that its next
request names only what has changed. Each session has a row of words, with an entry of
words for each partition (ipc/session_layout.py). The session table's mutex guards ids
and epochs. The entries belong to the request that has claimed the session's epoch,
until the next request claims it.

The row also has the session's topics, by name or by id as its client names them. So a
partition that does not exist has a place in the session, and is served when it is
created. Topics are only added, behind those that are there, before an entry refers to
them: a process that is killed leaves no entry with a wrong topic.

A fetch of too many partitions or topics gets no session: its client names all
partitions in every request, as before KIP-227.

Source: KIP-227; kafka.server.FetchSession.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from typing import Final

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.ipc.segment import Segment
from mpbroker.ipc.session_layout import (
    ENTRY_FETCH_OFFSET,
    ENTRY_LEADER_EPOCH,
    ENTRY_MAX_BYTES,
    ENTRY_PARTITION,
    ENTRY_ROW,
    ENTRY_SENT_ERROR,
    ENTRY_SENT_HIGH_WATERMARK,
    ENTRY_SENT_LOG_START,
    MAX_SESSIONS,
    PLACE_BITS,
    SESSION_CREATED,
    SESSION_ENTRY_COUNT,
    SESSION_ENTRY_WORDS,
    SESSION_EPOCH,
    SESSION_HEADER_WORDS,
    SESSION_ID,
    SESSION_MAX_ENTRIES,
    SESSION_TOPICS,
    SESSION_TOPICS_END,
    SESSION_TOPICS_WORDS,
    SESSION_USED,
    SESSION_USES_IDS,
    SESSION_WORDS,
)
from mpbroker.ipc.tables.shared_log_cell import SharedLogCell
from mpbroker.protocol.error_code import ErrorCode

FINAL_EPOCH: Final = -1
INITIAL_EPOCH: Final = 0
NO_SESSION: Final = 0
NO_ID: Final = bytes(16)
_MAX_EPOCH: Final = 0x7FFF_FFFF
# A session is not taken from a client that used it within this time.
_MIN_AGE_NS: Final = 120 * 1_000_000_000
# The words of a topic: its id, the length of its name, and from here on its name.
_ID_WORDS: Final = struct.Struct("=qq")
_NAME: Final = 3
TABLE_BYTES: Final = MAX_SESSIONS * SESSION_WORDS * 8


class SessionTopic(NamedTuple):
    """Describes a topic of a session."""

    name: str  # "": it is named by id, and did not exist when it came to the session
    topic_id: bytes  # 16 bytes; NO_ID: its client names it by name

    @property
    def key(self) -> bytes | str:
        return self.name if self.topic_id == NO_ID else self.topic_id

    @property
    def words(self) -> int:
        """How many words it takes in a session's row."""
        return _NAME + _words_of(len(self.name.encode()))


class SessionEntry(NamedTuple):
    """Describes one partition of a session, and what the last answer said of it."""

    row_id: int  # TopicRegistry.row_id(); NO_ROW: it did not exist
    fetch_offset: int
    max_bytes: int
    leader_epoch: int
    sent_high_watermark: int = -1  # -1: nothing sent yet
    sent_log_start: int = -1
    sent_error: int = 0
    named: int = 0  # the partition's number, and its topic's place (session_layout.py)

    @property
    def partition(self) -> int:
        return self.named >> PLACE_BITS

    @property
    def place(self) -> int:
        """Where the row has its topic; see FetchSessions.topic()."""
        return self.named & (1 << PLACE_BITS) - 1


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
        self,
        entries: list[SessionEntry],
        topics: SessionTopics,
        now_ns: int,
        *,
        uses_ids: bool,
    ) -> int:
        """Start a fetch session; return its id.

        Return NO_SESSION if there is no room for it, or ``entries`` is empty.

        Args:
            entries: the session's partitions.
            topics: the topics that the entries refer to.
            now_ns: monotonic.
            uses_ids: whether the client names topics by id.
        """
        if not entries:
            return NO_SESSION
        if len(entries) > SESSION_MAX_ENTRIES or topics.end > SESSION_TOPICS_WORDS:
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
            words[base + SESSION_TOPICS_END] = 0
            self._store(base, entries, topics)
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

    def topic(self, base: int, place: int) -> SessionTopic:
        """Return the topic that an entry refers to."""
        return _topic_at(self._topic_words(base), place)

    def topics(self, base: int) -> SessionTopics:
        """Return a session's topics, to which others may be added."""
        end = min(max(0, self._words[base + SESSION_TOPICS_END]), SESSION_TOPICS_WORDS)
        return SessionTopics(self._topic_words(base)[:end])

    def _topic_words(self, base: int) -> memoryview:
        first = base + SESSION_TOPICS
        return self._words[first : first + SESSION_TOPICS_WORDS]

    def store(
        self,
        session_id: int,
        base: int,
        entries: list[SessionEntry],
        topics: SessionTopics | None = None,
    ) -> bool:
        """Replace a fetch session's entries, which are one for each partition.

        Return False, and store nothing, if they are too many or the session has ended.

        Args:
            session_id: the session's id.
            base: its handle.
            entries: the entries.
            topics: topics() of the session, with what was added; None: no topic is new.
        """
        if len(entries) > SESSION_MAX_ENTRIES:
            return False
        if topics is not None and topics.end > SESSION_TOPICS_WORDS:
            return False
        with self._cell.locked():
            if self._words[base + SESSION_ID] != session_id:
                return False
            self._store(base, entries, topics)
        return True

    def _store(
        self, base: int, entries: list[SessionEntry], topics: SessionTopics | None
    ) -> None:
        words = self._words
        if topics is not None and topics.added:
            # Before the entries: an entry never refers to a topic that is not there.
            first = base + SESSION_TOPICS + topics.end - len(topics.added)
            for number, added in enumerate(topics.added):
                words[first + number] = added
            words[base + SESSION_TOPICS_END] = topics.end
        word = base + SESSION_HEADER_WORDS
        for entry in entries:
            # First: a process that is killed in this loop leaves the rest of an entry
            # that has moved under its new place, and the whole entry behind it.
            words[word + ENTRY_PARTITION] = entry.named
            words[word + ENTRY_ROW] = entry.row_id
            words[word + ENTRY_FETCH_OFFSET] = entry.fetch_offset
            words[word + ENTRY_MAX_BYTES] = entry.max_bytes
            words[word + ENTRY_LEADER_EPOCH] = entry.leader_epoch
            words[word + ENTRY_SENT_HIGH_WATERMARK] = entry.sent_high_watermark
            words[word + ENTRY_SENT_LOG_START] = entry.sent_log_start
            words[word + ENTRY_SENT_ERROR] = entry.sent_error
            word += SESSION_ENTRY_WORDS
        words[base + SESSION_ENTRY_COUNT] = len(entries)

    def note_row(self, session_id: int, base: int, index: int, row_id: int) -> None:
        """Store the row of a partition that was found only now."""
        word = base + SESSION_HEADER_WORDS + index * SESSION_ENTRY_WORDS
        with self._cell.locked():
            if self._words[base + SESSION_ID] == session_id:
                self._words[word + ENTRY_ROW] = row_id

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


class SessionTopics:
    """Holds the topics of a session that lie in its row, and those to be added.

    Args:
        words: those in its row; None: there are none.
    """

    def __init__(self, words: memoryview | None = None) -> None:
        self.added: list[int] = []  # words
        self.end = 0  # where the next one begins, in words
        # By what requests of the session name it by: its id, or else its name.
        self._places: dict[bytes | str, int] = {}
        while words is not None and self.end < len(words):
            topic = _topic_at(words, self.end)
            self._places[topic.key] = self.end
            self.end += topic.words

    def find(self, topic: SessionTopic, partition: int) -> int:
        """Return what an entry says of its partition; -1: no entry says it."""
        place = self._places.get(topic.key)
        return -1 if place is None else partition << PLACE_BITS | place

    def named(self, topic: SessionTopic, partition: int) -> int:
        """Return what an entry says of its partition; add the topic if it is new."""
        place = self._places.get(topic.key)
        if place is None:
            place = self._places[topic.key] = self.end
            name = topic.name.encode()
            name_words = topic.words - _NAME
            self.added += _ID_WORDS.unpack(topic.topic_id)
            self.added.append(len(name))
            self.added += struct.unpack(
                f"={name_words}q", name.ljust(name_words * 8, b"\0")
            )
            self.end += topic.words
        return partition << PLACE_BITS | place


def _topic_at(words: memoryview, place: int) -> SessionTopic:
    topic_id = words[place : place + 2].tobytes()
    size = words[place + 2]
    name = words[place + _NAME : place + _NAME + _words_of(size)].tobytes()[:size]
    return SessionTopic(name.decode(), topic_id)


def _words_of(size: int) -> int:
    return -(-size // 8)


assert tuple(SessionEntry._fields) == (
    "row_id",
    "fetch_offset",
    "max_bytes",
    "leader_epoch",
    "sent_high_watermark",
    "sent_log_start",
    "sent_error",
    "named",
)
assert (ENTRY_ROW, ENTRY_FETCH_OFFSET, ENTRY_MAX_BYTES, ENTRY_LEADER_EPOCH) == (
    0,
    1,
    2,
    3,
)
assert (ENTRY_SENT_ERROR, ENTRY_PARTITION) == (6, 7)
