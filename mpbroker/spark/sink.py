"""Rows into topics, with the columns that Spark's Kafka sink has.

    value    STRING or BINARY, required
    key      STRING or BINARY
    topic    STRING, unless the option ``topic`` names one for all
    partition INT
    headers  ARRAY<STRUCT<key: STRING, value: BINARY>>

Other columns are left out, as by Spark's sink: what is read of a topic can be written
as it is.

A task's records are on disk when it ends (acks=all, idempotent producer). A task that
is tried again, or a batch after a failure, writes its rows again: at least once, as
with Spark's own sink. With the option ``exactlyOnce`` set to true each batch is in the
topics once, and whole (see `exactly_once`), for those who read what is committed.

Source: Spark's "Structured Streaming + Kafka Integration Guide", "Writing Data".
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    StringType,
    StructType,
)

from mpbroker.base.config_def import ConfigError
from mpbroker.base.errors import MpbrokerError
from mpbroker.client.settings import ClientSettings
from mpbroker.producer import Producer
from mpbroker.producer.config import PRODUCER_CONFIG, ProducerSettings
from mpbroker.producer.transactions import PreparedTransaction
from mpbroker.spark.exactly_once import (
    Abandoned,
    CommitError,
    Coordinators,
    Task,
    checkpoint_query,
    mark,
    new_name,
    query_of,
    task_ids,
    this_task,
)
from mpbroker.spark.options import (
    OptionError,
    parse_boolean,
    parse_bootstrap,
    parse_client_settings,
    refuse_reserved,
)

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

_PREFIX: Final = "kafka."
_TEXT: Final = (StringType, BinaryType)
_ONLY_READ: Final = ("offset", "timestamp", "timestamptype")  # of our own rows
# What Spark's producers are set to; the user's own word wins.
_DEFAULTS: Final[Mapping[str, str]] = {"linger.ms": "20", "batch.size": "262144"}
# A task's transaction is open until the slowest task of its batch is done.
_TRANSACTION_TIMEOUT: Final = {"transaction.timeout.ms": "600000"}


class SinkError(MpbrokerError):
    """Rows that cannot become records; the text names the column and what is right."""


@dataclass(frozen=True)
class SinkOptions:
    """What a writer needs to know; plain values that travel to executors."""

    settings: Mapping[str, str]
    topic: str | None
    client: ClientSettings
    exactly_once: bool = False
    checkpoint: str | None = None  # a stream's


@dataclass
class Written(WriterCommitMessage):
    """How many records a task has written.

    Attributes:
        prepared: the transaction they are in, None if they are there already.
    """

    records: int
    prepared: PreparedTransaction | None = None


def parse_sink_options(options: Mapping[str, str]) -> SinkOptions:
    """Read and check the options of a write.

    Raises:
        OptionError: names the option, its value and what is expected.
    """
    given = {name.lower(): value for name, value in options.items()}
    refuse_reserved(given)
    parse_bootstrap(given)
    exactly_once = parse_boolean(given, "exactlyOnce", False)
    settings = dict(_DEFAULTS) | (_TRANSACTION_TIMEOUT if exactly_once else {})
    for name, value in given.items():
        if name.startswith(_PREFIX):
            key = name.removeprefix(_PREFIX)
            if key in PRODUCER_CONFIG:
                settings[key] = value
            else:
                logger.warning("option %s has no meaning here and is ignored", name)
    try:
        # Before any task is started, though nothing but the text is checked.
        ProducerSettings.parse(settings)
    except ConfigError as error:
        raise OptionError(f"kafka.{error}") from None
    if exactly_once and "transactional.id" in settings:
        raise OptionError(
            "kafka.transactional.id is chosen by exactlyOnce, one a task; remove it"
        )
    client = parse_client_settings(given)
    return SinkOptions(
        settings,
        given.get("topic"),
        client,
        exactly_once,
        given.get("checkpointlocation"),
    )


def check_schema(schema: StructType, options: SinkOptions) -> None:
    """Refuse columns that records cannot be made of.

    Raises:
        SinkError: names the column, its type and what it must be.
    """
    kinds: dict[str, tuple[type[DataType], ...]] = {
        "value": _TEXT,
        "key": _TEXT,
        "topic": (StringType,),
        "partition": (IntegerType,),
        "headers": (ArrayType,),
    }
    found = {field.name.lower(): field.dataType for field in schema.fields}
    if "value" not in found:
        raise SinkError("there is no column 'value'; it is required")
    if "topic" not in found and options.topic is None:
        raise SinkError(
            "no topic: give the option topic=NAME, or a column 'topic' of type STRING"
        )
    for name, kind in found.items():
        if name not in kinds:
            if name not in _ONLY_READ:
                logger.warning("column %r has no place in a record: left out", name)
            continue
        if not isinstance(kind, kinds[name]):
            wanted = " or ".join(each.typeName().upper() for each in kinds[name])
            raise SinkError(
                f"column {name!r} is {kind.simpleString()}; it must be {wanted}"
            )
    headers = found.get("headers")
    if isinstance(headers, ArrayType) and not _are_headers(headers):
        raise SinkError(
            f"column 'headers' is {headers.simpleString()}; it must be"
            " array<struct<key:string,value:binary>>"
        )


def _are_headers(kind: ArrayType) -> bool:
    element = kind.elementType
    return isinstance(element, StructType) and [
        (field.name, type(field.dataType)) for field in element.fields
    ] == [("key", StringType), ("value", BinaryType)]


class _Sink:
    """Writes one task's rows; on the driver, ends what tasks have prepared.

    Args:
        name: of a write that is no stream's.
    """

    def __init__(self, options: SinkOptions, name: str | None = None) -> None:
        self._options = options
        self._coordinators = Coordinators(options.client)
        self._name = name
        # Before there were tasks; None: whoever planned them could not say.
        self._abandoned: Abandoned | None = None if name is None else Abandoned()

    def write_rows(self, batches: Iterator[pa.RecordBatch]) -> Written:
        """Send all rows and wait until all are acknowledged.

        Raises:
            ProducerError: a record was refused or not delivered in time; its text says
                which and what to do. The task fails, and Spark tries it again.
            SinkError: a row without a topic.
        """
        options = self._options
        if options.exactly_once:
            return self._prepare(batches)
        with Producer(options.settings) as producer:
            count, _ = self._send(producer, batches)
        return Written(count)

    def _prepare(self, batches: Iterator[pa.RecordBatch]) -> Written:
        """Write the rows in a transaction that stays open, unless they are in."""
        task = this_task(self._name)
        settings = {**self._options.settings, "transactional.id": task.transactional_id}
        producer = Producer(settings)
        try:
            # First of all: what another try of this task has left open is aborted now,
            # so that its mark is not taken for ours, nor ours for its.
            producer.init_transactions()
            if self._coordinators.has(task):
                for _ in batches:
                    pass  # whoever makes them expects that they are taken
                return Written(0)
            # Asked after the ids are ours: who abandons says so before it fences them.
            if self._is_abandoned(task):
                raise CommitError(
                    "the write was abandoned before this task began, since another task"
                    " of it failed for good; that task's error says why"
                )
            producer.begin_transaction()
            count, topic = self._send(producer, batches)
            if topic is None:
                return Written(0)  # the broker knows of no transaction
            producer.send_offsets_to_transaction(*mark(task, topic))
            return Written(count, producer.prepare_transaction())
        finally:
            # Aborts what is open and was not prepared: it would be in readers' way.
            producer.close()

    def _is_abandoned(self, task: Task) -> bool:
        known = self._abandoned
        if known is None:
            return False
        return self._coordinators.times_abandoned(task.query) != known

    def _send(
        self, producer: Producer, batches: Iterator[pa.RecordBatch]
    ) -> tuple[int, str | None]:
        """Send all rows; return how many there were, and a topic of theirs."""
        failures: list[Exception] = []

        def done(_: object, error: Exception | None) -> None:
            if error is not None and not failures:
                failures.append(error)

        count, topic = 0, None
        for batch in batches:
            for topic, key, value, headers, partition in _rows(
                batch, self._options.topic
            ):
                producer.send(
                    topic,
                    value,
                    key,
                    headers=headers,
                    partition=partition,
                    callback=done,
                )
                count += 1
            if failures:
                break
        producer.flush()
        if failures:
            raise failures[0]
        return count, topic

    def commit_all(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Commit what tasks have prepared.

        Raises:
            CommitError: not all is committed; Spark calls `abandon_all` then.
        """
        if self._options.exactly_once:
            self._coordinators.commit(_prepared(messages))

    def abandon_all(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Abort what tasks have open, as far as that can be done now.

        Tasks without a message too: Spark ends their process wherever it is.
        """
        if not self._options.exactly_once:
            return
        query = self._query()
        for each in _prepared(messages):
            query = query_of(each)
        if query is None:
            logger.warning(
                "transactions of this batch are in the way of readers until it comes"
                " again, or until kafka.transaction.timeout.ms: they are named by the"
                " query's id, which only the checkpoint says; give its path as the"
                " option checkpointLocation of this writer"
            )
            return
        try:
            self._coordinators.abandon(query)
            self._coordinators.fence(task_ids(query, len(messages)))
        except CommitError as error:
            # The broker does it after transaction.timeout.ms, or has done so.
            logger.warning("%s", error)

    def _query(self) -> str | None:
        """Return what names the write's transactions, None if it cannot be known."""
        if self._name is not None or self._options.checkpoint is None:
            return self._name
        return checkpoint_query(self._options.checkpoint)


def _prepared(
    messages: Sequence[WriterCommitMessage | None],
) -> list[PreparedTransaction]:
    return [
        each.prepared
        for each in messages
        if isinstance(each, Written) and each.prepared is not None
    ]


def _rows(
    batch: pa.RecordBatch, topic: str | None
) -> Iterator[tuple[str, bytes | None, bytes | None, Any, int | None]]:
    names = [name.lower() for name in batch.schema.names]
    rows = batch.num_rows
    nothing = [None] * rows

    def column(name: str) -> list[Any]:
        if name not in names:
            return nothing
        found = batch.column(names.index(name))
        if name in ("key", "value"):
            found = found.cast("binary")
        values: list[Any] = found.to_pylist()
        return values

    # The option is for all rows, whatever the column says, as with Spark's sink.
    topics = column("topic") if topic is None else [topic] * rows
    for name, key, value, headers, partition in zip(
        topics,
        column("key"),
        column("value"),
        column("headers"),
        column("partition"),
        strict=True,
    ):
        if name is None:
            raise SinkError("a row's topic is null, and the option topic is not set")
        pairs = [(each["key"], each["value"]) for each in headers or ()]
        yield name, key, value, pairs, partition


class BatchWriter(_Sink, DataSourceArrowWriter):
    """``df.write.format("mpbroker")``.

    A stream's foreachBatch may write several frames so: each is a write of its own.
    """

    def __init__(self, options: SinkOptions) -> None:
        super().__init__(options, new_name())

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        return self.write_rows(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self.commit_all(messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self.abandon_all(messages)


class StreamWriter(_Sink, DataSourceStreamArrowWriter):
    """``df.writeStream.format("mpbroker")``; Spark makes several for each batch."""

    def __getstate__(self) -> dict[str, Any]:
        """Set off to the tasks of a batch, knowing what was abandoned before them.

        Raises:
            ApiError, BrokerUnavailableError: the coordinator does not say, in a minute.
        """
        if self._options.exactly_once and self._abandoned is None:
            query = self._query()
            if query is not None:
                self._abandoned = self._coordinators.times_abandoned(query)
        return self.__dict__

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        return self.write_rows(iterator)

    def commit(
        self,
        messages: list[WriterCommitMessage | None],
        batchId: int,  # noqa: N803
    ) -> None:
        self.commit_all(messages)

    def abort(
        self,
        messages: list[WriterCommitMessage | None],
        batchId: int,  # noqa: N803
    ) -> None:
        self.abandon_all(messages)
