"""What the coordinator decides: records to be written, and answers to be given.

The state machines write here and do nothing else; the process around them appends
the records, and holds back an answer until the records it rests on are on disk.

A log is named by a number: a partition of __consumer_offsets by its own, a partition
of __transaction_state by ``transaction_log`` of it. What rests on a log waits for its
disk or, if that is said by ``appended_to`` its number, for the append alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.fields import Struct
from mpbroker.protocol.message import Message

if TYPE_CHECKING:
    from mpbroker.server.authorization.authorization import Access

NOW: Final = ()
_APPENDED: Final = 1 << 40  # far from any log's number

TopicPartition = tuple[str, int]
Marked = Callable[
    [Mapping[TopicPartition, ErrorCode], int, "Sequence[AppendedMarker]"], None
]


def transaction_log(partition: int) -> int:
    """The number that a partition of __transaction_state goes by; its own inverse."""
    return ~partition


def appended_to(log: int) -> int:
    """What something rests on if a log's records need not be on disk."""
    return log + _APPENDED


def rests_on(number: int) -> tuple[int, bool]:
    """Take such a number apart: the log, and whether its disk is waited for."""
    if number >= _APPENDED // 2:
        return number - _APPENDED, False
    return number, True


class Call:
    """One request as the coordinator sees it: who asks, and in which version."""

    __slots__ = (
        "_client_host",
        "access",
        "amend",
        "answered",
        "client_id",
        "request",
        "version",
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
        self.request = request  # the process's own; nobody here looks at it
        self.access = access  # what its sender may do; None: everything
        self.amend = amend  # puts what was refused into the answer
        self.answered = False

    @property
    def client_host(self) -> str:
        """Whose connection it is; found out only if somebody asks: few do."""
        host = self._client_host
        if not isinstance(host, str):
            host = self._client_host = host()
        return host


class Answer(NamedTuple):
    """A response, and what must be durable before it goes."""

    call: Call
    response: Message
    after: tuple[int, ...]  # logs, or appended_to them

    def refuse(self, error_code: ErrorCode) -> bool:
        """Put an error into all rows of the response that have none.

        Returns:
            Whether it is now said anywhere: not all responses have rows with errors.
        """
        return _refuse_rows(self.response, error_code)


class Step(NamedTuple):
    """What is to be done once something is durable; told whether it is."""

    run: Callable[[bool], None]
    after: tuple[int, ...]  # logs, or appended_to them


class TransactionalRecord(NamedTuple):
    """A record of __consumer_offsets that counts if a transaction commits."""

    producer_id: int
    producer_epoch: int
    key: bytes
    value: bytes


class AppendedMarker(NamedTuple):
    """A marker that is in its partition's log, and perhaps not on disk yet."""

    producer_id: int
    producer_epoch: int
    commit: bool
    topic: str
    topic_id: bytes
    partition: int
    offset: int


class Markers(NamedTuple):
    """The end of a transaction, to be appended to partitions.

    ``done`` is told how each went, the time, and where they are: once all that went
    well are durable or, where nobody ``waits``, appended.
    """

    producer_id: int
    producer_epoch: int
    commit: bool
    coordinator_epoch: int
    partitions: Sequence[TopicPartition]
    done: Marked
    waits: bool = True
    earlier: Sequence[AppendedMarker] = ()  # are waited for, too


class Outbox:
    """Records and answers since the last look."""

    def __init__(self) -> None:
        self.records: dict[int, list[tuple[bytes, bytes | None]]] = {}
        self.transactional: dict[int, list[TransactionalRecord]] = {}
        self.markers: list[Markers] = []
        self.answers: list[Answer] = []
        self.steps: list[Step] = []
        self.appended: list[tuple[int, Callable[[], object]]] = []

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
        """Append a record to a log; no value deletes what the key names."""
        records = self.records.get(partition)
        if records is None:
            records = self.records[partition] = []
        records.append((key, value))

    def write_transactional(self, partition: int, record: TransactionalRecord) -> None:
        """Append a record to a log as part of a producer's transaction."""
        self.transactional.setdefault(partition, []).append(record)

    def write_markers(self, markers: Markers) -> None:
        """End a transaction, behind all that is written so far."""
        self.markers.append(markers)

    def answer(
        self, call: Call, response: Message, after: tuple[int, ...] = NOW
    ) -> None:
        """Answer a call; once all that was written to these logs is on disk."""
        if call.answered:
            return  # it met a bug half-way, and was told so
        call.answered = True
        self.answers.append(Answer(call, response, after))

    def then(self, after: tuple[int, ...], run: Callable[[bool], None]) -> None:
        """Go on once all that was written to these logs is on disk, or cannot be."""
        self.steps.append(Step(run, after))

    def once_appended(self, log: int, run: Callable[[], object]) -> None:
        """Go on once all that was written to a log is in it, if not yet on disk.

        For what others act on: they would see it though we died before the append.
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
