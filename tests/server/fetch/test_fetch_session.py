"""Fetch sessions by the rules of KIP-227, shared by all handlers."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager

import pytest

from mpbroker.ipc.session_layout import (
    SESSION_ID,
    SESSION_MAX_ENTRIES,
    SESSION_TOPICS_WORDS,
)
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.server.fetch.fetch_session import (
    NO_ID,
    NO_SESSION,
    FetchSessions,
    SessionEntry,
    SessionTopic,
    SessionTopics,
)
from tests.support.children import fork

MINUTE = 60 * 1_000_000_000
NOT_FOUND = (ErrorCode.FETCH_SESSION_ID_NOT_FOUND, -1)
WRONG_EPOCH = (ErrorCode.INVALID_FETCH_SESSION_EPOCH, -1)
ENTRIES = [SessionEntry(5, 100, 1000, 0), SessionEntry(6, 200, 1000, -1)]


@pytest.fixture
def sessions(memory):
    return FetchSessions(memory.sessions, memory.session_cell, 3)


def claim(sessions, session, epoch, claimed=0, *, now=0, uses_ids=False):
    return sessions.claim(session, epoch, now, claimed, uses_ids=uses_ids)


def create(sessions, now=0, entries=ENTRIES, *, uses_ids=False):
    return sessions.create(entries, SessionTopics(), now, uses_ids=uses_ids)


def test_a_session_has_an_id_of_its_own_and_starts_at_epoch_one(sessions):
    first, second = create(sessions), create(sessions)
    assert first > 0 and second > 0 and first != second
    error, base = claim(sessions, first, 1)
    assert error == ErrorCode.NONE
    assert sessions.entries(base) == ENTRIES


def test_each_request_carries_the_next_epoch(sessions):
    session = create(sessions)
    for epoch in (1, 2, 3):
        assert claim(sessions, session, epoch)[0] == ErrorCode.NONE
    for epoch in (1, 3, 5, -2):
        assert claim(sessions, session, epoch) == WRONG_EPOCH
    assert claim(sessions, session, 4)[0] == ErrorCode.NONE


def test_after_the_last_epoch_comes_one(sessions):
    from mpbroker.ipc.session_layout import SESSION_EPOCH

    session = create(sessions)
    _, base = claim(sessions, session, 1)
    sessions._words[base + SESSION_EPOCH] = 0x7FFF_FFFF
    assert claim(sessions, session, 0x7FFF_FFFF)[0] == ErrorCode.NONE
    assert claim(sessions, session, 1)[0] == ErrorCode.NONE


@pytest.mark.parametrize("session", [NO_SESSION, 12345, -1])
@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_a_session_that_does_not_exist_is_not_found(sessions, session, epoch):
    create(sessions)
    assert claim(sessions, session, epoch) == NOT_FOUND


@pytest.mark.parametrize("epoch", [1, 2, 3])
def test_what_is_left_of_a_closed_session_is_nobodys(sessions, epoch):
    """Its row says id 0, as a request without a session does."""
    session = create(sessions)
    claim(sessions, session, 1)
    sessions.close(session)
    assert claim(sessions, NO_SESSION, epoch) == NOT_FOUND
    assert claim(sessions, session, 2) == NOT_FOUND
    sessions.close(session)


def test_a_session_made_with_names_does_not_go_on_with_ids(sessions):
    named, by_id = create(sessions), create(sessions, uses_ids=True)
    mixed = (ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR, -1)
    assert claim(sessions, named, 1, uses_ids=True) == mixed
    assert claim(sessions, by_id, 1) == mixed
    assert claim(sessions, by_id, 1, uses_ids=True)[0] == ErrorCode.NONE


def test_a_request_that_is_executed_again_keeps_the_epoch_it_has_claimed(sessions):
    session = create(sessions)
    error, base = claim(sessions, session, 1)
    assert claim(sessions, session, 1) == WRONG_EPOCH  # another request
    assert claim(sessions, session, 1, claimed=2) == (error, base)
    assert claim(sessions, session, 2)[0] == ErrorCode.NONE
    # By now its client has had an answer, or has gone.
    assert claim(sessions, session, 1, claimed=2) == WRONG_EPOCH


def test_a_full_table_gives_no_session_while_all_are_in_use(sessions):
    for _ in range(3):
        assert create(sessions) != NO_SESSION
    assert create(sessions, now=MINUTE) == NO_SESSION


def test_the_session_that_was_unused_for_longest_makes_room(sessions):
    ids = [create(sessions, now=number) for number in range(3)]
    claim(sessions, ids[0], 1, now=MINUTE)
    new = create(sessions, now=3 * MINUTE)
    assert new != NO_SESSION
    assert claim(sessions, ids[1], 1) == NOT_FOUND
    for session, epoch in ((ids[0], 2), (ids[2], 1), (new, 1)):
        assert claim(sessions, session, epoch)[0] == ErrorCode.NONE


def test_a_closed_session_makes_room_at_once(sessions):
    ids = [create(sessions) for _ in range(3)]
    sessions.close(ids[1])
    assert create(sessions) != NO_SESSION


def test_no_more_sessions_than_the_setting_says(memory):
    none = FetchSessions(memory.sessions, memory.session_cell, 0)
    assert create(none) == NO_SESSION
    many = FetchSessions(memory.sessions, memory.session_cell, 10**6)
    assert sum(create(many) != NO_SESSION for _ in range(1100)) == 1000


def test_an_empty_or_huge_request_gets_no_session(sessions):
    assert create(sessions, entries=[]) == NO_SESSION
    most = [SessionEntry(row, 0, 1, 0) for row in range(SESSION_MAX_ENTRIES)]
    assert create(sessions, entries=[*most, most[0]]) == NO_SESSION
    session = create(sessions, entries=most)
    _, base = claim(sessions, session, 1)
    assert sessions.entries(base) == most
    assert not sessions.store(session, base, [*most, most[0]])
    assert sessions.entries(base) == most


def test_the_largest_session_leaves_its_neighbours_alone(sessions):
    first, second = create(sessions), create(sessions)
    _, base = claim(sessions, first, 1)
    assert sessions.store(
        first, base, [SessionEntry(*[-1] * 8) for _ in range(SESSION_MAX_ENTRIES)]
    )
    _, base = claim(sessions, second, 1)
    assert sessions.entries(base) == ENTRIES


def test_what_a_client_was_told_is_remembered_by_partition(sessions):
    session = create(sessions)
    _, base = claim(sessions, session, 1)
    assert sessions.sent(base, 1) == (-1, -1, 0)
    sessions.note_sent(session, base, 1, 50, 3, 0)
    assert sessions.sent(base, 1) == (50, 3, 0)
    assert sessions.sent(base, 0) == (-1, -1, 0)
    assert sessions.entries(base)[1].sent_high_watermark == 50


def test_a_session_that_has_ended_changes_nothing_of_the_next_in_its_row(sessions):
    old = create(sessions)
    _, base = claim(sessions, old, 1)
    sessions.close(old)
    new = create(sessions, entries=ENTRIES[:1])
    assert sessions.find(new) == base
    sessions.note_sent(old, base, 0, 50, 3, 0)
    assert not sessions.store(old, base, ENTRIES)
    assert sessions.entries(base) == ENTRIES[:1]


def test_any_handler_may_serve_the_next_fetch(memory, sessions):
    session = create(sessions)

    def another():
        theirs = FetchSessions(memory.sessions, memory.session_cell, 3)
        error, base = claim(theirs, session, 1)
        assert error == ErrorCode.NONE
        theirs.store(session, base, ENTRIES[:1])

    assert fork(another) == 0
    _, base = claim(sessions, session, 2)
    assert sessions.entries(base) == ENTRIES[:1]


def test_a_handler_that_dies_with_the_table_locked_stops_nobody(memory, sessions):
    session = create(sessions)

    def take_and_die():
        memory.session_cell.lock()
        os._exit(1)

    fork(take_and_die)
    assert claim(sessions, session, 1)[0] == ErrorCode.NONE


class DyingSessions(FetchSessions):
    """Killed when an evicted session's row holds half of the next one."""

    def _store(
        self, base: int, entries: list[SessionEntry], topics: SessionTopics | None
    ) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_creator_killed_half_way_leaves_no_session_under_the_old_id(memory):
    small = FetchSessions(memory.sessions, memory.session_cell, 1)
    old = create(small, 1, [SessionEntry(1, 0, 100, 0)])
    dying = DyingSessions(memory.sessions, memory.session_cell, 1)
    later = 10**15
    entries = [SessionEntry(2, 0, 100, 0)]
    assert fork(lambda: create(dying, later, entries)) == -signal.SIGKILL
    assert small.find(old) is None
    assert create(small, later, entries)


# -- topics ---------------------------------------------------------------------------

NAMED = [
    SessionTopic("a", NO_ID),
    SessionTopic("", NO_ID),
    SessionTopic("\N{GREEK SMALL LETTER ALPHA}" * 249, NO_ID),
    SessionTopic("12345678", NO_ID),
]
WITH_IDS = [SessionTopic("", b"\xff" * 16), SessionTopic("a", b"\x01" + bytes(15))]


def named_entries(topics, *named):
    return [
        SessionEntry(-1, 0, 1, 0, named=topics.named(topic, index))
        for topic, index in named
    ]


@pytest.mark.parametrize("some", [NAMED, WITH_IDS])
def test_an_entry_names_its_topic_and_partition(sessions, some):
    topics = SessionTopics()
    named = [(topic, index) for topic in some for index in (0, 7, 2**31 - 1, -1)]
    entries = named_entries(topics, *named)
    session = sessions.create(entries, topics, 0, uses_ids=False)
    _, base = claim(sessions, session, 1)
    assert [
        (sessions.topic(base, entry.place), entry.partition)
        for entry in sessions.entries(base)
    ] == named


def test_topics_are_added_behind_those_that_are_there(sessions):
    topics = SessionTopics()
    first = named_entries(topics, (NAMED[0], 1))
    session = sessions.create(first, topics, 0, uses_ids=False)
    _, base = claim(sessions, session, 1)
    topics = sessions.topics(base)
    assert topics.find(NAMED[0], 1) == first[0].named
    assert topics.find(NAMED[2], 1) == -1
    entries = named_entries(topics, (NAMED[0], 1), (NAMED[2], 0))
    assert entries[0].named == first[0].named
    assert sessions.store(session, base, entries, topics)
    assert sessions.entries(base) == entries
    assert sessions.topic(base, entries[1].place) == NAMED[2]


def test_a_topic_that_got_its_name_later_is_known_by_its_id(sessions):
    topics = SessionTopics()
    topic_id = b"\x05" * 16
    named = topics.named(SessionTopic("", topic_id), 3)
    assert topics.named(SessionTopic("name", topic_id), 3) == named


def test_a_session_whose_topics_do_not_fit_is_not_made_and_does_not_grow(sessions):
    long = [SessionTopic(f"{number:032767}", NO_ID) for number in range(33)]
    assert len(long) * 32767 > SESSION_TOPICS_WORDS * 8
    topics = SessionTopics()
    entries = named_entries(topics, *((topic, 0) for topic in long))
    assert sessions.create(entries, topics, 0, uses_ids=False) == NO_SESSION
    session = create(sessions)
    _, base = claim(sessions, session, 1)
    assert not sessions.store(session, base, entries, topics)
    assert sessions.entries(base) == ENTRIES


def test_a_row_that_is_found_later_is_of_its_own_session(sessions):
    session = create(sessions)
    _, base = claim(sessions, session, 1)
    sessions.note_row(session, base, 1, 99)
    assert [entry.row_id for entry in sessions.entries(base)] == [5, 99]
    sessions.close(session)
    create(sessions)
    sessions.note_row(session, base, 1, 77)
    assert sessions.entries(base) == ENTRIES


class DyingWords:
    """Words of memory, of which a process stores some before it is killed."""

    def __init__(self, words, left):
        self._words, self._left = words, left

    def __getitem__(self, index):
        return self._words[index]

    def __setitem__(self, index, value):
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1
        self._words[index] = value


def test_wherever_a_handler_dies_in_a_change_its_successor_makes_it_whole(
    memory, sessions
):
    """It forgets the first partition, moves the second, and adds one of a new topic."""
    for killed_after in range(31):
        topics = SessionTopics()
        before = named_entries(topics, (NAMED[0], 0), (NAMED[0], 1), (NAMED[2], 2))
        before = [entry._replace(row_id=row) for row, entry in enumerate(before)]
        session = sessions.create(before, topics, 0, uses_ids=False)
        _, base = claim(sessions, session, 1)

        def change(theirs, session=session, base=base, before=before):
            topics = theirs.topics(base)
            entries = {entry.named: entry for entry in theirs.entries(base)}
            entries.pop(before[0].named, None)
            moved = before[1]._replace(fetch_offset=50)
            entries[moved.named] = moved
            (added,) = named_entries(topics, (NAMED[3], 9))
            entries[added.named] = added
            assert theirs.store(session, base, list(entries.values()), topics)

        def die(left=killed_after):
            theirs = FetchSessions(memory.sessions, memory.session_cell, 3)
            theirs._words = DyingWords(theirs._words, left)
            change(theirs)

        outcome = fork(die)
        change(sessions)
        found = {
            (sessions.topic(base, entry.place), entry.partition): entry[:2]
            for entry in sessions.entries(base)
        }
        assert found == {
            (NAMED[0], 1): (1, 50),
            (NAMED[2], 2): (2, 0),
            (NAMED[3], 9): (-1, 0),
        }, killed_after
        assert (outcome == -signal.SIGKILL) == (killed_after < 30)
        sessions.close(session)


def test_looking_for_a_session_touches_only_rows_that_were_used(memory):
    sessions = FetchSessions(memory.sessions, memory.session_cell, 1000)
    before = os.fstat(memory.sessions.fd).st_blocks
    assert sessions.find(12345) is None
    assert os.fstat(memory.sessions.fd).st_blocks == before


class Watched:
    """Words, and what another process does when one of them has just been read."""

    def __init__(self, words, index, then):
        self._words, self._index, self._then = words, index, then

    def __getitem__(self, index):
        value = self._words[index]
        if index == self._index:
            self._then()
        return value

    def __setitem__(self, index, value):
        self._words[index] = value


class Lock:
    """The table's mutex, that says whether it is taken."""

    def __init__(self, cell):
        self._cell, self.is_taken = cell, False

    @contextmanager
    def locked(self):
        with self._cell.locked():
            self.is_taken = True
            yield
            self.is_taken = False


def test_a_session_that_ends_behind_a_look_at_it_leaves_the_next_one_alone(
    sessions, memory
):
    """Whoever would end it in between waits for the lock, or there is no between."""
    others = FetchSessions(memory.sessions, memory.session_cell, 3)
    first = create(sessions)
    _, base = claim(sessions, first, 1)
    lock = sessions._cell = Lock(memory.session_cell)
    made = []

    def end_and_begin():
        if not lock.is_taken:
            others.close(first)
            made.append(create(others))

    words = sessions._words
    sessions._words = Watched(words, base + SESSION_ID, end_and_begin)
    sessions.note_sent(first, base, 0, 7, 3, 0)
    sessions._words = words
    end_and_begin()
    _, again = claim(others, made[0], 1)
    assert again == base
    assert others.entries(base) == ENTRIES
