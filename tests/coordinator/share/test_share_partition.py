"""The state of a share-partition is that of a model which has one row an offset."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpbroker.coordinator.share.share_partition import (
    NEVER,
    Acknowledgement,
    AcknowledgeType,
    Acquired,
    Limits,
    RecordState,
    SharePartition,
    StateBatch,
    check_acknowledgements,
)
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError

LIMITS = Limits(delivery_count=2, record_locks=12, lock_ms=100)
AVAILABLE, ACQUIRED, ACKNOWLEDGED, ARCHIVED = RecordState
GAP, ACCEPT, RELEASE, REJECT, RENEW = AcknowledgeType


@dataclass
class Row:
    state: RecordState = AVAILABLE
    count: int = 0
    member: str = ""
    deadline: int = NEVER


@dataclass
class Model:
    """One row an offset, and no cleverness."""

    start: int = 0
    rows: dict[int, Row] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.start + len(self.rows)

    def tidy(self) -> None:
        while self.rows and self.rows[self.start].state in (ACKNOWLEDGED, ARCHIVED):
            del self.rows[self.start]
            self.start += 1

    def in_flight(self) -> int:
        return sum(r.state in (AVAILABLE, ACQUIRED) for r in self.rows.values())

    def acquire(
        self, member: str, first: int, last: int, most: int, now: int, batch: int
    ) -> dict[int, int]:
        """Acquire offset by offset; batches are ``batch`` offsets long."""
        got: dict[int, int] = {}
        for offset in range(first, last + 1):
            # A batch that was begun is acquired whole.
            if len(got) >= most and (offset % batch == 0 or offset - 1 not in got):
                if offset >= self.end:
                    break
                continue
            if offset >= self.end:
                full = self.in_flight() >= LIMITS.record_locks
                if full and (offset % batch == 0 or offset - 1 not in got):
                    break
                self.rows[offset] = Row()
            row = self.rows[offset]
            if row.state is AVAILABLE:
                row.state, row.member = ACQUIRED, member
                row.deadline = now + LIMITS.lock_ms
                row.count += 1
                got[offset] = row.count
        self.tidy()
        return got

    def acknowledge(self, member: str, says: dict[int, int], now: int) -> bool:
        for offset in says:
            if offset < self.start:
                continue
            row = self.rows.get(offset)
            if row is None or row.state is not ACQUIRED or row.member != member:
                return False
        for offset, kind in says.items():
            if offset < self.start:
                continue
            row = self.rows[offset]
            if kind == RENEW:
                row.deadline = now + LIMITS.lock_ms
                continue
            row.member, row.deadline = "", NEVER
            if kind == RELEASE:
                self.free(row)
            else:
                row.state = ACKNOWLEDGED if kind == ACCEPT else ARCHIVED
        self.tidy()
        return True

    def free(self, row: Row) -> None:
        row.member, row.deadline = "", NEVER
        row.state = ARCHIVED if row.count >= LIMITS.delivery_count else AVAILABLE

    def free_all(self, now: int | None, member: str | None) -> None:
        for row in self.rows.values():
            if row.state is ACQUIRED and (
                row.member == member or (now is not None and row.deadline <= now)
            ):
                self.free(row)
        self.tidy()

    def move_start(self, start: int) -> None:
        if start <= self.start:
            return
        end = max(self.end, start)
        self.rows = {o: r for o, r in self.rows.items() if o >= start}
        self.start = start
        assert self.end == end
        self.tidy()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("acquire"), st.sampled_from("ab"), st.integers(1, 9)),
        st.tuples(
            st.just("acknowledge"),
            st.sampled_from("ab"),
            st.integers(0, 24),
            st.lists(st.integers(0, 4), min_size=1, max_size=6),
        ),
        st.tuples(st.just("release"), st.sampled_from("ab")),
        st.tuples(st.just("wait"), st.integers(1, 120)),
        st.tuples(st.just("move"), st.integers(1, 3)),
        st.tuples(st.just("restart")),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(steps=STEPS, batch=st.integers(1, 4))
def test_it_behaves_as_a_model_with_one_row_an_offset(
    steps: list[tuple], batch: int
) -> None:
    real, model, now = SharePartition(0), Model(), 1000
    for step in steps:
        match step:
            case ("acquire", member, most):
                offset = real.next_fetch_offset(LIMITS)
                if offset is None:
                    assert model.in_flight() >= LIMITS.record_locks
                    continue
                begin = offset - offset % batch
                batches = [
                    (first, first + batch - 1)
                    for first in range(begin, begin + 4 * batch, batch)
                ]
                got, _ = real.acquire(member, batches, most, LIMITS, now)
                expected = model.acquire(
                    member, offset, batches[-1][1], most, now, batch
                )
                assert _by_offset(got) == expected
            case ("acknowledge", member, first, types):
                says = dict(enumerate(types, model.start + first))
                batch_of = Acknowledgement(min(says), max(says), types)
                before = real.spans()
                try:
                    real.acknowledge(member, [batch_of], LIMITS, now)
                    accepted = True
                except ApiError:
                    assert real.spans() == before
                    accepted = False
                assert accepted == model.acknowledge(member, says, now)
            case ("release", member):
                real.release(member, LIMITS)
                model.free_all(None, member)
            case ("wait", ms):
                now += ms
                real.expire(LIMITS, now)
                model.free_all(now, None)
            case ("move", more):
                real.move_start(model.start + more)
                model.move_start(model.start + more)
            case ("restart",):
                real = SharePartition(real.start_offset, real.state_batches())
                for row in model.rows.values():
                    if row.state is ACQUIRED:
                        row.state, row.member, row.deadline = AVAILABLE, "", NEVER
        _same(real, model)


def _by_offset(acquired: list[Acquired]) -> dict[int, int]:
    return {
        offset: each.delivery_count
        for each in acquired
        for offset in range(each.first, each.last + 1)
    }


def _same(real: SharePartition, model: Model) -> None:
    assert (real.start_offset, real.end_offset) == (model.start, model.end)
    shown = {
        offset: (each.state, each.delivery_count)
        for each in real.spans()
        for offset in range(each.first, each.last + 1)
    }
    assert shown == {o: (r.state, r.count) for o, r in model.rows.items()}
    assert real.in_flight_count == model.in_flight()
    deadlines = [r.deadline for r in model.rows.values()]
    assert real.next_deadline_ms == min(deadlines, default=NEVER)
    for member in "ab":
        assert real.holds_of(member) == any(
            r.member == member for r in model.rows.values()
        )


def test_what_is_written_makes_the_same_state_again() -> None:
    real = SharePartition(5)
    real.acquire("a", [(5, 9), (10, 14)], 10, LIMITS, 0)
    written = real.acknowledge(
        "a", [Acknowledgement(6, 8, [ACCEPT, RELEASE, REJECT])], LIMITS, 0
    )
    assert written == [
        StateBatch(6, 6, ACKNOWLEDGED, 1),
        StateBatch(7, 7, AVAILABLE, 1),
        StateBatch(8, 8, ARCHIVED, 1),
    ]
    again = SharePartition(5, written)
    assert (again.start_offset, again.end_offset) == (5, 9)
    assert again.spans()[0] == StateBatch(5, 5, AVAILABLE, 0)


def test_a_record_is_archived_after_its_last_delivery() -> None:
    real = SharePartition(0)
    for count in (1, 2):
        assert real.spans() in ([], [StateBatch(0, 0, AVAILABLE, count - 1)])
        got, _ = real.acquire("a", [(0, 0)], 1, LIMITS, 0)
        assert got == [Acquired(0, 0, count)]
        real.expire(LIMITS, LIMITS.lock_ms)
    assert (real.spans(), real.start_offset) == ([], 1)


def test_a_strict_acquisition_cuts_a_batch() -> None:
    real = SharePartition(0)
    got, _ = real.acquire("a", [(0, 9)], 3, LIMITS, 0, strict=True)
    assert got == [Acquired(0, 2, 1)]
    got, _ = real.acquire("b", [(0, 9)], 3, LIMITS, 0)
    assert got == [Acquired(3, 9, 1)]


def test_batches_of_aborted_transactions_are_archived() -> None:
    real = SharePartition(0)
    batches = [(0, 1), (2, 3), (4, 5), (6, 6)]
    got, archived = real.acquire("a", batches, 10, LIMITS, 0, aborted=[(2, 3), (6, 6)])
    assert got == [Acquired(0, 1, 1), Acquired(4, 5, 1)]
    assert [(each.first, each.last) for each in archived] == [(2, 3), (6, 6)]
    real.acknowledge("a", [Acknowledgement(0, 1, [ACCEPT])], LIMITS, 0)
    assert real.start_offset == 4


@pytest.mark.parametrize(
    ("first", "last", "member", "code"),
    [
        (5, 5, "a", ErrorCode.INVALID_REQUEST),  # it was never read
        (3, 5, "a", ErrorCode.INVALID_REQUEST),
        (0, 1, "b", ErrorCode.INVALID_RECORD_STATE),  # another member has it
    ],
)
def test_what_a_member_does_not_have_it_cannot_acknowledge(
    first: int, last: int, member: str, code: ErrorCode
) -> None:
    real = SharePartition(0)
    real.acquire("a", [(0, 4)], 5, LIMITS, 0)
    with pytest.raises(ApiError) as refused:
        real.acknowledge(member, [Acknowledgement(first, last, [ACCEPT])], LIMITS, 0)
    assert refused.value.error_code is code


def test_a_lock_cannot_be_renewed_where_the_group_forbids_it() -> None:
    real = SharePartition(0)
    real.acquire("a", [(0, 4)], 5, LIMITS, 0)
    with pytest.raises(ApiError) as refused:
        real.acknowledge(
            "a",
            [Acknowledgement(0, 4, [RENEW])],
            LIMITS._replace(may_renew=False),
            0,
        )
    assert refused.value.error_code is ErrorCode.INVALID_RECORD_STATE


@pytest.mark.parametrize(
    "wrong",
    [
        [Acknowledgement(3, 2, [ACCEPT])],
        [Acknowledgement(3, 4, [ACCEPT]), Acknowledgement(4, 5, [ACCEPT])],
        [Acknowledgement(3, 5, [ACCEPT, ACCEPT])],
        [Acknowledgement(3, 4, [])],
        [Acknowledgement(3, 3, [5])],
        [Acknowledgement(3, 3, [-1])],
    ],
)
def test_acknowledgements_in_the_wrong_form_are_refused(
    wrong: list[Acknowledgement],
) -> None:
    with pytest.raises(ApiError) as refused:
        check_acknowledgements(wrong)
    assert refused.value.error_code is ErrorCode.INVALID_REQUEST
