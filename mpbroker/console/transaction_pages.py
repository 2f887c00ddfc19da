"""Show transactions and producers in the console; two ways to end a transaction.

A transaction that its coordinator knows is ended by taking its transactional id over,
as a restarted producer does: it is aborted, and the old producer is fenced. A
transaction that only a partition knows hangs for ever; an abort marker ends it there,
as `kafka-transactions.sh abort` does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, Final

from mpbroker.client.admin.log_dir_admin import describe_log_dirs
from mpbroker.client.cluster import Broker, Cluster, only
from mpbroker.client.errors import ErrorCode, check_error
from mpbroker.console.message_pages import partition_of
from mpbroker.console.page_server import HttpError
from mpbroker.console.request_fields import number_of, text_of
from mpbroker.console.sessions import Session
from mpbroker.protocol.messages import describe_producers as producers
from mpbroker.protocol.messages import write_txn_markers as markers
from mpbroker.protocol.messages.describe_transactions import (
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
)
from mpbroker.protocol.messages.find_coordinator import (
    FindCoordinatorRequest,
    FindCoordinatorResponse,
)
from mpbroker.protocol.messages.init_producer_id import (
    InitProducerIdRequest,
    InitProducerIdResponse,
)
from mpbroker.protocol.messages.list_transactions import (
    ListTransactionsRequest,
    ListTransactionsResponse,
)

PAGE_ROWS: Final = 100
_MAX_PRODUCERS: Final = 1000
_MAX_PARTITIONS: Final = 50  # that are shown of one transaction
_TRANSACTION: Final = 1  # key type of FindCoordinator
_ONE_COORDINATOR: Final = 3  # the last version of FindCoordinator that asks for one
_NOT_YET: Final = (
    ErrorCode.CONCURRENT_TRANSACTIONS,
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
)
_AGAIN_S: Final = 0.1
_OPEN: Final = ("Ongoing", "PrepareAbort", "PrepareCommit")

_Document = Mapping[str, Any]


def list_transactions(
    session: Session, match: str, start: int, *, is_fresh: bool = False
) -> dict[str, Any]:
    """Return a page of transactional ids with their states, open transactions first.

    Args:
        session: the user's session.
        match: a part of the ids; case does not count.
        start: the number of ids before the page.
        is_fresh: whether to ask the broker, even if the cached list is recent.
    """

    def ask(cluster: Cluster) -> list[dict[str, Any]]:
        found = []
        for node in cluster.metadata([]).brokers:
            answer = cluster.broker(node.node_id).request(
                ListTransactionsRequest(), ListTransactionsResponse
            )
            check_error(answer.error_code, f"transactions of broker {node.node_id}")
            found += [
                {"id": each.transactional_id, "state": each.transaction_state}
                for each in answer.transaction_states
            ]
        return sorted(found, key=lambda row: (row["state"] not in _OPEN, row["id"]))

    part = match.casefold()
    found = [
        row
        for row in session.remembered("transactions", ask, is_fresh=is_fresh)
        if part in row["id"].casefold()
    ]
    page = found[start : start + PAGE_ROWS]
    with session.client() as cluster:
        rows = [_described(cluster, row["id"]) or row for row in page]
    return {"total": len(found), "start": start, "rows": rows}


def _described(cluster: Cluster, transactional_id: str) -> dict[str, Any] | None:
    """Return the state of a transactional id; None: its coordinator refuses to tell."""
    answer = _coordinator(cluster, transactional_id).request(
        DescribeTransactionsRequest(transactional_ids=[transactional_id]),
        DescribeTransactionsResponse,
    )
    (found,) = answer.transaction_states
    if found.error_code:
        return None
    is_open = found.transaction_state in _OPEN and found.transaction_start_time_ms > 0
    places = [f"{e.topic}-{n}" for e in found.topics for n in e.partitions]
    return {
        "id": transactional_id,
        "state": found.transaction_state,
        "is_open": is_open,
        "started": found.transaction_start_time_ms if is_open else None,
        "timeout_ms": found.transaction_timeout_ms,
        "producer_id": found.producer_id,
        "epoch": found.producer_epoch,
        "partitions": places[:_MAX_PARTITIONS],
        "more": max(0, len(places) - _MAX_PARTITIONS),
    }


def list_producers(cluster: Cluster, query: Mapping[str, str]) -> Any:
    """Return the producers that a partition knows, with their open transactions."""
    where, leader = partition_of(
        cluster, text_of(query, "topic"), max(0, number_of(query, "partition"))
    )
    asked = producers.TopicRequest(
        name=where.topic, partition_indexes=[where.partition]
    )
    broker = cluster.broker(leader)
    answer = broker.request(
        producers.DescribeProducersRequest(topics=[asked]),
        producers.DescribeProducersResponse,
    )
    found = only(only(answer.topics, broker.address).partitions, broker.address)
    check_error(found.error_code, str(where), found.error_message)
    rows = sorted(found.active_producers, key=lambda each: each.producer_id)
    return {
        "total": len(rows),
        "rows": [
            {
                "producer_id": each.producer_id,
                "epoch": each.producer_epoch,
                "coordinator_epoch": each.coordinator_epoch,
                "sequence": each.last_sequence if each.last_sequence >= 0 else None,
                "at": each.last_timestamp,
                "open_since": (
                    each.current_txn_start_offset
                    if each.current_txn_start_offset >= 0
                    else None
                ),
            }
            for each in rows[:_MAX_PRODUCERS]
        ],
    }


def list_directories(cluster: Cluster, query: Mapping[str, str]) -> Any:
    """Return the log directories of all brokers, with sizes and partition counts."""
    nodes = [each.node_id for each in cluster.metadata([]).brokers]
    return {
        "rows": [
            {
                "broker": each.broker,
                "path": each.path,
                "error": each.error,
                "total_bytes": each.total_bytes,
                "usable_bytes": each.usable_bytes,
                "partitions": len(each.partitions),
                "bytes": sum(each.partitions.values()),
            }
            for each in describe_log_dirs(cluster, nodes)
        ]
    }


def end_transaction(cluster: Cluster, given: _Document) -> Any:
    """Abort the open transaction of a transactional id, and fence its producer."""
    transactional_id = text_of(given, "id")
    before = _described(cluster, transactional_id)
    if before is None or not before["is_open"]:
        raise HttpError(HTTPStatus.CONFLICT, "this transaction has ended by now")
    request = InitProducerIdRequest(
        transactional_id=transactional_id, transaction_timeout_ms=before["timeout_ms"]
    )
    deadline = time.monotonic() + cluster.timeout_s
    while True:
        broker = _coordinator(cluster, transactional_id)
        answer = broker.request(request, InitProducerIdResponse)
        if answer.error_code not in _NOT_YET or time.monotonic() > deadline:
            check_error(answer.error_code, f"transactional id {transactional_id!r}")
            return {}
        time.sleep(_AGAIN_S)


def abort_in_partition(cluster: Cluster, given: _Document) -> Any:
    """End a producer's hanging transaction in one partition by an abort marker."""
    where, leader = partition_of(
        cluster, text_of(given, "topic"), max(0, number_of(given, "partition"))
    )
    topic = markers.WritableTxnMarkerTopic(
        name=where.topic, partition_indexes=[where.partition]
    )
    marker = markers.WritableTxnMarker(
        producer_id=number_of(given, "producer_id"),
        producer_epoch=number_of(given, "epoch") % 2**15,
        transaction_result=False,
        topics=[topic],
        coordinator_epoch=max(0, number_of(given, "coordinator_epoch")) % 2**31,
    )
    broker = cluster.broker(leader)
    answer = broker.request(
        markers.WriteTxnMarkersRequest(markers=[marker]),
        markers.WriteTxnMarkersResponse,
    )
    found = only(only(answer.markers, broker.address).topics, broker.address)
    check_error(only(found.partitions, broker.address).error_code, str(where))
    return {}


def _coordinator(cluster: Cluster, transactional_id: str) -> Broker:
    request = FindCoordinatorRequest(key=transactional_id, key_type=_TRANSACTION)
    found = cluster.request(
        request, FindCoordinatorResponse, max_version=_ONE_COORDINATOR
    )
    what = f"coordinator of transactional id {transactional_id!r}"
    check_error(found.error_code, what, found.error_message)
    return cluster.broker(found.node_id)


TRANSACTION_CHANGES: Final[Mapping[str, Callable[[Cluster, _Document], Any]]] = {
    "/api/transactions/end": end_transaction,
    "/api/transactions/abort": abort_in_partition,
}
