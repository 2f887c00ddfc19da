"""Collect the records and answers of the state machines, in the outbox.

The state machines write to the outbox and have no other effect. `record_writer` appends
the records, and sends each answer once the records that it rests on are on disk.

Each log has a number. A partition of __consumer_offsets keeps its own number; a
partition of __transaction_state has a negative one, from ``transaction_log``, and one
of __share_group_state a large one, from ``share_log``. An answer or a step rests on
such numbers: a plain number means that the log must be on disk, a number from
``appended_to`` means that the append is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.metadata.topic_names import TopicPartition
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.fields import Struct
from mpbroker.protocol.message import Message

if TYPE_CHECKING:
    from mpbroker.server.authorization.authorization import Access

# Executes a request at a time in ms, except for its answer. False: the request is to be
# executed as any other, because its answer may be another one by now.
Again = Callable[[int], bool]

NOW: Final = ()
_APPENDED: Final = 1 << 40  # far from any log's number
_SHARE_LOGS: Final = 1 << 32

Marked = Callable[
    [Mapping[TopicPartition, ErrorCode], int, "Sequence[AppendedMarker]"], None
]


def transaction_log(partition: int) -> int:
    """Convert a partition number of __transaction_state to its log number, or back."""
    return ~partition


def share_log(partition: int) -> int:
    """Return the log number (see the module) of a partition of __share_group_state."""
    return _SHARE_LOGS + partition


def share_partition(log: int) -> int | None:
    """Convert a log number back to a partition number of __share_group_state.

    Return None if the number is that of a log of another topic.
    """
    return log - _SHARE_LOGS if log >= _SHARE_LOGS else None


def appended_to(log: int) -> int:
    """Return a number to give in place of a log's, to wait for the append only.

    With the log's own number an answer would also wait until the log is on disk.
    """
    return log + _APPENDED


def rests_on(number: int) -> tuple[int, bool]:
    """Decode one of the numbers with which an answer names the logs that it waits for.

    Returns:
        The log number, and whether to wait until the log is on disk (True), or only
        for the append (False: the number is from `appended_to`).
    """
    if number >= _APPENDED // 2:
        return number - _APPENDED, False
    return number, True


class Call:
    """One request as the state machines see it: its version and its client.

    Attributes:
        waited_ms: how long ago it was received by the processor, the process that reads
            the socket. A request that is parked when the coordinator is killed goes on
            waiting for its successor.
        is_older: whether it was received before this coordinator process began. It may
            refer to state that only the predecessor had.
    """

    __slots__ = (
        "_client_host",
        "access",
        "again",
        "amend",
        "answered",
        "client_id",
        "end_wait",
        "is_older",
        "request",
        "version",
        "waited_ms",
    )

    def __init__(
        self,
        version: int,
        client_id: str,
        client_host: str | Callable[[], str],
        request: Any = None,
        amend: Callable[[Message], None] | None = None,
        access: Access | None = None,
    ) -> None:
        self.version = version
        self.client_id = client_id
        self._client_host = client_host
        self.request = request  # only the process around the state machines reads it
        self.access = access  # what the client may do; None: everything
        self.waited_ms = 0
        self.is_older = False
        # Adds the parts of the request that the authorizer has refused to the answer.
        self.amend = amend
        self.answered = False
        # Executes an equal request to which the same answer is given: repeated_calls.py
        self.again: Again | None = None
        # Answers the call with the present results, if it must not wait any longer.
        self.end_wait: Callable[[], None] | None = None

    @property
    def client_host(self) -> str:
        """The client's address as Kafka shows it: "/127.0.0.1"."""
        host = self._client_host  # a function until the first request that needs it
        if not isinstance(host, str):
            host = self._client_host = host()
        return host


class Answer(NamedTuple):
    """Holds a response, and the logs that must be on disk before it is sent."""

    call: Call
    response: Message
    after: tuple[int, ...]  # logs, or appended_to them

    def refuse(self, error_code: ErrorCode) -> bool:
        """Replace the error code NONE wherever the response has it, so that it fails.

        Returns:
            False if it has none to replace: the client cannot learn of the error from
            this response.
        """
        return _refuse_rows(self.response, error_code)


class Step(NamedTuple):
    """A function to call once logs are on disk (True), or one has failed (False)."""

    run: Callable[[bool], None]
    after: tuple[int, ...]  # logs, or appended_to them


class TransactionalRecord(NamedTuple):
    """A record of __consumer_offsets that takes effect if its transaction commits."""

    producer_id: int
    producer_epoch: int
    key: bytes
    value: bytes


class AppendedMarker(NamedTuple):
    """A transaction's end marker, appended to a log; it may not be on disk yet."""

    producer_id: int
    producer_epoch: int
    commit: bool
    topic: str
    topic_id: bytes
    partition: int
    offset: int


class Markers(NamedTuple):
    """A request to append a transaction's markers, one to each of its partitions.

    ``done`` is called with the partitions' error codes, the time in ms, and the
    appended markers. It is called when the markers are on disk if ``waits`` is true,
    else right after the append.
    """

    producer_id: int
    producer_epoch: int
    commit: bool
    coordinator_epoch: int
    partitions: Sequence[TopicPartition]
    done: Marked
    waits: bool = True
    earlier: Sequence[AppendedMarker] = ()  # ``done`` waits for their syncs, too
    is_by_hand: bool = False  # an administrator's, of WriteTxnMarkers


class Outbox:
    """Collects what is to be written to logs, and answers that wait for it.

    `record_writer` takes them out.

    Attributes:
        is_volatile: whether appended records do not outlive this process before they
            are on disk, as in a cluster.
    """

    def __init__(self) -> None:
        self.records: dict[int, list[tuple[bytes, bytes | None]]] = {}
        self.transactional: dict[int, list[TransactionalRecord]] = {}
        self.markers: list[Markers] = []
        self.answers: list[Answer] = []
        self.steps: list[Step] = []
        self.appended: list[tuple[int, Callable[[], object]]] = []
        self.is_volatile = False

    def __bool__(self) -> bool:
        return bool(
            self.records
            or self.answers
            or self.steps
            or self.markers
            or self.transactional
            or self.appended
        )

    def write(self, partition: int, key: bytes, value: bytes | None) -> None:
        """Note a record to append to a log; None as value deletes the key.

        Args:
            partition: the log's number.
        """
        records = self.records.get(partition)
        if records is None:
            records = self.records[partition] = []
        records.append((key, value))

    def written(self, log: int) -> tuple[int, ...]:
        """Return the logs that must be on disk before an answer about a group is sent.

        This is the group's log if a record for it waits here, else what `told` returns.
        """
        return (log,) if log in self.records else self.told(log)

    def logged(self, log: int) -> tuple[int, ...]:
        """Return the logs that must have what was written before an answer is sent.

        The append is enough: after a power cut the answer means nothing any more.
        """
        if log in self.records and not self.is_volatile:
            return (appended_to(log),)
        return self.told(log)

    def told(self, log: int) -> tuple[int, ...]:
        """Return the logs on which an answer rests that writes nothing by itself.

        It tells of what was appended before, which a successor of this process finds in
        the log. So this is NOW (none), unless appended records are volatile.
        """
        return (log,) if self.is_volatile else NOW

    def write_transactional(self, partition: int, record: TransactionalRecord) -> None:
        """Note a record to append to a log as a part of a producer's transaction.

        Args:
            partition: the number of the log to which it is appended.
        """
        self.transactional.setdefault(partition, []).append(record)

    def write_markers(self, markers: Markers) -> None:
        """Have a transaction's markers appended, after all records noted until now."""
        self.markers.append(markers)

    def answer(
        self, call: Call, response: Message, after: tuple[int, ...] = NOW
    ) -> None:
        """Answer a request once all records written to these logs are on disk."""
        if call.answered:
            return  # the request met a bug and was answered with an error
        call.answered = True
        self.answers.append(Answer(call, response, after))

    def then(self, after: tuple[int, ...], run: Callable[[bool], None]) -> None:
        """Call ``run`` with True once these logs are on disk, False if one fails."""
        self.steps.append(Step(run, after))

    def once_appended(self, log: int, run: Callable[[], object]) -> None:
        """Call a function once the records for a log are appended, before any sync.

        This is for changes of shared memory on which other processes act at once. If
        the coordinator made such a change before the append and were killed in
        between, no log would tell its successor of the change.
        """
        self.appended.append((log, run))

    def take_appended(self) -> list[tuple[int, Callable[[], object]]]:
        appended, self.appended = self.appended, []
        return appended

    def take_records(self) -> dict[int, list[tuple[bytes, bytes | None]]]:
        records, self.records = self.records, {}
        return records

    def take_transactional(self) -> dict[int, list[TransactionalRecord]]:
        records, self.transactional = self.transactional, {}
        return records

    def take_markers(self) -> list[Markers]:
        markers, self.markers = self.markers, []
        return markers

    def take_answers(self) -> list[Answer]:
        answers, self.answers = self.answers, []
        return answers

    def take_steps(self) -> list[Step]:
        steps, self.steps = self.steps, []
        return steps


def _refuse_rows(response: Struct, error_code: ErrorCode) -> bool:
    said = False
    for field in response.__fields__:
        rows = getattr(response, field.name)
        for row in rows if isinstance(rows, list) else ():
            if not isinstance(row, Struct):
                continue
            if getattr(row, "error_code", None) == ErrorCode.NONE:
                row.error_code = error_code  # type: ignore[attr-defined]
                said = True
            said |= _refuse_rows(row, error_code)
    return said
