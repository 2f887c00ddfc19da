"""Fetches and acknowledgements of share groups, request by request."""

from __future__ import annotations

from random import Random

import pytest

from mpbroker.coordinator.share import share_states
from mpbroker.coordinator.share.share_partition import Limits, RecordState, StateBatch
from mpbroker.coordinator.share.share_records import ShareKey
from mpbroker.coordinator.share.share_sessions import MAX_PARTITIONS
from mpbroker.protocol.error_code import ErrorCode as E
from mpbroker.protocol.messages.share_acknowledge import AcknowledgeType
from tests.coordinator.share.share_rig import START_MS, ShareRig, T, acquired, codes

GAP, ACCEPT, RELEASE, REJECT, RENEW = AcknowledgeType
ACKNOWLEDGED = RecordState.ACKNOWLEDGED


@pytest.fixture
def rig() -> ShareRig:
    made = ShareRig()
    made.append(0, 9)
    return made


def test_two_members_share_a_partition(rig: ShareRig) -> None:
    one = rig.answer_to(rig.fetch("a", 0))
    assert acquired(one) == {0: [(0, 5, 1)]}
    assert one.responses[0].partitions[0].records == b"0-5"
    assert one.acquisition_lock_timeout_ms == 1000
    assert acquired(rig.answer_to(rig.fetch("b", 0))) == {0: [(6, 8, 1)]}
    said = rig.acknowledge("a", 1, {0: [(0, 5, [ACCEPT])]})
    assert (said.error_code, codes(said)) == (0, {0: 0})
    assert rig.start_offset() == 6


def test_a_fetch_waits_for_records_and_is_answered_when_they_come(
    rig: ShareRig,
) -> None:
    rig.fetch("a", 0)
    rig.fetch("a", 1)
    waiting = rig.fetch("a", 2)
    assert rig.answer_to(waiting) is None
    rig.append(0, 1)
    assert acquired(rig.answer_to(waiting)) == {0: [(9, 9, 1)]}
    waiting = rig.fetch("a", 3, max_wait_ms=100)
    rig.wait(99)
    assert rig.answer_to(waiting) is None
    rig.wait(1)
    assert rig.answer_to(waiting).responses == []


def test_a_fetch_that_waits_is_looked_at_when_notices_were_lost(rig: ShareRig) -> None:
    rig.fetch("a", 0)
    rig.fetch("a", 1)
    waiting = rig.fetch("a", 2)
    assert rig.answer_to(waiting) is None
    rig.reader.end[0] += 1
    rig.reader.watched.clear()  # the notice was sent, and the ring was full
    rig.service.has_lost_notices()
    assert rig.service.go_on(rig.now_ms)
    rig.collect()
    assert acquired(rig.answer_to(waiting)) == {0: [(9, 9, 1)]}


def test_a_fetch_that_must_not_wait_is_answered_with_its_acknowledgements(
    rig: ShareRig,
) -> None:
    rig.fetch("a", 0, max_records=100)
    waiting = rig.fetch("a", 1, acks={0: [(0, 8, [ACCEPT])]})
    assert rig.answer_to(waiting) is None
    assert waiting.end_wait is not None
    waiting.end_wait()
    rig.collect()
    row = rig.answer_to(waiting).responses[0].partitions[0]
    assert (row.acknowledge_error_code, rig.start_offset()) == (0, 9)


@pytest.mark.parametrize("how", ["released", "lock", "left"])
def test_what_is_available_again_goes_to_a_fetch_that_waits(
    rig: ShareRig, how: str
) -> None:
    rig.fetch("a", 0, max_records=100)
    waiting = rig.fetch("b", 0, max_wait_ms=5000)
    assert rig.answer_to(waiting) is None
    if how == "released":
        rig.acknowledge("a", 1, {0: [(0, 8, [RELEASE])]})
    elif how == "left":
        rig.acknowledge("a", -1, {})
    else:
        rig.wait(999)
        assert rig.answer_to(waiting) is None
        rig.wait(1)
    assert acquired(rig.answer_to(waiting)) == {0: [(0, 5, 2)]}


def test_what_a_member_had_is_available_when_its_connection_is_closed() -> None:
    rig = ShareRig()
    rig.settings = rig.settings._replace(
        limits=rig.settings.limits._replace(lock_ms=60_000)
    )
    rig.append(0, 9)
    rig.fetch("a", 0, max_records=100)
    rig.connection = (2, 1)
    waiting = rig.fetch("b", 0, max_wait_ms=5000)
    rig.wait(1000)
    assert rig.answer_to(waiting) is None
    rig.closed.add((1, 1))
    rig.wait(1000)
    assert acquired(rig.answer_to(waiting)) == {0: [(0, 5, 2)]}
    assert rig.acknowledge("a", 1, {}).error_code == E.SHARE_SESSION_NOT_FOUND
    rig.closed.add((2, 1))
    rig.wait(1000)
    assert len(rig.service.sessions) == 0


@pytest.mark.parametrize("pause_ms", [0, 300])
def test_a_lock_is_not_ended_by_the_timer_of_one_before_it(
    rig: ShareRig, pause_ms: int
) -> None:
    rig.fetch("a", 0)  # its lock would end after 1000 ms
    rig.wait(500)
    rig.acknowledge("a", 1, {0: [(0, 5, [ACCEPT])]})
    rig.wait(pause_ms)  # meanwhile no lock is left
    assert acquired(rig.answer_to(rig.fetch("a", 2))) == {0: [(6, 8, 1)]}
    waiting = rig.fetch("b", 0, max_wait_ms=5000)
    rig.wait(999)
    assert rig.answer_to(waiting) is None
    rig.wait(1)
    assert acquired(rig.answer_to(waiting)) == {0: [(6, 8, 2)]}


def test_a_renewed_lock_lasts_longer(rig: ShareRig) -> None:
    rig.fetch("a", 0, max_records=100)
    rig.wait(600)
    refused = rig.acknowledge("a", 1, {0: [(0, 2, [RENEW])]})
    assert codes(refused) == {0: E.INVALID_REQUEST}  # it does not say that it renews
    assert codes(rig.acknowledge("a", 2, {0: [(0, 2, [RENEW])]}, renews=True)) == {0: 0}
    rig.wait(400)
    assert acquired(rig.answer_to(rig.fetch("b", 0, max_records=100))) == {
        0: [(3, 8, 2)]
    }


def test_sessions_are_held_to_their_epochs(rig: ShareRig) -> None:
    assert rig.answer_to(rig.fetch("a", 1)).error_code == E.SHARE_SESSION_NOT_FOUND
    rig.fetch("a", 0)
    wrong = rig.answer_to(rig.fetch("a", 2))
    assert wrong.error_code == E.INVALID_SHARE_SESSION_EPOCH
    assert rig.acknowledge("a", 0, {}).error_code == E.INVALID_SHARE_SESSION_EPOCH
    assert rig.acknowledge("b", 1, {}).error_code == E.SHARE_SESSION_NOT_FOUND
    first = rig.answer_to(rig.fetch("b", 0, acks={0: [(0, 0, [ACCEPT])]}))
    assert first.error_code == E.INVALID_REQUEST
    for member in "bc":
        rig.fetch(member, 0)
    full = rig.answer_to(rig.fetch("d", 0))
    assert full.error_code == E.SHARE_SESSION_LIMIT_REACHED
    again = rig.fetch("a", 0, max_wait_ms=0)  # it has one
    assert rig.answer_to(again).error_code == E.NONE


def test_a_session_has_as_many_partitions_as_a_fetch_session(rig: ShareRig) -> None:
    half = MAX_PARTITIONS // 2
    first = rig.fetch("a", 0, tuple(range(half)), max_wait_ms=0)
    assert rig.answer_to(first).error_code == E.NONE
    second = rig.fetch("a", 1, tuple(range(half, MAX_PARTITIONS)), max_wait_ms=0)
    assert rig.answer_to(second).error_code == E.NONE
    full = rig.answer_to(rig.fetch("a", 2, (MAX_PARTITIONS,)))
    assert full.error_code == E.INVALID_REQUEST
    assert "at most 16383 partitions" in full.error_message


def test_requests_without_a_group_or_member_are_refused(rig: ShareRig) -> None:
    assert rig.answer_to(rig.fetch("", 0)).error_code == E.INVALID_REQUEST
    assert rig.answer_to(rig.fetch("a", 0, group="")).error_code == E.INVALID_REQUEST
    rig.fetch("a", 0)
    renews = rig.answer_to(rig.fetch("a", 1, is_renew_ack=True))
    assert renews.error_code == E.INVALID_REQUEST  # and it must not fetch


def test_partitions_that_do_not_exist_are_told_at_once(rig: ShareRig) -> None:
    answer = rig.answer_to(rig.fetch("a", 0, (7,)))
    assert codes(answer) == {7: E.UNKNOWN_TOPIC_OR_PARTITION}
    answer = rig.answer_to(rig.fetch("b", 0, topic=b"u" * 16))
    assert codes(answer) == {0: E.UNKNOWN_TOPIC_ID}
    said = rig.acknowledge("b", 1, {0: [(0, 0, [ACCEPT])]}, topic=b"u" * 16)
    assert codes(said) == {0: E.UNKNOWN_TOPIC_ID}


@pytest.mark.parametrize(
    ("strategy", "start"), [("earliest", 2), ("latest", 9), ("by_duration:PT7S", 3)]
)
def test_a_group_begins_where_its_strategy_says_and_stays_there(
    strategy: str, start: int
) -> None:
    rig = ShareRig(auto_offset_reset=strategy)
    rig.append(0, 9)
    rig.reader.start[0] = 2
    assert rig.now_ms == START_MS
    rig.fetch("a", 0)
    assert rig.start_offset() == start
    rig.restart()
    rig.append(0, 5)
    rig.fetch("a", 0)
    assert rig.start_offset() == start


def test_records_that_the_log_has_deleted_are_skipped(rig: ShareRig) -> None:
    rig.fetch("a", 0, max_records=3)
    rig.reader.start[0] = 7
    assert acquired(rig.answer_to(rig.fetch("b", 0))) == {0: [(7, 8, 1)]}
    said = rig.acknowledge("a", 1, {0: [(0, 2, [ACCEPT])]})
    assert codes(said) == {0: 0}  # ignored
    rig.restart()
    assert rig.start_offset() == 7


def test_a_log_that_is_not_loaded_or_lost_is_told(rig: ShareRig) -> None:
    rig.fetch("a", 0)
    for partition in range(3):
        rig.states.failed(partition)
    answer = rig.answer_to(rig.fetch("a", 1))
    assert codes(answer) == {0: E.NOT_LEADER_OR_FOLLOWER}
    rig.states.begin_loading(range(3))
    answer = rig.answer_to(rig.fetch("a", 2))
    assert codes(answer) == {0: E.NOT_LEADER_OR_FOLLOWER}


def test_a_long_log_is_pruned_once_its_states_are_written_again(
    rig: ShareRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(share_states, "_PRUNE_RECORDS", 20)
    deleted: list[int] = []

    def delete_before(partition: int, offset: int) -> None:
        deleted.append(offset)
        assert all(each[0] == partition for each in rig.log)
        # Nothing before the offset is needed any more.
        del rig.log[: offset - sum(deleted[:-1])]

    rig.states.log_end = lambda partition: len(rig.log) + sum(deleted)
    rig.states.delete_before = delete_before
    rig.append(0, 91)
    for epoch in range(0, 60, 2):
        (got,) = acquired(rig.answer_to(rig.fetch("a", epoch, max_records=1)))[0]
        rig.acknowledge("a", epoch + 1, {0: [(got[0], got[1], [ACCEPT])]})
        for step in rig.out.take_steps():
            step.run(True)
    assert deleted
    assert len(rig.log) <= 21
    before = rig.start_offset()
    assert before > 60
    rig.restart()
    assert rig.start_offset() == before


def test_a_state_of_very_many_spans_is_written_whole(rig: ShareRig) -> None:
    """One batch may have so many records, acknowledged one here and one there."""
    key, last = ShareKey("g", T, 0), 25_000
    state = rig.states.begin(key, 0, 0, rig.now_ms)
    assert state.share is not None
    state.share.acquire("a", [(0, last)], last, Limits(record_locks=100), 0)
    acknowledged = [StateBatch(n, n, ACKNOWLEDGED, 1) for n in range(1, last, 2)]
    rig.states.write(key, 0, 0, acknowledged, rig.now_ms)
    written = state.share.state_batches()
    assert len(written) == last + 1
    rig.restart()
    loaded = rig.states.get(key)
    assert loaded is not None and loaded.share is not None
    assert loaded.share.state_batches() == written


@pytest.mark.parametrize("seed", range(20))
def test_kills_lose_no_record_and_leave_none_stuck(seed: int) -> None:
    """Whatever was not acknowledged is delivered again, and nothing else is."""
    chance = Random(seed)
    rig = ShareRig()
    epochs: dict[str, int] = {}
    held: dict[str, list[tuple[int, int, int]]] = {}
    accepted: set[int] = set()
    produced = 0
    for _ in range(150):
        member = chance.choice("abc")
        match chance.randrange(8):
            case 0:
                rig.append(0, chance.randrange(8))
                produced = rig.reader.end[0]
            case 1:
                rig.restart()
                epochs.clear()
                held.clear()
            case 2:
                rig.wait(chance.choice((10, 400, 1000)))
                held.clear()  # perhaps too many: these are delivered again
            case 3 | 4:
                call = rig.fetch(member, epochs.get(member, 0), max_wait_ms=0)
                answer = rig.answer_to(call)
                assert answer.error_code == E.NONE
                epochs[member] = epochs.get(member, 0) + 1
                for each in acquired(answer).get(0, ()):
                    offsets = set(range(each[0], each[1] + 1))
                    assert not offsets & accepted
                    held.setdefault(member, []).append(each)
            case _:
                if member not in epochs or not held.get(member):
                    continue
                first, last, count = held[member].pop()
                # The last delivery is accepted, or it would be archived.
                kind = ACCEPT if count > 1 else chance.choice((ACCEPT, RELEASE))
                said = rig.acknowledge(
                    member, epochs[member], {0: [(first, last, [kind])]}
                )
                epochs[member] += 1
                assert codes(said) == {0: E.NONE}
                if kind is ACCEPT:
                    accepted |= set(range(first, last + 1))
    rig.restart()
    seen: set[int] = set()
    epoch = 0
    while True:
        rig.wait(1000)
        call = rig.fetch("z", epoch, max_wait_ms=0, max_records=100)
        epoch += 1
        got = acquired(rig.answer_to(call))
        if not got:
            break
        for first, last, _ in got[0]:
            seen |= set(range(first, last + 1))
            rig.acknowledge("z", epoch, {0: [(first, last, [ACCEPT])]})
            epoch += 1
    assert not seen & accepted
    assert rig.start_offset() in (produced, -2)
