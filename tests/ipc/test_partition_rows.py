"""Partition rows: committed states are never torn, intents are settled once."""

from __future__ import annotations

import signal

import pytest

from mpbroker.ipc.counters.fetched_bytes import first_word
from mpbroker.ipc.layout import (
    HANDLER_INCARNATION,
    MAX_HANDLERS,
    MAX_PARTITIONS,
    ROW_BYTES_IN_BEFORE,
    ROW_BYTES_OUT_BEFORE,
    ROW_INTENT,
    ROW_WORDS,
    SLOT_INTENT,
    SLOT_PROGRESS,
    SLOT_PROGRESS_OFFSET,
    RowStatus,
    handler_row,
    slot_row,
)
from mpbroker.ipc.tables.partition_table import LogState, PartitionTable, rows_made
from tests.support.children import (
    deaths,
    die,
    fork,
    kill_at_line,
    lines_of,
    running,
    wait_until,
)

FILES = ("mpbroker/ipc/tables/partition_table.py",)
SLOT = 5


@pytest.fixture
def table(memory):
    for index in range(3):
        memory.table.initialise_row(index)
    return memory.table


def state(number: int) -> LogState:
    """A state whose fields all follow from one number."""
    return LogState._make(number + field for field in range(len(LogState._fields)))


# -- committed states ---------------------------------------------------------------


def test_a_new_row_is_unloaded_and_empty(table):
    row = table.row(0)
    assert row.status == RowStatus.UNLOADED
    assert (row.snapshot().log_end_offset, row.log_end_offset) == (0, 0)


def test_behind_the_last_row_nothing_is_stored(table):
    words = table.segment.words
    behind = MAX_PARTITIONS * ROW_WORDS
    for index in (MAX_PARTITIONS, -1):
        with pytest.raises(IndexError, match="partition row"):
            table.initialise_row(index)
    assert not any(words[behind : behind + ROW_WORDS])


def test_rows_that_were_made_are_counted(table):
    assert rows_made(table.segment.words) == 3
    table.initialise_row(3)
    assert rows_made(table.segment.words) == 4


def used_row(table):
    """The row of a deleted partition, with something in each word."""
    row = table.row(1)
    with row.locked():
        row.publish(state(70))
        row.log_start_offset, row.durable_end_offset = 3, 70
        row.status = RowStatus.DELETED
    for handler in (0, MAX_HANDLERS):
        row.add_waiter(handler)
    return row


def is_as_new(row):
    assert row.status == RowStatus.UNLOADED
    assert row.snapshot() == LogState(bytes_in=state(70).bytes_in)
    assert row.log_start_offset == row.durable_end_offset == 0
    assert row.take_waiters() == 0
    assert row.words[row.base + ROW_BYTES_IN_BEFORE] == state(70).bytes_in
    return True


def test_a_row_that_is_used_again_begins_anew_but_for_the_brokers_counters(
    table, memory
):
    row = used_row(table)
    memory.control.words[handler_row(1) + HANDLER_INCARNATION] = 1
    table.segment.words[first_word(1) + 1] = 500
    structure = row.structure_version
    table.reuse_row(1)
    assert is_as_new(row)
    assert row.words[row.base + ROW_BYTES_OUT_BEFORE] == 500
    assert row.structure_version != structure  # what is cached of it is read anew


def test_a_reuse_killed_at_any_line_is_done_again_by_the_next(table):
    used_row(table)
    total = lines_of(lambda: table.reuse_row(1), FILES)
    for line in deaths(total, 100, seed=3):
        row = used_row(table)

        def dying(line=line):
            kill_at_line(line, FILES)
            table.reuse_row(1)

        assert fork(dying) == -signal.SIGKILL
        table.reuse_row(1)
        assert is_as_new(row)


def test_what_was_published_is_read_by_every_process(table):
    with table.row(1).locked():
        table.row(1).publish(state(70))
    assert table.row(1).snapshot() == state(70)

    def look():
        assert table.row(1).snapshot() == state(70)
        assert table.row(1).log_end_offset == 70

    assert fork(look) == 0
    assert table.row(0).snapshot() == LogState._make([0] * len(LogState._fields))


def test_a_snapshot_is_never_torn_by_a_writer_beside_it(table, memory):
    row, stop = table.row(0), memory.control.words
    row.publish(state(0))

    def write():
        number = 0
        while not stop[9]:
            number += 1_000_003
            row.publish(state(number))

    with running(write) as (writer,):
        wait_until(lambda: row.log_end_offset)
        last = seen = read = 0
        # On a busy machine all reads may fall into the pauses of the writer.
        while read < 30_000 or seen < 10:
            read += 1
            snapshot = row.snapshot()
            assert snapshot == state(snapshot.log_end_offset)
            assert snapshot.log_end_offset >= last
            seen += snapshot.log_end_offset != last
            last = snapshot.log_end_offset
        stop[9] = 1
        assert writer.wait() == 0


def test_a_writer_killed_at_any_line_has_published_all_or_nothing(table):
    row = table.row(0)
    row.publish(state(100))
    total = lines_of(lambda: row.publish(state(100)), FILES)
    ends = set()
    for line in deaths(total, 100, seed=1):
        row.publish(state(100))

        def work(line=line):
            row.lock()
            kill_at_line(line, FILES)
            row.publish(state(200))

        assert fork(work) == -signal.SIGKILL
        row.settle()
        snapshot = row.snapshot()
        assert snapshot in (state(100), state(200))
        ends.add(snapshot.log_end_offset)
    assert 100 in ends  # 200 only if a line follows the commit


def test_rows_lie_apart(table):
    for index in range(3):
        row = table.row(index)
        row.publish(state(1000 * index))
        row.log_start_offset = index
        row.durable_end_offset = 10 + index
        row.structure_version = 20 + index
        row.status = RowStatus(index)
    for index in range(3):
        row = table.row(index)
        assert row.snapshot() == state(1000 * index)
        assert row.log_start_offset == index
        assert row.durable_end_offset == 10 + index
        assert row.structure_version == 20 + index
        assert row.status == index


@pytest.mark.parametrize("index", [-1, MAX_PARTITIONS])
def test_a_row_beyond_the_table_is_refused(table, index):
    with pytest.raises(IndexError, match=str(MAX_PARTITIONS)):
        table.row(index)


def test_the_last_row_lies_within_the_table(table):
    table.initialise_row(MAX_PARTITIONS - 1)
    with table.row(MAX_PARTITIONS - 1).locked():
        table.row(MAX_PARTITIONS - 1).publish(state(3))
    assert table.row(MAX_PARTITIONS - 1).snapshot() == state(3)


def test_a_table_without_slots_settles_nothing():
    table = PartitionTable.create()
    table.initialise_row(0)
    row = table.row(0)
    with row.locked():
        row.set_intent(-1, 0, 0)
        row.publish(state(5))
        row.clear_intent()
    assert row.log_end_offset == 5


# -- exactly once -------------------------------------------------------------------


class Appender:
    """One append of a request's partition, without a log."""

    def __init__(self, memory, table, index=0, ordinal=0):
        self.slots = memory.control.words
        self.arena = memory.arena
        self.row = table.row(index)
        self.ordinal = ordinal
        self.where = memory.arena_layout.block(SLOT) + 13 * 1024
        self.slots[slot_row(SLOT) + SLOT_PROGRESS_OFFSET] = self.where

    def prepare(self):
        """As a request that has just been received, before a log that ends at 100."""
        self.row.publish(state(100))
        self.slots[slot_row(SLOT) + SLOT_PROGRESS] = 0
        self.slots[slot_row(SLOT) + SLOT_INTENT] = 0
        self.arena.words[self.where // 8 + self.ordinal] = -77

    def append(self):
        self.row.lock()
        self.row.set_intent(SLOT, self.ordinal, 100)
        self.row.publish(state(107))
        self.row.clear_intent()
        self.row.unlock()

    def check(self):
        """After a settling: done if and only if it was committed, and said so once."""
        committed = self.row.log_end_offset == 107
        assert self.row.snapshot() == state(107 if committed else 100)
        assert self.row.words[self.row.base + ROW_INTENT] == 0
        done = self.slots[slot_row(SLOT) + SLOT_PROGRESS]
        assert done == (self.ordinal + 1 if committed else 0)
        word = self.arena.words[self.where // 8 + self.ordinal]
        assert word == (100 if committed else -77)
        return committed


def test_a_finished_append_is_noted_in_its_request(memory, table):
    appender = Appender(memory, table, ordinal=3)
    appender.prepare()
    appender.append()
    assert appender.check()
    assert memory.control.words[slot_row(SLOT) + SLOT_INTENT] == 0


def test_an_append_killed_at_any_line_is_noted_if_and_only_if_it_happened(
    memory, table
):
    appender = Appender(memory, table, ordinal=1)
    appender.prepare()
    outcomes = set()
    for line in deaths(lines_of(appender.append, FILES), 1000, seed=1):
        appender.prepare()

        def work(line=line):
            kill_at_line(line, FILES)
            appender.append()

        assert fork(work) == -signal.SIGKILL
        appender.row.settle()
        outcomes.add(appender.check())
        appender.row.settle()
        appender.check()
    assert outcomes == {True, False}


@pytest.mark.parametrize("committed", [False, True])
def test_a_settling_killed_at_any_line_is_finished_by_the_next(
    memory, table, committed
):
    appender = Appender(memory, table)

    def append_and_die():
        appender.row.lock()
        appender.row.set_intent(SLOT, 0, 100)
        if committed:
            appender.row.publish(state(107))
        die()

    appender.prepare()
    fork(append_and_die)
    total = 0

    def count():
        nonlocal total
        total = lines_of(appender.row.settle, FILES)

    count()
    for line in deaths(total, 1000, seed=1):
        appender.prepare()
        fork(append_and_die)

        def settle(line=line):
            kill_at_line(line, FILES)
            appender.row.settle()

        assert fork(settle) == -signal.SIGKILL
        appender.row.settle()
        assert appender.check() is committed


def test_an_append_that_failed_and_lives_leaves_no_intent(memory, table):
    appender = Appender(memory, table)
    appender.prepare()
    with appender.row.locked():
        appender.row.set_intent(SLOT, 0, 100)
        appender.row.abandon_intent()
    assert appender.check() is False


def test_the_next_appender_settles_before_it_appends(memory, table):
    """Or its own append would make the dead one's look committed."""
    appender = Appender(memory, table)
    appender.prepare()

    def die_before_the_commit():
        appender.row.lock()
        appender.row.set_intent(SLOT, 0, 100)
        die()

    fork(die_before_the_commit)
    with appender.row.locked():
        appender.row.publish(state(120))
    appender.row.settle()
    assert memory.control.words[slot_row(SLOT) + SLOT_PROGRESS] == 0


def test_an_intent_of_another_row_is_not_settled_by_this_one(memory, table):
    mine, other = Appender(memory, table, index=0), Appender(memory, table, index=1)
    mine.prepare()
    other.prepare()

    def die_in_the_other():
        other.row.lock()
        other.row.set_intent(SLOT, 0, 100)
        other.row.publish(state(107))
        die()

    fork(die_in_the_other)
    mine.row.settle()
    assert memory.control.words[slot_row(SLOT) + SLOT_PROGRESS] == 0
    other.row.settle()
    assert memory.control.words[slot_row(SLOT) + SLOT_PROGRESS] == 1


def test_each_partition_of_a_request_is_noted_in_its_turn(memory, table):
    slots = memory.control.words
    appenders = [Appender(memory, table, index=n, ordinal=n) for n in range(3)]
    for appender in appenders:
        appender.prepare()
    for number, appender in enumerate(appenders):
        appender.append()
        assert slots[slot_row(SLOT) + SLOT_PROGRESS] == number + 1


def test_an_intent_is_settled_while_the_next_owner_keeps_the_lock(memory, table):
    """It may wait for a disk: the supervisor must not wait for it."""
    appender, words = Appender(memory, table), memory.control.words
    appender.prepare()

    def die_behind_the_commit():
        appender.row.lock()
        appender.row.set_intent(SLOT, 0, 100)
        appender.row.publish(state(107))
        die()

    def keep():
        with appender.row.locked():
            words[9] = 1
            signal.pause()

    fork(die_behind_the_commit)
    with running(keep) as (keeper,):
        wait_until(lambda: words[9])
        assert appender.row.try_settle(SLOT)
        assert words[slot_row(SLOT) + SLOT_PROGRESS] == 1
        # As if it had been stopped before it could settle.
        appender.row.words[appender.row.base + ROW_INTENT] = SLOT + 1
        assert not appender.row.try_settle(SLOT)
        keeper.kill()
        assert appender.row.try_settle(SLOT)


def test_an_intent_whose_owner_is_dead_is_settled_at_once(memory, table):
    appender = Appender(memory, table)
    appender.prepare()

    def die_behind_the_commit():
        appender.row.lock()
        appender.row.set_intent(SLOT, 0, 100)
        appender.row.publish(state(107))
        die()

    fork(die_behind_the_commit)
    assert appender.row.try_settle(SLOT)
    assert memory.control.words[slot_row(SLOT) + SLOT_PROGRESS] == 1
    assert appender.row.try_settle(SLOT)
    appender.row.lock()  # it was released
    appender.row.unlock()


def test_a_dead_process_s_sync_is_released_while_another_has_the_lock(memory, table):
    row, words = table.row(0), memory.control.words
    assert row.begin_sync(3) is not None

    def keep():
        with row.locked():
            words[9] = 1
            signal.pause()

    with running(keep):
        wait_until(lambda: words[9])
        row.forget_sync(4)
        assert row.owns_sync(3)
        row.forget_sync(3)
        assert not row.owns_sync(3)
