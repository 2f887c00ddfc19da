"""Serve DescribeTransactions and ListTransactions.

Source: Kafka protocol guide; KIP-664, KIP-994, KIP-1152.
"""

from __future__ import annotations

from mpbroker.base.linear_regex import InvalidRegexError, LinearRegex
from mpbroker.coordinator.outbox import Call, Outbox
from mpbroker.coordinator.transactions.transaction_coordinator import (
    TransactionCoordinator,
)
from mpbroker.coordinator.transactions.transaction_metadata import (
    TransactionMetadata,
    TransactionState,
)
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages import describe_transactions, list_transactions
from mpbroker.protocol.messages.describe_transactions import (
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
)
from mpbroker.protocol.messages.list_transactions import (
    ListTransactionsRequest,
    ListTransactionsResponse,
)
from mpbroker.server.answer_budget import AnswerBudget


class TransactionListing:
    """Serves DescribeTransactions and ListTransactions."""

    def __init__(self, coordinator: TransactionCoordinator, outbox: Outbox) -> None:
        self._coordinator = coordinator
        self._out = outbox

    def describe_transactions(
        self, call: Call, request: DescribeTransactionsRequest, now_ms: int
    ) -> None:
        rows = []
        budget = AnswerBudget()
        # Each once, even if the request repeats it: see GroupListing.describe().
        for transactional_id in dict.fromkeys(request.transactional_ids):
            try:
                budget.check()
                self._coordinator.check(transactional_id)
                transaction = self._coordinator.get(transactional_id)
                if transaction is None:
                    raise ApiError(ErrorCode.TRANSACTIONAL_ID_NOT_FOUND)
                row = _described(transaction)
                budget.spend(row)
                rows.append(row)
            except ApiError as error:
                rows.append(
                    describe_transactions.TransactionState(
                        error_code=error.error_code, transactional_id=transactional_id
                    )
                )
        self._out.answer(call, DescribeTransactionsResponse(transaction_states=rows))

    def list_transactions(
        self, call: Call, request: ListTransactionsRequest, now_ms: int
    ) -> None:
        if self._coordinator.is_loading:
            code = ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
            self._out.answer(call, ListTransactionsResponse(error_code=code))
            return
        try:
            pattern = None
            if request.transactional_id_pattern:
                pattern = LinearRegex(request.transactional_id_pattern)
        except InvalidRegexError:
            code = ErrorCode.INVALID_REGULAR_EXPRESSION
            self._out.answer(call, ListTransactionsResponse(error_code=code))
            return
        labels = {state.label for state in TransactionState}
        states = {name for name in request.state_filters if name in labels}
        unknown = [name for name in request.state_filters if name not in labels]
        producer_ids = set(request.producer_id_filters)
        rows = []
        for each in self._coordinator.all():
            lasts_ms = now_ms - each.start_ms
            if (
                (request.state_filters and each.state.label not in states)
                or (producer_ids and each.producer_id not in producer_ids)
                or (
                    request.duration_filter >= 0 and lasts_ms <= request.duration_filter
                )
                or (pattern is not None and not pattern.matches(each.transactional_id))
            ):
                continue
            rows.append(
                list_transactions.TransactionState(
                    transactional_id=each.transactional_id,
                    producer_id=each.producer_id,
                    transaction_state=each.state.label,
                )
            )
        self._out.answer(
            call,
            ListTransactionsResponse(
                unknown_state_filters=unknown, transaction_states=rows
            ),
        )


def _described(
    transaction: TransactionMetadata,
) -> describe_transactions.TransactionState:
    topics: dict[str, list[int]] = {}
    for topic, partition in sorted(transaction.partitions):
        topics.setdefault(topic, []).append(partition)
    return describe_transactions.TransactionState(
        transactional_id=transaction.transactional_id,
        transaction_state=transaction.state.label,
        transaction_timeout_ms=transaction.timeout_ms,
        transaction_start_time_ms=transaction.start_ms,
        producer_id=transaction.producer_id,
        producer_epoch=transaction.producer_epoch,
        topics=[
            describe_transactions.TopicData(topic=name, partitions=partitions)
            for name, partitions in topics.items()
        ],
    )
