"""Keep the delivery state of a share-partition: a partition as a share group reads it.

    start_offset                               end_offset
         |  acknowledged | available | acquired |  not read yet ...

Each offset between start_offset and end_offset is in one span, and neighbouring spans
with the same state are joined. A record is available until a member acquires it. Then
the member acknowledges it, or its lock ends and the record is available again. After
its last allowed delivery it is archived instead: it is not delivered any more. A record
that is acknowledged or archived is finished, and the start offset moves behind finished
spans at the front.

Sans-IO: methods get the time, the limits and the boundaries of the record batches.
They return the changes that must be on disk before they are answered, as state batches.
An acquisition is not written: after the coordinator's death the record is available
again.

Source: KIP-932; Kafka's SharePartition and InFlightState, with their error messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Final

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.share_acknowledge import AcknowledgeType

NEVER: Final = 1 << 62


class RecordState(IntEnum):
    """The states of a record; the numbers are those in the log."""

    AVAILABLE = 0  # a member may acquire it
    ACQUIRED = 1  # a member has it until its lock ends
    ACKNOWLEDGED = 2  # it was processed
    ARCHIVED = 4  # it will not be delivered any more


class StateBatch(NamedTuple):
    """The state of consecutive offsets, as a record of __share_group_state has it."""

    first: int
    last: int
    state: int
    delivery_count: int


class Acquired(NamedTuple):
    """Consecutive offsets that a member of a share group has acquired."""

    first: int
    last: int
    delivery_count: int


class Acknowledgement(NamedTuple):
    """A member's acknowledgement of consecutive offsets.

    ``types`` has one AcknowledgeType for all offsets, or one for each.
    """

    first: int
    last: int
    types: Sequence[int]


class Limits(NamedTuple):
    """The settings of a share group on which acquisitions depend.

    A record is delivered at most ``delivery_count`` times. No new records are read
    while ``record_locks`` records of a partition are not finished. ``lock_ms`` is how
    long a member may keep a record that it has acquired.
    """

    delivery_count: int = 5
    record_locks: int = 2000
    lock_ms: int = 30_000
    may_renew: bool = True


_AVAILABLE: Final = RecordState.AVAILABLE
_ACQUIRED: Final = RecordState.ACQUIRED
_ACKNOWLEDGED: Final = RecordState.ACKNOWLEDGED
_ARCHIVED: Final = RecordState.ARCHIVED
_NEXT_STATES: Final = {
    AcknowledgeType.GAP: _ARCHIVED,
    AcknowledgeType.ACCEPT: _ACKNOWLEDGED,
    AcknowledgeType.RELEASE: _AVAILABLE,
    AcknowledgeType.REJECT: _ARCHIVED,
}


class _Span:
    """Consecutive offsets of a partition that have the same delivery state."""

    __slots__ = ("deadline_ms", "delivery_count", "first", "last", "member_id", "state")

    def __init__(
        self,
        first: int,
        last: int,
        state: RecordState,
        delivery_count: int,
        member_id: str = "",
        deadline_ms: int = NEVER,
    ) -> None:
        self.first = first
        self.last = last
        self.state = state
        self.delivery_count = delivery_count
        self.member_id = member_id  # the member that has acquired it; "": none has
        self.deadline_ms = deadline_ms  # when the member's lock ends

    @property
    def is_finished(self) -> bool:
        return self.state is _ACKNOWLEDGED or self.state is _ARCHIVED

    def is_like(self, other: _Span) -> bool:
        return (
            self.state is other.state
            and self.delivery_count == other.delivery_count
            and self.member_id == other.member_id
            and self.deadline_ms == other.deadline_ms
        )

    def cut(self, first: int, last: int) -> _Span:
        """Return a copy of this span for a part of its offsets, in the same state."""
        return _Span(
            first,
            last,
            self.state,
            self.delivery_count,
            self.member_id,
            self.deadline_ms,
        )

    def set(
        self, state: RecordState, member_id: str = "", deadline_ms: int = NEVER
    ) -> None:
        self.state = state
        self.member_id = member_id
        self.deadline_ms = deadline_ms

    def release(self, limit: int) -> None:
        """Make the records available again; archive them after the last delivery."""
        self.set(_ARCHIVED if self.delivery_count >= limit else _AVAILABLE)

    def batch(self) -> StateBatch:
        return StateBatch(self.first, self.last, self.state, self.delivery_count)


class _Taking:
    """One acquisition of records by a member: its limits, and what it has acquired."""

    def __init__(
        self,
        member_id: str,
        batches: Sequence[tuple[int, int]],
        max_records: int,
        limits: Limits,
        now_ms: int,
        strict: bool,
    ) -> None:
        self.batches = batches
        self.max_records = max_records
        self.limits = limits
        self.strict = strict
        self.count = 0
        self.acquired: list[Acquired] = []
        self._member_id = member_id
        self._deadline_ms = now_ms + limits.lock_ms

    @property
    def is_full(self) -> bool:
        return self.count >= self.max_records

    def cut(self, span: _Span) -> int:
        """Return how far into a span (to which offset) a member may acquire now."""
        last = span.first + self.max_records - self.count - 1
        if last < span.last and not self.strict:
            last = _end_of_batch(self.batches, last)
        return min(last, span.last)

    def take(self, span: _Span) -> None:
        span.delivery_count += 1
        span.set(_ACQUIRED, self._member_id, self._deadline_ms)
        self.count += span.last - span.first + 1
        self.acquired.append(Acquired(span.first, span.last, span.delivery_count))


class SharePartition:
    """Keeps the delivery state of one share-partition.

    Attributes:
        start_offset: the first offset that is not finished (Kafka's SPSO).
        end_offset: the first offset that was never read.
    """

    def __init__(self, start_offset: int, batches: Iterable[StateBatch] = ()) -> None:
        self.start_offset = start_offset
        self.end_offset = start_offset
        self._spans: list[_Span] = []
        for batch in sorted(batches):
            first = max(batch.first, start_offset, self.end_offset)
            if batch.last < first:
                continue
            if first > self.end_offset:  # no batch has these offsets: available
                self._spans.append(_Span(self.end_offset, first - 1, _AVAILABLE, 0))
            state = RecordState(batch.state)
            if state is _ACQUIRED:
                state = _AVAILABLE
            self._spans.append(_Span(first, batch.last, state, batch.delivery_count))
            self.end_offset = batch.last + 1
        self._tidy()

    # -- what it holds -------------------------------------------------------------

    def spans(self) -> list[StateBatch]:
        """Return the delivery states of all offsets from start_offset to end_offset."""
        return [span.batch() for span in self._spans]

    def state_batches(self) -> list[StateBatch]:
        """Return the delivery states as they are written to __share_group_state.

        Acquired records are written as available.
        """
        return [
            StateBatch(
                span.first,
                span.last,
                _AVAILABLE if span.state is _ACQUIRED else span.state,
                span.delivery_count,
            )
            for span in self._spans
        ]

    @property
    def finished_count(self) -> int:
        """The number of acknowledged or archived offsets above the start offset."""
        count = 0
        for span in self._spans:  # a loop: sum() of a generator takes twice as long
            if span.is_finished:
                count += span.last - span.first + 1
        return count

    @property
    def in_flight_count(self) -> int:
        """The number of read offsets that are neither acknowledged nor archived."""
        return self.end_offset - self.start_offset - self.finished_count

    @property
    def next_deadline_ms(self) -> int:
        """The time (ms) at which the first acquisition lock ends; NEVER: none."""
        deadline_ms = NEVER
        for span in self._spans:
            if span.deadline_ms < deadline_ms:
                deadline_ms = span.deadline_ms
        return deadline_ms

    def next_fetch_offset(self, limits: Limits) -> int | None:
        """Return the offset from which the next fetch reads the log.

        Return None if no record is available, and so many records are not finished that
        no new ones may be read (group.share.partition.max.record.locks).
        """
        for span in self._spans:
            if span.state is _AVAILABLE:
                return span.first
        if self.in_flight_count >= limits.record_locks:
            return None
        return self.end_offset

    def has_available(self) -> bool:
        """Return whether a record that was read before can be acquired now."""
        for span in self._spans:  # noqa: SIM110 - any() takes twice as long
            if span.state is _AVAILABLE:
                return True
        return False

    def holds_of(self, member_id: str) -> bool:
        """Return whether a member has acquired records."""
        return any(span.member_id == member_id for span in self._spans)

    # -- acquire -------------------------------------------------------------------

    def acquire(
        self,
        member_id: str,
        batches: Sequence[tuple[int, int]],
        max_records: int,
        limits: Limits,
        now_ms: int,
        *,
        strict: bool = False,
        aborted: Sequence[tuple[int, int]] = (),
    ) -> tuple[list[Acquired], list[StateBatch]]:
        """Let a member acquire the available records of some record batches.

        Args:
            batches: the first and last offsets of the record batches, in order.
            max_records: stop at this number of records. The batch that reaches it is
                acquired as a whole, unless ``strict``.
            strict: never acquire more than ``max_records`` (Kafka's record_limit).
            aborted: the first and last offsets of the batches of aborted transactions;
                their records are archived.

        Returns:
            The offsets that the member has acquired, and the offsets that were
            archived, whose states must be written to the log.
        """
        if not batches:
            return [], []
        taking = _Taking(member_id, batches, max_records, limits, now_ms, strict)
        archived: list[StateBatch] = []
        for span in self._available(batches[0][0], batches[-1][1]):
            self._take(taking, span, aborted, archived)
        fresh = self._extend(taking)
        if fresh is not None:
            self._take(taking, fresh, aborted, archived)
        found = _joined(taking.acquired)
        self._tidy()
        return found, archived

    def _available(self, first: int, last: int) -> list[_Span]:
        """Return the parts of a range of offsets that can be acquired now."""
        return [span for span in self._exactly(first, last) if span.state is _AVAILABLE]

    def _extend(self, taking: _Taking) -> _Span | None:
        """Add offsets that were never read before, as available; return them as a span.

        Return None if there are none, or if a limit does not allow more.
        """
        last = taking.batches[-1][1]
        room = min(
            taking.limits.record_locks - self.in_flight_count,
            taking.max_records - taking.count,
        )
        if last < self.end_offset or room <= 0:
            return None
        end = self.end_offset + room - 1
        if end < last:
            last = end if taking.strict else _end_of_batch(taking.batches, end)
        span = _Span(self.end_offset, last, _AVAILABLE, 0)
        self._spans.append(span)
        self.end_offset = last + 1
        return span

    def _take(
        self,
        taking: _Taking,
        span: _Span,
        aborted: Sequence[tuple[int, int]],
        archived: list[StateBatch],
    ) -> None:
        """Acquire a range of available records, as far as the limits allow.

        Parts of aborted transactions are archived, and added to ``archived``.
        """
        if taking.is_full:
            return
        for part in self._cut_at_aborted(span, aborted):
            if part.state is _ARCHIVED:
                archived.append(part.batch())
            elif not taking.is_full:
                self._split(part, taking.cut(part))
                taking.take(part)

    def _cut_at_aborted(
        self, span: _Span, aborted: Sequence[tuple[int, int]]
    ) -> list[_Span]:
        """Split a range of records where aborted transactions are; return all parts.

        The parts that are in such batches are archived.
        """
        parts = [span]
        for first, last in aborted:
            rest = parts[-1]
            if first > rest.last or last < rest.first:
                continue
            if first > rest.first:
                self._split(rest, first - 1)
                rest = self._after(rest)
                parts.append(rest)
            if last < rest.last:
                self._split(rest, last)
                parts.append(self._after(rest))
            rest.set(_ARCHIVED)
        return parts

    # -- acknowledge ---------------------------------------------------------------

    def acknowledge(
        self,
        member_id: str,
        acknowledgements: Sequence[Acknowledgement],
        limits: Limits,
        now_ms: int,
    ) -> list[StateBatch]:
        """Apply a member's acknowledgements: all of them, or none if one is invalid.

        Skip offsets below the start offset.

        Returns:
            The changed states, which must be written to the log.

        Raises:
            ApiError: INVALID_REQUEST, INVALID_RECORD_STATE.
        """
        for each in acknowledgements:
            self._check(member_id, each, limits)
        changed: list[StateBatch] = []
        for each in acknowledgements:
            for first, last, kind in _runs(each):
                if last < self.start_offset:
                    continue
                for span in self._exactly(max(first, self.start_offset), last):
                    if kind == AcknowledgeType.RENEW:
                        span.deadline_ms = now_ms + limits.lock_ms
                        continue
                    if kind == AcknowledgeType.RELEASE:
                        span.release(limits.delivery_count)
                    else:
                        span.set(_NEXT_STATES[AcknowledgeType(kind)])
                    changed.append(span.batch())
        self._tidy()
        return changed

    def _check(self, member_id: str, each: Acknowledgement, limits: Limits) -> None:
        first, last, types = each
        if last < self.start_offset:
            return
        if not self._spans or first >= self.end_offset:
            raise ApiError(
                ErrorCode.INVALID_REQUEST,
                "Batch record not found. The first offset in request is past acquired"
                " records.",
            )
        if last >= self.end_offset:
            raise ApiError(
                ErrorCode.INVALID_REQUEST,
                "Batch record not found. The last offset in request is past acquired"
                " records.",
            )
        if AcknowledgeType.RENEW in types and not limits.may_renew:
            raise ApiError(
                ErrorCode.INVALID_RECORD_STATE,
                "Renewing acquisition locks is not enabled for the group.",
            )
        for span in self._between(max(first, self.start_offset), last):
            if span.state is not _ACQUIRED:
                raise ApiError(
                    ErrorCode.INVALID_RECORD_STATE,
                    "The batch cannot be acknowledged. The batch is not in the"
                    " acquired state.",
                )
            if span.member_id != member_id:
                raise ApiError(
                    ErrorCode.INVALID_RECORD_STATE,
                    "Member is not the owner of batch record",
                )

    # -- locks and the log's start ---------------------------------------------------

    def release(self, member_id: str, limits: Limits) -> list[StateBatch]:
        """Make the records available again that a member has acquired.

        Return the changed states, which must be written to the log.
        """
        return self._release(
            [span for span in self._spans if span.member_id == member_id], limits
        )

    def expire(self, limits: Limits, now_ms: int) -> list[StateBatch]:
        """Make records available again whose acquisition lock has ended.

        Return the changed states, which must be written to the log.
        """
        return self._release(
            [span for span in self._spans if span.deadline_ms <= now_ms], limits
        )

    def _release(self, spans: list[_Span], limits: Limits) -> list[StateBatch]:
        for span in spans:
            span.release(limits.delivery_count)
        changed = [span.batch() for span in spans]
        self._tidy()
        return changed

    def move_start(self, log_start: int) -> bool:
        """Forget the offsets that the log has deleted; return whether there were any.

        Records that a member has acquired are forgotten, too. A later acknowledgement
        of them is ignored.
        """
        if log_start <= self.start_offset:
            return False
        if log_start >= self.end_offset:
            self._spans = []
            self.end_offset = log_start
        else:
            self._exactly(self.start_offset, log_start - 1)
            self._spans = [span for span in self._spans if span.first >= log_start]
        self.start_offset = log_start
        self._tidy()
        return True

    def apply(self, start_offset: int, batches: Iterable[StateBatch]) -> None:
        """Apply changed states of records, then a new start offset."""
        for batch in batches:
            first = max(batch.first, self.start_offset)
            if batch.last < first:
                continue
            if batch.last >= self.end_offset:
                # No batch has the offsets in front of this one: they are available.
                span = _Span(self.end_offset, batch.last, _AVAILABLE, 0)
                self._spans.append(span)
                self.end_offset = batch.last + 1
            for span in self._exactly(first, batch.last):
                span.set(RecordState(batch.state))
                span.delivery_count = batch.delivery_count
        self._tidy()
        self.move_start(start_offset)

    # -- spans ---------------------------------------------------------------------

    def _index(self, offset: int) -> int:
        """Return the index of the span (offsets of one state) that has an offset.

        If none has it, return the index of the next span.
        """
        spans = self._spans
        low, high = 0, len(spans)
        while low < high:
            middle = (low + high) // 2
            if spans[middle].last < offset:
                low = middle + 1
            else:
                high = middle
        return low

    def _between(self, first: int, last: int) -> list[_Span]:
        """Return the spans (offsets with one state each) that overlap a range."""
        found = []
        for span in self._spans[self._index(first) :]:
            if span.first > last:
                break
            found.append(span)
        return found

    def _exactly(self, first: int, last: int) -> list[_Span]:
        """Return the spans (offsets with one state each) of just this range.

        Spans that reach beyond the range are split at its ends.
        """
        index = self._index(first)
        if index == len(self._spans):
            return []
        found = self._spans[index]
        if found.first == first and found.last == last:
            return [found]  # mostly, a member acknowledges just what it has acquired
        for edge in (first - 1, last):
            index = self._index(edge)
            if index < len(self._spans):
                span = self._spans[index]
                if span.first <= edge < span.last:
                    self._split(span, edge)
        return [
            span
            for span in self._spans[self._index(first) : self._index(last) + 1]
            if first <= span.first and span.last <= last
        ]

    def _split(self, span: _Span, last: int) -> _Span:
        """Split a span (offsets of one state) behind ``last``; return its front."""
        if last < span.last:
            index = self._index(span.first)
            self._spans.insert(index + 1, span.cut(last + 1, span.last))
            span.last = last
        return span

    def _after(self, span: _Span) -> _Span:
        return self._spans[self._index(span.first) + 1]

    def _tidy(self) -> None:
        """Join neighbouring spans of offsets that have the same state by now.

        Acknowledged and archived spans at the front are dropped, and the start offset
        moves behind them.
        """
        spans: list[_Span] = []
        for span in self._spans:
            if not spans and span.is_finished:
                self.start_offset = span.last + 1
            elif spans and spans[-1].is_like(span):
                spans[-1].last = span.last
            else:
                spans.append(span)
        self._spans = spans


def check_acknowledgements(acknowledgements: Sequence[Acknowledgement]) -> None:
    """Check that a member's acknowledgements are in order, and their types valid.

    Raises:
        ApiError: INVALID_REQUEST.
    """
    behind = -1
    for first, last, types in acknowledgements:
        if first > last or first <= behind:
            raise ApiError(
                ErrorCode.INVALID_REQUEST,
                "The acknowledgement batches are not in order.",
            )
        if len(types) not in (1, last - first + 1):
            raise ApiError(
                ErrorCode.INVALID_REQUEST,
                "The number of acknowledge types does not match that of the offsets.",
            )
        if not all(0 <= kind <= AcknowledgeType.RENEW for kind in types):
            raise ApiError(ErrorCode.INVALID_REQUEST, "An acknowledge type is unknown.")
        behind = last


def _runs(each: Acknowledgement) -> list[tuple[int, int, int]]:
    """Split an acknowledgement into runs of offsets with the same type.

    Returns:
        The first offset, the last offset and the type of each run.
    """
    first, last, types = each
    if len(types) == 1:
        return [(first, last, types[0])]
    runs: list[tuple[int, int, int]] = []
    for offset, kind in enumerate(types, first):
        if runs and runs[-1][2] == kind:
            runs[-1] = (runs[-1][0], offset, kind)
        else:
            runs.append((offset, offset, kind))
    return runs


def _end_of_batch(batches: Sequence[tuple[int, int]], offset: int) -> int:
    """Return the last offset of the record batch that contains an offset."""
    for _, last in batches:
        if offset <= last:
            return last
    return offset


def _joined(found: list[Acquired]) -> list[Acquired]:
    joined: list[Acquired] = []
    for each in found:
        if (
            joined
            and joined[-1].last + 1 == each.first
            and joined[-1].delivery_count == each.delivery_count
        ):
            joined[-1] = Acquired(joined[-1].first, each.last, each.delivery_count)
        else:
            joined.append(each)
    return joined
