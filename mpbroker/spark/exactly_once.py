"""Each batch once in a topic: tasks prepare transactions, the driver commits them.

    task      init (aborts what its predecessor left open, and fences it); if the batch
              is marked as committed: nothing. Else all rows, and the mark, in one
              transaction that is left open.
    driver    all tasks done: commits their transactions. A task failed for good: says
              that the write is abandoned, and then aborts them: a task that begins too
              late to be aborted reads that it is, and opens nothing. What neither hears
              of (a killed driver's) the broker aborts after transaction.timeout.ms.

The mark is a consumer group's offset, committed in the same transaction: "of this query
and task, all batches below are in". So a driver that dies between two commits leaves no
doubt: the batch comes again with the same rows for the same tasks, and those that are
marked are left out. That rests on Spark making the same tasks of a batch again, which
it does from the checkpoint, as long as neither minPartitions nor the number of shuffle
partitions is changed between a kill and the restart. Speculative execution must be off:
two tries of a task at once fence each other.

Read the topic with read_committed: others see open and aborted transactions' records.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple, TypeVar

from mpbroker.client.cluster import Broker, Cluster, TopicPartition
from mpbroker.client.errors import BrokerUnavailableError, check_error
from mpbroker.client.group_admin import committed_offsets
from mpbroker.client.settings import ClientSettings
from mpbroker.errors import MpbrokerError
from mpbroker.producer.transaction_calls import PreparedTransaction
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

T = TypeVar("T")

# Set by Spark for each task of a micro-batch.
_QUERY_PROPERTY: Final = "sql.streaming.queryId"
_BATCH_PROPERTY: Final = "streaming.sql.batchId"
_PREFIX: Final = "mpbroker-spark-"
_TRANSACTION: Final = 1  # of FindCoordinator's kinds of keys
_ONE_COORDINATOR_MAX_VERSION: Final = 3
# Of clients of the first transaction version: the epoch stays what it is.
_END_MAX_VERSION: Final = 4
_INIT_MAX_VERSION: Final = 5
_FENCE_TIMEOUT_MS: Final = 60_000
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


@dataclass(frozen=True)
class Coordinators:
    """Whoever knows of transactions and marks; plain values that travel.

    Attributes:
        client: where they are, and how connections are secured.
    """

    client: ClientSettings

    def has(self, task: Task) -> bool:
        """Return whether a task's batch is committed, as its mark says."""
        marks = self._ask(lambda it: committed_offsets(it, task.transactional_id))
        return max(marks.values(), default=0) > task.batch

    def commit(self, transactions: Iterable[PreparedTransaction]) -> None:
        """Commit prepared transactions, one after the other.

        Raises:
            CommitError: one is gone already, or cannot be committed in a minute.
        """
        for transaction in transactions:
            try:
                self._ask(partial(_commit, transaction))
            except (ApiError, BrokerUnavailableError) as error:
                raise CommitError(
                    f"transaction {transaction.transactional_id} cannot be committed:"
                    f" {error}. If the batch took longer than"
                    " kafka.transaction.timeout.ms, raise it; Spark brings the batch"
                    " again, and what is committed is left out"
                ) from error

    def fence(self, transactional_ids: Iterable[str]) -> None:
        """Abort whatever these have open; whoever opened it can do no more.

        Raises:
            CommitError: not so in a minute.
        """
        for name in transactional_ids:
            try:
                self._ask(partial(_fence, name))
            except (ApiError, BrokerUnavailableError) as error:
                raise CommitError(
                    f"transaction {name} cannot be aborted: {error}"
                ) from error

    def abandon(self, write: str) -> None:
        """Say of a write that no task of it may begin any more.

        It is said by a transactional id that exists, which needs no topic and no more
        rights than the tasks' own.

        Args:
            write: its name, as of `new_name`.

        Raises:
            CommitError: not said in a minute.
        """
        self.fence([_abandoned(write)])

    def is_abandoned(self, write: str) -> bool:
        """Return whether `abandon` was said of a write."""
        return self._ask(partial(_exists, _abandoned(write)))

    def _ask(self, ask: Callable[[Cluster], T]) -> T:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                with Cluster(
                    self.client.bootstrap, _REQUEST_TIMEOUT_S, self.client
                ) as cluster:
                    return ask(cluster)
            except (ApiError, BrokerUnavailableError) as error:
                final = isinstance(error, ApiError) and not error.error_code.retriable
                if final or time.monotonic() > deadline:
                    raise
            time.sleep(_RETRY_S)


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


def _exists(name: str, cluster: Cluster) -> bool:
    answer = _coordinator(cluster, name).request(
        DescribeTransactionsRequest(transactional_ids=[name]),
        DescribeTransactionsResponse,
    )
    (state,) = answer.transaction_states
    if state.error_code == ErrorCode.TRANSACTIONAL_ID_NOT_FOUND:
        return False
    check_error(state.error_code, f"whether {name} exists")
    return True


def _abandoned(write: str) -> str:
    return f"{_PREFIX}{write}-abandoned"


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


def this_task(fallback_query: str) -> Task:
    """Return what the task that calls is; of a batch query if there is no stream's.

    Args:
        fallback_query: names the write, where Spark names no query.
    """
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is None:
        return Task(fallback_query, 0, 0)
    batch = context.getLocalProperty(_BATCH_PROPERTY)
    query = context.getLocalProperty(_QUERY_PROPERTY)
    if query is None or batch is None:
        return Task(fallback_query, 0, context.partitionId())
    return Task(query, int(batch), context.partitionId())


def all_tasks(count: int, name: str, known: Iterable[str]) -> list[str]:
    """Return the transactional ids of all tasks of a batch.

    Args:
        count: of its tasks.
        name: of the write, if it is no stream's.
        known: some of them, which know better; nobody tells the driver the query's id.
    """
    prefix = next((each.rpartition("-")[0] for each in known), f"{_PREFIX}{name}")
    return [f"{prefix}-{number}" for number in range(count)]


def new_name() -> str:
    """Return a name for a write that is no stream's."""
    return uuid.uuid4().hex
