"""Each batch once in a topic: tasks prepare transactions, the driver commits them.

    task      init (aborts what its predecessor left open, and fences it); if the batch
              is marked as committed: nothing. Else all rows, and the mark, in one
              transaction that is left open.
    driver    all tasks done: commits their transactions. A task failed for good: says
              that the write is abandoned, and then aborts them: a task that begins too
              late to be aborted reads that it is, and opens nothing. What neither hears
              of (a killed driver's) the broker aborts after transaction.timeout.ms.

A transactional id is named by the query's id and the task's number. Spark tells the id
to tasks, and not to whoever commits or aborts a stream's batch, in a process of its own
that has the sink's options alone: that one reads it from the checkpoint.

Abandoned is a write whose count of that (`Coordinators.times_abandoned`) is not what it
was when the batch's tasks were planned: the batch that comes again is another write.

The mark is a consumer group's offset, committed in the same transaction: "of this query
and task, all batches below are in". So a driver that dies between two commits leaves no
doubt: the batch comes again with the same rows for the same tasks, and those that are
marked are left out. That rests on Spark making the same tasks of a batch again, which
it does from the checkpoint, as long as neither minPartitions nor the number of shuffle
partitions is changed between a kill and the restart, and on the marks, which brokers
keep for offsets.retention.minutes (a week). Speculative execution must be off: two
tries of a task at once fence each other.

Read the topic with read_committed: others see open and aborted transactions' records.
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

# Set by Spark for each task of a micro-batch.
_QUERY_PROPERTY: Final = "sql.streaming.queryId"
_BATCH_PROPERTY: Final = "streaming.sql.batchId"
# A session's settings are of each of its tasks.
_SPECULATION: Final = "spark.speculation"
_PREFIX: Final = "mpbroker-spark-"
_TRANSACTION: Final = 1  # of FindCoordinator's kinds of keys
_ONE_COORDINATOR_MAX_VERSION: Final = 3
# Of clients of the first transaction version: the epoch stays what it is.
_END_MAX_VERSION: Final = 4
_INIT_MAX_VERSION: Final = 5
_FENCE_TIMEOUT_MS: Final = 1  # no broker's limit is lower; nothing is written with it
_REQUEST_TIMEOUT_S: Final = 30.0
_PATIENCE_S: Final = 60.0  # a broker that is being restarted
_RETRY_S: Final = 0.1


class CommitError(MpbrokerError):
    """A batch's transactions cannot be committed: the batch has to come again."""


class Task(NamedTuple):
    """Which part of which batch a task writes."""

    query: str
    batch: int
    number: int

    @property
    def transactional_id(self) -> str:
        return f"{_PREFIX}{self.query}-{self.number}"


class Abandoned(NamedTuple):
    """How often a query's writes were abandoned; another value each time."""

    producer_id: int = -1
    producer_epoch: int = -1


@dataclass(frozen=True)
class Coordinators:
    """Whoever knows of transactions and marks; plain values that travel.

    Attributes:
        client: where they are, and how connections are secured.
    """

    client: ClientSettings

    def has(self, task: Task) -> bool:
        """Return whether a task's batch is committed, as its mark says."""
        with _Talk(self.client) as talk:
            marks = talk.ask(lambda it: committed_offsets(it, task.transactional_id))
        return max(marks.values(), default=0) > task.batch

    def commit(self, transactions: Iterable[PreparedTransaction]) -> None:
        """Commit prepared transactions, one after the other.

        Raises:
            CommitError: one is gone already, or cannot be committed in a minute.
        """
        with _Talk(self.client) as talk:
            for transaction in transactions:
                try:
                    talk.ask(partial(_commit, transaction))
                except (ApiError, BrokerUnavailableError) as error:
                    raise CommitError(
                        f"transaction {transaction.transactional_id} cannot be"
                        f" committed: {error}. If the batch took longer than"
                        " kafka.transaction.timeout.ms, raise it; Spark brings the"
                        " batch again, and what is committed is left out"
                    ) from error

    def fence(self, transactional_ids: Iterable[str]) -> None:
        """Abort whatever these have open; whoever opened it can do no more.

        Raises:
            CommitError: not so in a minute.
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
        """Say of a query's write that no task of it may begin any more.

        It is said by the epoch of a transactional id, which needs no topic and no more
        rights than the tasks' own.

        Raises:
            CommitError: not said in a minute.
        """
        self.fence([_abandoned(query)])

    def times_abandoned(self, query: str) -> Abandoned:
        """Return a value that changes with each `abandon`.

        Brokers older than Kafka 3.0 cannot be asked: to them it is always the same.
        """
        with _Talk(self.client) as talk:
            return talk.ask(partial(_epoch, _abandoned(query)))


class _Talk:
    """Questions to a cluster, over a connection that is made again when it is lost."""

    def __init__(self, client: ClientSettings) -> None:
        self._client = client
        self._cluster: Cluster | None = None

    def __enter__(self) -> _Talk:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def ask(self, question: Callable[[Cluster], T]) -> T:
        """Ask until there is an answer that stays, up to a minute."""
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


def mark(task: Task, topic: str) -> tuple[dict[TopicPartition, int], str]:
    """Return the offsets, and the group, that say that a task's batch is in.

    Args:
        topic: any that exists; a group's offsets need one.
    """
    return {TopicPartition(topic, 0): task.batch + 1}, task.transactional_id


def this_task(write: str | None) -> Task:
    """Return what the task that calls is.

    Args:
        write: the name of a write that is no stream's.

    Raises:
        CommitError: there may be two tries of it at once.
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
            "Spark says of no query or batch that this task is of; exactlyOnce needs"
            " them"
        )
    return Task(query, int(batch), number)


def checkpoint_query(checkpoint: str) -> str | None:
    """Return the id of a checkpoint's query, None if it cannot be read from here."""
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
    """Return the query whose task has prepared a transaction."""
    name = transaction.transactional_id.rpartition("-")[0]
    return name.removeprefix(_PREFIX)


def new_name() -> str:
    """Return what stands for a query's id in a write that is no stream's."""
    return uuid.uuid4().hex
