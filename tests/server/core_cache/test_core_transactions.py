"""Produces of transactions, by the short cut in C and by the usual way."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpbroker.ipc.compiled import IS_COMPILED
from mpbroker.ipc.tables.transaction_table import CAPACITY
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.headers import encode_request_header
from tests.server.core_cache.transaction_stage import (
    NOW,
    PRODUCE,
    THREE,
    acquaint,
    batch,
    begin,
    codes,
    contents,
    end,
    known,
    mark,
    request,
    same,
    stages,
    to_three,
    told,
)
from tests.storage.batches import validated
from tests.support.children import Child, fork

pytestmark = pytest.mark.skipif(
    not IS_COMPILED, reason="the compiled core is not there"
)

OUT_OF_ORDER, STALE_EPOCH, NOT_NAMED = 45, 47, 53
STORAGE_ERROR = 56
FIRST_IDS = st.sampled_from([7, 8, 7 + CAPACITY, (1 << 63) - 2])


@pytest.fixture
def pair(tmp_path):
    with stages(tmp_path) as made:
        for stage in made:
            acquaint(stage)
        yield made


@pytest.fixture
def syncing(tmp_path):
    """Their logs' first sync, which has directories to see to, is behind them."""
    with stages(tmp_path, syncs=True) as made:
        for stage in made:
            acquaint(stage)
            begin(stage)
            stage.publish(to_three(1, acks=-1))
            stage.handler.turn()
            stage.end_syncs()
            stage.answer(3)
            stage.short_ways.clear()
        yield made


@pytest.fixture
def short(pair):
    return pair[0]


# -- what takes it ---------------------------------------------------------------


@pytest.mark.parametrize("version", range(3, 14))
def test_batches_of_an_open_transaction_take_the_short_cut(pair, version):
    begin(*pair)
    sequence = 1
    for acks in (-1, 0, 1):
        frame = to_three(sequence, acks=acks, version=version, values=[b"a", b""])
        same(pair, frame)
        sequence += 2
    assert pair[0].short_ways == [PRODUCE] * 3
    assert known(pair[0]) == known(pair[1])
    for each in THREE:
        log = pair[0].log(*each)
        # Who reads what is committed stands before the first of them.
        assert log.row.snapshot().first_unstable_offset == log.row.log_end_offset - 6


@pytest.mark.parametrize("bump", [0, 1], ids=["v1", "v2"])
def test_one_transaction_after_the_other_does(pair, bump):
    """Each is ended by another process: its markers are read here, and understood."""
    epoch, sequence = 0, 1
    for number in range(6):
        begin(*pair, epoch=epoch)
        same(pair, to_three(sequence, epoch=epoch))
        end(*pair, epoch=epoch + bump, commit=number % 2 == 0)
        epoch += bump
        sequence = 0 if bump else sequence + 1
    assert pair[0].short_ways == [PRODUCE] * 6
    assert known(pair[0]) == known(pair[1])
    for each in THREE:
        logs = [stage.log(*each) for stage in pair]
        assert logs[0].row.snapshot().first_unstable_offset == -1
        ended = [sorted(Path(log.directory).glob("*.txnindex")) for log in logs]
        assert [path.read_bytes() for path in ended[0]] == [
            path.read_bytes() for path in ended[1]
        ]
        assert ended[0]


def test_transactions_of_several_producers_are_open_side_by_side(pair):
    begin(*pair)
    begin(*pair, producer=8)
    same(
        pair, to_three(1, producer=8), to_three(1), to_three(2), to_three(2, producer=8)
    )
    end(*pair, producer=8)
    same(pair, to_three(3))
    assert [state.first_unstable_offset for _, state in contents(pair[0])] == [5] * 3
    end(*pair, commit=False)
    begin(*pair, producer=8)
    same(pair, to_three(3, producer=8))
    assert pair[0].short_ways == [PRODUCE] * 6
    assert known(pair[0]) == known(pair[1])


def test_batches_of_no_transaction_between_them_do(pair):
    begin(*pair)
    frame = to_three(1, producer=8, transactional=False, name=None)
    same(pair, to_three(1), frame, to_three(2))
    end(*pair)
    same(pair, to_three(2, producer=8, transactional=False, name=None))
    assert pair[0].short_ways == [PRODUCE] * 4
    assert known(pair[0]) == known(pair[1])


# -- what the coordinator has to see ------------------------------------------------


@pytest.mark.parametrize("version", [11, 12, 13])
def test_where_none_is_open_the_coordinator_is_asked_without_python(pair, version):
    before = contents(pair[0])
    assert same(pair, to_three(1, version=version)) is None
    begin(*pair, where=THREE[:2])
    assert same(pair, to_three(1, version=version)) is None
    begin(*pair, epoch=1)
    assert same(pair, to_three(1, version=version)) is None
    assert contents(pair[0]) == before
    assert pair[0].short_ways == [PRODUCE] * 3
    begin(*pair)
    assert same(pair, to_three(1, version=version)) is not None


def test_what_it_gives_back_is_executed_as_if_it_came_for_the_first_time(pair):
    assert same(pair, to_three(1)) is None
    begin(*pair)
    for stage in pair:
        stage.memory.ring.put_back([3])
        stage.handler.turn()
    answers = [stage.answer(3) for stage in pair]
    assert answers[0] == answers[1]
    assert [code for _, code, _ in codes(answers[0])] == [0, 0, 0]
    assert contents(pair[0]) == contents(pair[1])
    assert pair[0].short_ways == [PRODUCE, PRODUCE]


@settings(max_examples=25, deadline=None)
@given(
    entries=st.lists(st.tuples(FIRST_IDS, st.integers(0, 3), st.booleans())),
    asked=st.lists(st.tuples(FIRST_IDS, st.integers(0, 3)), min_size=1, max_size=6),
)
def test_the_table_says_the_same_to_both(tmp_path_factory, entries, asked):
    with stages(tmp_path_factory.mktemp("data")) as pair:
        for stage in pair:
            begin(stage)
            stage.ask(request(("one", 0, batch(0))))
            row = stage.log("one").row.index
            for producer, epoch, stays in entries:
                stage.transactions.open(producer, epoch, row)
                if not stays:
                    stage.transactions.close(producer, row)
        table, row = pair[0].transactions, pair[0].log("one").row.index
        for producer, epoch in asked:
            frame = request(("one", 0, batch(1, producer=producer, epoch=epoch)))
            answer = same(pair, frame)
            assert (answer is None) != table.contains(producer, epoch, row)


def test_who_has_quotas_or_an_authorizer_is_seen_the_usual_way(short):
    short.core_cache._compiled.has_quotas = True
    assert told(short, to_three(1)) is None
    short.core_cache._compiled.has_quotas = False
    short.core_cache._compiled.has_authorizer = True
    begin(short)
    assert told(short, to_three(1)) is not None
    assert short.short_ways == []
    short.core_cache._compiled.has_authorizer = False
    told(short, to_three(2))
    assert short.short_ways == [PRODUCE]


# -- what is not plain ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("odd", "code"),
    [
        (batch(3), OUT_OF_ORDER),
        (batch(0, epoch=2), 0),
        (batch(1, transactional=False), 0),
        (batch(0, producer=9), 0),
        (batch(1)[:17] + b"\0\0\0\0" + batch(1)[21:], 2),
    ],
    ids=["gap", "next-epoch", "of-no-transaction", "unknown-producer", "bad-crc"],
)
def test_one_that_is_not_plain_takes_all_the_usual_way(pair, odd, code):
    for producer, epoch in ((7, 0), (7, 2), (9, 0)):
        begin(*pair, producer=producer, epoch=epoch, where=[("two", 0)])
    begin(*pair, where=[("one", 0), ("two", 1)])
    if odd == batch(3) or code == 2 or odd == batch(1, transactional=False):
        begin(*pair)
    others = [("one", 0, batch(1)), ("two", 1, batch(1))]
    answer = same(pair, request(*others, ("two", 0, odd)))
    assert [each[1] for each in codes(answer)] == [0, 0, code]
    assert pair[0].short_ways == []
    assert known(pair[0]) == known(pair[1])


def test_who_names_no_transaction_is_refused_either_way(pair):
    begin(*pair)
    before = contents(pair[0])
    answer = same(pair, to_three(1, name=None))
    assert {code for _, code, _ in codes(answer)} == {NOT_NAMED}
    assert contents(pair[0]) == before
    assert pair[0].short_ways == []


@pytest.mark.parametrize("name", ["", "t" * 300, "t\u00fc"])
def test_any_transactional_id_will_do(pair, name):
    begin(*pair)
    same(pair, to_three(1, name=name))
    assert pair[0].short_ways == [PRODUCE] * name.isascii()


def test_a_batch_that_comes_again_is_answered_with_its_first_offset(pair):
    begin(*pair)
    offsets = codes(same(pair, to_three(1)))
    same(pair, to_three(2))
    assert codes(same(pair, to_three(1))) == offsets
    assert pair[0].short_ways == [PRODUCE] * 2
    end(*pair)
    assert same(pair, to_three(1)) is None  # it began a transaction once more
    begin(*pair)
    assert codes(same(pair, to_three(1))) == offsets


def test_a_producer_of_a_later_epoch_shuts_out_the_one_before(pair):
    begin(*pair)
    same(pair, to_three(1))
    end(*pair, commit=False, epoch=1)
    begin(*pair)  # the table alone would let it write
    answer = same(pair, to_three(2))
    assert {code for _, code, _ in codes(answer)} == {STALE_EPOCH}
    assert pair[0].short_ways == [PRODUCE]


@pytest.mark.parametrize("version", [8, 11, 13])
def test_a_request_cut_or_changed_anywhere_ends_the_same_either_way(pair, version):
    begin(*pair)
    frame = to_three(1, version=version)
    head = len(encode_request_header(ApiKey.PRODUCE, version, 77, "test"))
    same(pair, *(frame[:end] for end in range(head, len(frame), 3)))
    assert PRODUCE not in pair[0].short_ways
    for place in range(head, len(frame), 2):
        spoilt = bytearray(frame)
        spoilt[place] ^= 1 << place % 8
        same(pair, bytes(spoilt))


STEP = st.tuples(
    st.sampled_from(["produce"] * 5 + ["plain", "begin", "begin", "end", "abort"]),
    st.sampled_from([7, 7, 8]),
    st.sampled_from([0, 0, 0, 0, 1, -1]),
    st.sampled_from([THREE, THREE, THREE[:1], THREE[1:]]),
)


@settings(max_examples=25, deadline=None)
@given(asked=st.lists(STEP, max_size=25), bump=st.integers(0, 1))
def test_any_order_of_things_ends_the_same_either_way(tmp_path_factory, asked, bump):
    """What, whose, how far it is off, and where."""
    following, epochs = {}, {7: 0, 8: 0}
    with stages(tmp_path_factory.mktemp("data")) as pair:
        for what, producer, off, where in asked:
            epoch = epochs[producer]
            who = {"producer": producer, "epoch": epoch}
            if what == "begin":
                begin(*pair, **who, where=where)
            elif what in ("end", "abort"):
                who["epoch"] = epochs[producer] = epoch + bump
                end(*pair, commit=what == "end", producer=producer, epoch=epoch + bump)
            else:
                transactional = what == "produce"
                parts = []
                for each in where:
                    expected = following.setdefault((producer, epoch, each), 0)
                    sequence = max(0, expected + off)
                    records = batch(sequence, **who, transactional=transactional)
                    parts.append((*each, records))
                name = "t-1" if transactional else None
                answer = same(pair, request(*parts, name=name))
                for each, (_, code, _) in zip(
                    where if answer else (),
                    codes(answer) if answer else (),
                    strict=True,
                ):
                    if code == 0 and off == 0:
                        following[producer, epoch, each] += 1
        assert contents(pair[0]) == contents(pair[1])
        assert known(pair[0]) == known(pair[1])


# -- beside others -------------------------------------------------------------------


def sleeps(pid):
    """Whether a process sleeps, and goes on to."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0] == "S"


def test_a_transaction_that_is_closed_before_the_lock_is_had_gets_no_record(short):
    """The coordinator closes, and then takes the lock to append its marker."""
    begin(short)
    row = short.log("one").row
    before = row.log_end_offset

    def produce():
        assert told(short, request(("one", 0, batch(1)))) is None
        assert short.short_ways == []  # it was Python that has handed it over

    row.lock()
    child = Child(produce)
    in_a_row, until = 0, time.monotonic() + 60
    while in_a_row < 50:  # then it waits for the lock
        assert time.monotonic() < until
        in_a_row = in_a_row + 1 if sleeps(child.pid) else 0
        time.sleep(0.001)
    short.transactions.close(7, row.index)
    row.unlock()
    assert child.wait() == 0
    assert row.log_end_offset == before
    assert short.progress()[0] == 0
    begin(short)
    short.memory.ring.put_back([3])
    short.handler.turn()
    assert codes(short.answer(3)) == [(0, 0, before)]


def test_a_transaction_that_ended_behind_our_back_gets_no_record(short):
    begin(short)
    told(short, to_three(1))
    assert fork(lambda: mark(short)) == 0  # and nobody has closed it
    told(short, to_three(2))  # begins another one, as the table lets it
    assert [state.first_unstable_offset for _, state in contents(short)] == [6] * 3
    end(short)
    assert told(short, to_three(3)) is None
    assert [state.first_unstable_offset for _, state in contents(short)] == [-1] * 3


def appended_by_others(pair, *sequences, ends=False):
    """To one partition, by another process."""
    where = THREE[1]

    def run(stage):
        for sequence in sequences:
            stage.log(*where).append(validated(batch(sequence)), now_ms=NOW)
        if ends:
            mark(stage, where=[where])

    for stage in pair:
        assert fork(lambda: run(stage)) == 0  # noqa: B023


def test_what_has_been_read_in_python_is_not_taken_for_news(pair):
    """Read twice it would push batches out that may be sent again."""
    begin(*pair)
    same(pair, to_three(1), to_three(2))
    appended_by_others(pair, 3, 4)
    assert known(pair[0]) == known(pair[1])  # as DescribeProducers does
    same(pair, request((*THREE[1], batch(5))))
    assert known(pair[0]) == known(pair[1])
    answer = same(pair, request((*THREE[1], batch(1))))
    assert [code for _, code, _ in codes(answer)] == [0]
    pair[0].short_ways.clear()
    same(pair, request((*THREE[1], batch(6))))
    assert pair[0].short_ways == [PRODUCE]


def test_what_has_ended_is_not_begun_again_by_reading_half_of_it_twice(pair):
    begin(*pair)
    same(pair, to_three(1))
    appended_by_others(pair, *range(2, 80), ends=True)
    assert known(pair[0]) == known(pair[1])
    begin(*pair, producer=8)
    same(pair, request((*THREE[1], batch(1, producer=8))))
    for stage in pair:
        state = stage.log(*THREE[1]).row.snapshot()
        assert state.first_unstable_offset == state.log_end_offset - 1


# -- acks=all ------------------------------------------------------------------------


def test_acks_all_waits_for_every_disk_write_and_not_for_less(syncing):
    for stage in syncing:
        stage.publish(to_three(2, acks=-1))
        stage.handler.turn()
        for _ in range(2):
            stage.disk.end(count=1)
            stage.handler._see_to_parked()
            assert stage.memory.responses[0].waiting() == []
        stage.end_syncs()
    assert syncing[0].answer(3) == syncing[1].answer(3)
    assert syncing[0].short_ways == [PRODUCE]


@pytest.mark.parametrize("where", [THREE, THREE[:1]])
def test_on_a_quick_disk_it_is_answered_in_the_turn_that_took_it(syncing, where):
    for stage in syncing:
        stage.disk.is_quick = True
    frame = request(*((*each, batch(2)) for each in where), acks=-1)
    assert codes(same(syncing, frame))
    assert syncing[0].short_ways == [PRODUCE]
    for stage in syncing:
        assert stage.disk.started == [] and stage.purgatory.size == 0


def test_a_partition_that_fails_to_reach_the_disk_is_told_of_either_way(syncing):
    ends = []
    for stage in syncing:
        stage.publish(to_three(2, acks=-1))
        stage.handler.turn()
        stage.disk.end(error=5, count=1)
        stage.end_syncs()
        ends.append(stage.answer(3))
    assert ends[0] == ends[1]
    assert sorted(code for _, code, _ in codes(ends[0])) == [0, 0, STORAGE_ERROR]
