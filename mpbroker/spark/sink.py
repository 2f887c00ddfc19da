"""Write rows to topics, from the columns that Spark's Kafka sink takes.

    value    STRING or BINARY, required
    key      STRING or BINARY
    topic    STRING, unless the option ``topic`` names one for all rows
    partition INT
    headers  ARRAY<STRUCT<key: STRING, value: BINARY>>

Other columns are ignored, as by Spark's sink, so rows that were read from a topic can
be written unchanged.

When a task ends, its records are on disk (acks=all, idempotent producer). If a task or
a batch is tried again, its rows are written again: at least once, as with Spark's own
sink. With the option ``exactlyOnce`` set to true, readers of committed records see each
batch once and as a whole (see `exactly_once`).

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
# Columns of the source that a record cannot take: ignored without a warning.
_ONLY_READ: Final = ("offset", "timestamp", "timestamptype")
# Producer settings unless the user gives others.
_DEFAULTS: Final[Mapping[str, str]] = {"linger.ms": "20", "batch.size": "262144"}
# Ten minutes: a task's transaction stays open until the slowest task of the batch ends.
_TRANSACTION_TIMEOUT: Final = {"transaction.timeout.ms": "600000"}


class SinkError(MpbrokerError):
    """Rows cannot become Kafka records; the message names the column at fault."""


@dataclass(frozen=True)
class SinkOptions:
    """The checked options of a write; Spark pickles them to its executors.

    Attributes:
        settings: the producer's settings, by Kafka's names.
        topic: the topic for all rows; None: each row has its own in a column.
        checkpoint: a stream's checkpoint directory, if the option is given.
    """

    settings: Mapping[str, str]
    topic: str | None
    client: ClientSettings
    exactly_once: bool = False
    checkpoint: str | None = None


@dataclass
class Written(WriterCommitMessage):
    """The result of a task that has written rows.

    Attributes:
        records: the number of records written.
        prepared: the open transaction that contains the records; None if there is
            nothing to commit.
    """

    records: int
    prepared: PreparedTransaction | None = None


def parse_sink_options(options: Mapping[str, str]) -> SinkOptions:
    """Parse and check the options of a write to a topic.

    Raises:
        OptionError: an option is missing or wrong.
    """
    given = {name.lower(): value for name, value in options.items()}
    refuse_reserved(given)
    parse_bootstrap(given)
    if "kafka.partitioner.class" in given:
        raise OptionError(
            "kafka.partitioner.class is not supported: no class of Java can choose"
            " partitions here; give the rows a column 'partition'"
        )
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
        # Refuse a wrong value here, before tasks start. No connection is made.
        ProducerSettings.parse(settings)
    except ConfigError as error:
        raise OptionError(f"kafka.{error}") from None
    if exactly_once and "transactional.id" in settings:
        raise OptionError(
            "kafka.transactional.id: exactlyOnce chooses one for each task; remove the"
            " option"
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
    """Check that a DataFrame's columns can become records: value, key, topic...

    Raises:
        SinkError: a column is missing or has another type.
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
                logger.warning("column %r is ignored: a record has no such field", name)
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
    """Writes the rows of a task; on the driver, commits or aborts all tasks' rows.

    Args:
        name: a batch write's unique name; None for a stream.
    """

    def __init__(self, options: SinkOptions, name: str | None = None) -> None:
        self._options = options
        self._coordinators = Coordinators(options.client)
        self._name = name
        # The count of abandoned writes when the batch was planned; None: not known.
        self._abandoned: Abandoned | None = None if name is None else Abandoned()

    def write_rows(self, batches: Iterator[pa.RecordBatch]) -> Written:
        """Send all rows of a task as records; wait until all are acknowledged.

        Raises:
            ProducerError: a record was refused or not delivered in time. The task
                fails, and Spark tries it again.
            SinkError: a row has no topic.
            CommitError: see `_prepare`.
        """
        options = self._options
        if options.exactly_once:
            return self._prepare(batches)
        with Producer(options.settings) as producer:
            count, _ = self._send(producer, batches)
        return Written(count)

    def _prepare(self, batches: Iterator[pa.RecordBatch]) -> Written:
        """Write the rows in a transaction and leave it open, unless they are committed.

        Raises:
            CommitError: the write was abandoned, or speculative execution is on.
        """
        task = this_task(self._name)
        settings = {**self._options.settings, "transactional.id": task.transactional_id}
        producer = Producer(settings)
        try:
            # First abort the transaction of an earlier try of this task. Otherwise that
            # transaction could be committed after this try has found no mark, and the
            # rows would be written twice.
            producer.init_transactions()
            if self._coordinators.has(task):
                for _ in batches:
                    pass  # Spark requires that the rows are consumed
                return Written(0)
            # Compare the counts only now that this producer owns the transactional id.
            # The driver first raises the count and then fences: either this task sees
            # the new count, or the fence ends its producer.
            if self._is_abandoned(task):
                raise CommitError(
                    "the write was abandoned before this task began, because another"
                    " task failed for good; that task's error says why"
                )
            producer.begin_transaction(to_prepare=True)
            count, topic = self._send(producer, batches)
            if topic is None:
                return Written(0)  # there were no rows: no transaction was opened
            producer.send_offsets_to_transaction(*mark(task, topic))
            return Written(count, producer.prepare_transaction())
        finally:
            # Aborts an open transaction that was not prepared: until it ends, readers
            # of committed records would wait.
            producer.close()

    def _is_abandoned(self, task: Task) -> bool:
        known = self._abandoned
        if known is None:
            return False
        return self._coordinators.times_abandoned(task.query) != known

    def _send(
        self, producer: Producer, batches: Iterator[pa.RecordBatch]
    ) -> tuple[int, str | None]:
        """Send all rows; return their number and the topic of the last one, if any."""
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
        """Commit the transactions that tasks have prepared.

        Raises:
            CommitError: some are not committed; Spark then calls `abandon_all`.
        """
        if self._options.exactly_once:
            self._coordinators.commit(_prepared(messages))

    def abandon_all(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Abort the transactions of all tasks; log those that cannot be aborted now.

        A task that has sent no message may have an open transaction, too: Spark can end
        its process at any moment.
        """
        if not self._options.exactly_once:
            return
        query = self._query()
        for each in _prepared(messages):
            query = query_of(each)
        if query is None:
            logger.warning(
                "transactions of this batch stay open, and readers of committed records"
                " wait, until the batch runs again or kafka.transaction.timeout.ms has"
                " passed. To abort them, the query's id in the checkpoint is needed:"
                " give this writer the checkpoint's path as the option"
                " checkpointLocation"
            )
            return
        try:
            self._coordinators.abandon(query)
            self._coordinators.fence(task_ids(query, len(messages)))
        except CommitError as error:
            # The broker aborts the rest after transaction.timeout.ms.
            logger.warning("%s", error)

    def _query(self) -> str | None:
        """Return the query id that the write's transactional ids contain.

        For a batch write it is the write's unique name, for a stream the id in the
        checkpoint; None if the checkpoint is not given or cannot be read.
        """
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

    # The option takes precedence over the column, as with Spark's sink.
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
    """Serves ``df.write.format("mpbroker")``.

    Each write has a unique name, also within a stream's foreachBatch. With exactlyOnce,
    the transactional ids contain it.
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
    """Serves ``df.writeStream.format("mpbroker")``.

    Spark makes several instances for each batch.
    """

    def __getstate__(self) -> dict[str, Any]:
        """Return the state that Spark sends to a batch's tasks.

        With exactly-once, ask the brokers first how often writes of this query were
        abandoned. A task that finds another count refuses to write.

        Raises:
            ApiError, BrokerUnavailableError: no answer within a minute.
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
