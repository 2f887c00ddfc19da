"""Collect the records and answers of the state machines: the outbox.

The state machines write here and have no other effect. `record_writer` appends the
records, and sends each answer once the records that it rests on are on disk.

Each log has a number. A partition of __consumer_offsets keeps its own number; a
partition of __transaction_state has a negative one, from ``transaction_log``. An answer
or a step rests on such numbers: a plain number means that the log must be on disk, a
number from ``appended_to`` means that the append is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mpbroker.metadata.topic_names import TopicPartition
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.fields import Struct
from mpbroker.protocol.message import Message

if TYPE_CHECKING:
    from mpbroker.server.authorization.authorization import Access

NOW: Final = ()
_APPENDED: Final = 1 << 40  # far from any log's number

Marked = Callable[
    [Mapping[TopicPartition, ErrorCode], int, "Sequence[AppendedMarker]"], None
]


def transaction_log(partition: int) -> int:
    """Convert a partition of __transaction_state to its log's number, or back."""
    return ~partition


def appended_to(log: int) -> int:
    """Return what an answer rests on if the log need not be on disk."""
    return log + _APPENDED


def rests_on(number: int) -> tuple[int, bool]:
    """Return the log of such a number, and whether the log must be on disk."""
    if number >= _APPENDED // 2:
        return number - _APPENDED, False
    return number, True


class Call:
    """One request as the state machines see it: its version and its client.

    Attributes:
        waited_ms: how long ago the processor received it. A request that is parked when
            the coordinator is killed goes on waiting for its successor.
        is_older: whether it was received before this coordinator began. Its answer may
            rest on what only the predecessor knew.
    """

    __slots__ = (
        "_client_host",
        "access",
        "amend",
        "answered",
        "client_id",
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
        self.amend = amend  # adds what the authorizer has refused to the answer
        self.answered = False

    @property
    def client_host(self) -> str:
        """The client's address as Kafka shows it: "/127.0.0.1"."""
        host = self._client_host  # a function until the first request that needs it
        if not isinstance(host, str):
            host = self._client_host = host()
        return host


class Answer(NamedTuple):
    """A response, and the logs that it rests on."""

    call: Call
    response: Message
    after: tuple[int, ...]  # logs, or appended_to them

    def refuse(self, error_code: ErrorCode) -> bool:
        """Put an error code into each row of the response that has none.

        Returns:
            False if there is no such row: this response cannot tell the error.
        """
        return _refuse_rows(self.response, error_code)


class Step(NamedTuple):
    """A function to call with True when logs are on disk, with False if they fail."""

    run: Callable[[bool], None]
    after: tuple[int, ...]  # logs, or appended_to them


class TransactionalRecord(NamedTuple):
    """A record of __consumer_offsets that takes effect if its transaction commits."""

    producer_id: int
    producer_epoch: int
    key: bytes
    value: bytes


class AppendedMarker(NamedTuple):
    """A marker in its partition's log, which need not be on disk yet."""

    producer_id: int
    producer_epoch: int
    commit: bool
    topic: str
    topic_id: bytes
    partition: int
    offset: int


class Markers(NamedTuple):
    """The end of a transaction: one marker for each of its partitions.

    ``done`` is called with the partitions' error codes, the time, and the markers that
    were appended: when these are on disk if ``waits`` is true, else after the append.
    """

    producer_id: int
    producer_epoch: int
    commit: bool
    coordinator_epoch: int
    partitions: Sequence[TopicPartition]
    done: Marked
    waits: bool = True
    earlier: Sequence[AppendedMarker] = ()  # ``done`` waits for their disk, too


class Outbox:
    """The decisions since the process last emptied it."""

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
        """Append a record to a log; None as value deletes the key."""
        records = self.records.get(partition)
        if records is None:
            records = self.records[partition] = []
        records.append((key, value))

    def write_transactional(self, partition: int, record: TransactionalRecord) -> None:
        """Append a record to a log as part of a producer's transaction."""
        self.transactional.setdefault(partition, []).append(record)

    def write_markers(self, markers: Markers) -> None:
        """Append markers, after all records that are in the outbox now."""
        self.markers.append(markers)

    def answer(
        self, call: Call, response: Message, after: tuple[int, ...] = NOW
    ) -> None:
        """Answer a call when all that was written to these logs is on disk."""
        if call.answered:
            return  # the request met a bug and was answered with an error
        call.answered = True
        self.answers.append(Answer(call, response, after))

    def then(self, after: tuple[int, ...], run: Callable[[bool], None]) -> None:
        """Call a function when all written to these logs is on disk, or has failed."""
        self.steps.append(Step(run, after))

    def once_appended(self, log: int, run: Callable[[], object]) -> None:
        """Call a function when all that was written to a log is appended to it.

        This is for changes that other processes act on at once. If we made such a
        change first and were killed before the append, they would act on something
        that no log tells a successor.
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
