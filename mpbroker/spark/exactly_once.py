"""Write each batch once: tasks prepare transactions, the driver commits them.

    task      takes its transactional id (InitProducerId), which aborts the transaction
              that an earlier try left open, and fences that try. If the mark (see
              below) says that the batch is committed, the task writes nothing.
              Otherwise it writes all its rows and the mark in one transaction, and
              leaves the transaction open.
    driver    If all tasks have ended, it commits their transactions. If a task has
              failed for good, it first records that the write is abandoned and then
              aborts the transactions: a task that starts too late to be aborted reads
              the record and opens no transaction. The broker aborts a killed driver's
              transactions after transaction.timeout.ms.

A transactional id consists of the query's id and the task's number. Spark gives the
query's id to tasks only. A stream's batch is committed or aborted in another process,
which has the sink's options and nothing else: it reads the id from the checkpoint.

The record of abandoned writes is a counter (`Coordinators.times_abandoned`). A task
compares it with the value at the time when the batch was planned; a batch that is tried
again is planned again, with the new value.

The mark is an offset of a consumer group, committed in the same transaction: it says
that all batches below that number of this query and task are written. If a driver dies
between two commits, the batch comes again with the same rows for the same tasks, and
the tasks whose mark is there write nothing. This needs three things:

- Spark plans the same tasks for a batch that comes again. It does so from the
  checkpoint unless minPartitions or the number of shuffle partitions changes between
  the kill and the restart.
- The mark still exists. Brokers keep it for offsets.retention.minutes (a week).
- Speculative execution is off: two tries of a task at the same time fence each other.

Read the topic with read_committed: other readers see the records of open and aborted
transactions.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple, TypeVar

from mpbroker.base.errors import MpbrokerError
from mpbroker.client.admin.group_admin import committed_offsets
from mpbroker.client.cluster import Broker, Cluster, TopicPartition
from mpbroker.client.errors import (
    BrokerUnavailableError,
    UnsupportedVersionError,
    check_error,
)
from mpbroker.client.group_metadata import GroupMetadata
from mpbroker.client.settings import ClientSettings
from mpbroker.producer.transactions import PreparedTransaction
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.describe_transactions import (
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
)
from mpbroker.protocol.messages.end_txn import EndTxnRequest, EndTxnResponse
from mpbroker.protocol.messages.find_coordinator import (
    FindCoordinatorRequest,
    FindCoordinatorResponse,
)
from mpbroker.protocol.messages.init_producer_id import (
    InitProducerIdRequest,
    InitProducerIdResponse,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Local properties that Spark sets for each task of a micro-batch.
_QUERY_PROPERTY: Final = "sql.streaming.queryId"
_BATCH_PROPERTY: Final = "streaming.sql.batchId"
# A setting of the session, which Spark copies to the properties of each task.
_SPECULATION: Final = "spark.speculation"
_PREFIX: Final = "mpbroker-spark-"
_TRANSACTION: Final = 1  # FindCoordinator's key type for transactional ids
_ONE_COORDINATOR_MAX_VERSION: Final = 3
# The last versions before KIP-890's second transaction version, with which the end of a
# transaction raises the producer's epoch.
_END_MAX_VERSION: Final = 4
_INIT_MAX_VERSION: Final = 5
# The timeout of a transaction that is never begun: no broker's maximum is lower.
_FENCE_TIMEOUT_MS: Final = 1
_REQUEST_TIMEOUT_S: Final = 30.0
_PATIENCE_S: Final = 60.0  # long enough for a broker to restart
_RETRY_S: Final = 0.1


class CommitError(MpbrokerError):
    """A batch's transactions cannot be committed; Spark has to run the batch again."""


class Task(NamedTuple):
    """The part of a batch that one task writes: query id, batch id, task number."""

    query: str
    batch: int
    number: int

    @property
    def transactional_id(self) -> str:
        return f"{_PREFIX}{self.query}-{self.number}"


class Abandoned(NamedTuple):
    """A producer id and epoch that change each time a query's write is given up.

    They are the counter of abandoned writes (`Coordinators.times_abandoned`). Both are
    -1 as long as no write was abandoned.
    """

    producer_id: int = -1
    producer_epoch: int = -1


@dataclass(frozen=True)
class Coordinators:
    """Commits, aborts and looks up transactions and marks in a cluster; can be pickled.

    A mark is a committed offset that says which batches a task has written.

    It sends requests to the transaction coordinator and to the group coordinator.

    Attributes:
        client: the cluster's addresses and the security of connections.
    """

    client: ClientSettings

    def has(self, task: Task) -> bool:
        """Return whether a task's part of a batch is committed already.

        The mark says so: an offset that the task's transaction has committed (`mark`).

        Raises:
            ApiError, BrokerUnavailableError: no answer within a minute.
        """
        with _Talk(self.client) as talk:
            marks = talk.ask(lambda it: committed_offsets(it, task.transactional_id))
        return max(marks.values(), default=0) > task.batch

    def commit(self, transactions: Iterable[PreparedTransaction]) -> None:
        """Commit prepared transactions, one after the other.

        Raises:
            CommitError: a transaction was aborted, or cannot be committed within a
                minute. Those before it are committed.
        """
        with _Talk(self.client) as talk:
            for transaction in transactions:
                try:
                    talk.ask(partial(_commit, transaction))
                except (ApiError, BrokerUnavailableError) as error:
                    raise CommitError(
                        f"transaction {transaction.transactional_id} cannot be"
                        f" committed: {error}. If the batch took longer than"
                        " kafka.transaction.timeout.ms, raise it. Spark runs the"
                        " batch again, and skips the parts that are committed"
                    ) from error

    def fence(self, transactional_ids: Iterable[str]) -> None:
        """Abort the open transactions of these ids, and fence their producers.

        Raises:
            CommitError: an id cannot be fenced within a minute.
        """
        with _Talk(self.client) as talk:
            for name in transactional_ids:
                try:
                    talk.ask(partial(_fence, name))
                except (ApiError, BrokerUnavailableError) as error:
                    raise CommitError(
                        f"transaction {name} cannot be aborted: {error}"
                    ) from error

    def abandon(self, query: str) -> None:
        """Record that no further task of a query's current write may begin.

        The record is the epoch of a separate transactional id; each call raises it. It
        needs no topic, and no rights beyond those of the tasks.

        Raises:
            CommitError: the record cannot be written within a minute.
        """
        self.fence([_abandoned(query)])

    def times_abandoned(self, query: str) -> Abandoned:
        """Return a value that changes whenever `abandon` is called for the query.

        Brokers older than Kafka 3.0 do not tell it: with them it never changes.

        Raises:
            ApiError, BrokerUnavailableError: no answer within a minute.
        """
        with _Talk(self.client) as talk:
            return talk.ask(partial(_epoch, _abandoned(query)))


class _Talk:
    """Sends requests to a cluster, and connects again after an error."""

    def __init__(self, client: ClientSettings) -> None:
        self._client = client
        self._cluster: Cluster | None = None

    def __enter__(self) -> _Talk:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def ask(self, question: Callable[[Cluster], T]) -> T:
        """Repeat a request for up to a minute, until it succeeds or is refused.

        Raises:
            ApiError: the refusal is final, or a minute is over.
            BrokerUnavailableError: no broker has answered for a minute.
        """
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                if self._cluster is None:
                    self._cluster = Cluster(
                        self._client.bootstrap, _REQUEST_TIMEOUT_S, self._client
                    )
                return question(self._cluster)
            except (ApiError, BrokerUnavailableError) as error:
                self._close()
                final = isinstance(error, ApiError) and not error.error_code.retriable
                if final or time.monotonic() > deadline:
                    raise
            time.sleep(_RETRY_S)

    def _close(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None


def _commit(transaction: PreparedTransaction, cluster: Cluster) -> None:
    request = EndTxnRequest(
        transactional_id=transaction.transactional_id,
        producer_id=transaction.producer_id,
        producer_epoch=transaction.producer_epoch,
        committed=True,
    )
    answer = _coordinator(cluster, transaction.transactional_id).request(
        request, EndTxnResponse, max_version=_END_MAX_VERSION
    )
    check_error(answer.error_code, "its end")


def _fence(name: str, cluster: Cluster) -> None:
    request = InitProducerIdRequest(
        transactional_id=name, transaction_timeout_ms=_FENCE_TIMEOUT_MS
    )
    answer = _coordinator(cluster, name).request(
        request, InitProducerIdResponse, max_version=_INIT_MAX_VERSION
    )
    check_error(answer.error_code, "its end")


def _epoch(name: str, cluster: Cluster) -> Abandoned:
    try:
        answer = _coordinator(cluster, name).request(
            DescribeTransactionsRequest(transactional_ids=[name]),
            DescribeTransactionsResponse,
        )
    except UnsupportedVersionError:
        return Abandoned()
    (state,) = answer.transaction_states
    if state.error_code == ErrorCode.TRANSACTIONAL_ID_NOT_FOUND:
        return Abandoned()
    check_error(state.error_code, name)
    return Abandoned(state.producer_id, state.producer_epoch)


def _abandoned(query: str) -> str:
    return f"{_PREFIX}{query}-abandoned"


def _coordinator(cluster: Cluster, transactional_id: str) -> Broker:
    found = cluster.request(
        FindCoordinatorRequest(key=transactional_id, key_type=_TRANSACTION),
        FindCoordinatorResponse,
        max_version=_ONE_COORDINATOR_MAX_VERSION,
    )
    check_error(found.error_code, "its coordinator", found.error_message)
    cluster.metadata([])
    return cluster.broker(found.node_id)


def mark(task: Task, topic: str) -> tuple[dict[TopicPartition, int], GroupMetadata]:
    """Return the offset and the group with which a task marks its batch as written.

    The consumer group is named like the task's transactional id. The offset is the
    batch id plus one: it says that the task's part of this batch and of all earlier
    ones is written.

    Args:
        task: the task.
        topic: any topic that exists: a committed offset belongs to a topic.
    """
    group = GroupMetadata(task.transactional_id)
    return {TopicPartition(topic, 0): task.batch + 1}, group


def this_task(write: str | None) -> Task:
    """Return the query id, batch id and number of the Spark task that is running.

    Args:
        write: the name of a batch write; None in a stream, where Spark gives the query
            and the batch.

    Raises:
        CommitError: speculative execution is on, or Spark gives no query and batch.
    """
    from pyspark import TaskContext

    context = TaskContext.get()
    number = 0 if context is None else context.partitionId()
    if context is not None and context.getLocalProperty(_SPECULATION) == "true":
        raise CommitError(
            f"{_SPECULATION}=true and exactlyOnce=true exclude each other: two tries of"
            f" a task at once fence each other; set {_SPECULATION}=false"
        )
    if write is not None:
        return Task(write, 0, number)
    query = batch = None
    if context is not None:
        query = context.getLocalProperty(_QUERY_PROPERTY)
        batch = context.getLocalProperty(_BATCH_PROPERTY)
    if query is None or batch is None:
        raise CommitError(
            "Spark gives this task no query id and batch id; exactlyOnce needs them"
        )
    return Task(query, int(batch), number)


def checkpoint_query(checkpoint: str) -> str | None:
    """Return the query id in a checkpoint; None if this machine cannot read it."""
    from mpbroker.spark.checkpoint import query_id
    from mpbroker.spark.file_systems import find

    try:
        return query_id(*find(checkpoint))
    except (OSError, NotImplementedError, ValueError) as error:
        logger.warning("checkpoint %s cannot be read: %s", checkpoint, error)
        return None


def task_ids(query: str, count: int) -> list[str]:
    """Return the transactional ids of all tasks of a batch."""
    return [Task(query, 0, number).transactional_id for number in range(count)]


def query_of(transaction: PreparedTransaction) -> str:
    """Return the query id in a prepared transaction's transactional id."""
    name = transaction.transactional_id.rpartition("-")[0]
    return name.removeprefix(_PREFIX)


def new_name() -> str:
    """Return a unique name for a batch write, used where a stream has its query id."""
    return uuid.uuid4().hex
