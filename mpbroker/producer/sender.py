"""Sender: the loop that sends batches to brokers and takes their answers.

`run_once` is one turn: send what transactions and idempotence need, send the batches
that are ready, then poll. The sender owns the `NetworkClient`. The producer's thread
runs it; tests run it turn by turn, with a clock of their own.

Source: KIP-91 (delivery timeout), KIP-98, KIP-126 (splitting), KIP-467 (errors of
single records), KIP-951 (leaders in answers).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from mpbroker.client.addresses import Address
from mpbroker.client.client_request import ClientResponse
from mpbroker.client.errors import (
    AuthenticationError,
    UnsupportedVersionError,
    error_code_of,
)
from mpbroker.client.metadata import Metadata
from mpbroker.client.network_client import NetworkClient
from mpbroker.producer.accumulator import RecordAccumulator
from mpbroker.producer.batch import ProducerBatch
from mpbroker.producer.config import ACKS_ALL, ProducerSettings
from mpbroker.producer.errors import (
    FatalError,
    NetworkError,
    ProducerClosedError,
    ProducerError,
    RefusedError,
    TransactionStateError,
    authentication_failed,
    error_of,
)
from mpbroker.producer.idempotence import Idempotence
from mpbroker.producer.metrics import ProducerMetrics
from mpbroker.producer.telemetry import make_telemetry_sender
from mpbroker.producer.transaction_driver import TransactionDriver
from mpbroker.producer.transactions import TransactionManager, TransactionState
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.init_producer_id import InitProducerIdResponse
from mpbroker.protocol.messages.produce import (
    NodeEndpoint,
    PartitionProduceData,
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)

_log = logging.getLogger(__name__)

_NAMED_TOPICS_MAX_VERSION: Final = 12  # later versions name topics by id
# From version 12 on, a Produce adds its partitions to the transaction itself (KIP-890).
_FIRST_TRANSACTIONS_MAX_VERSION: Final = 11

_STALE_METADATA: Final = frozenset(
    {
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.LEADER_NOT_AVAILABLE,
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.REPLICA_NOT_AVAILABLE,
        ErrorCode.NETWORK_EXCEPTION,
        ErrorCode.KAFKA_STORAGE_ERROR,
        ErrorCode.FENCED_LEADER_EPOCH,
        ErrorCode.UNKNOWN_LEADER_EPOCH,
    }
)

_NO_NODES: Final[frozenset[int]] = frozenset()
_Batches = dict[tuple[str, int], ProducerBatch]


class Sender:
    """Sends ready batches to the leaders, and completes, retries or fails them."""

    def __init__(
        self,
        client: NetworkClient,
        metadata: Metadata,
        accumulator: RecordAccumulator,
        settings: ProducerSettings,
        idempotence: Idempotence | None,
        metrics: ProducerMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._client = client
        self._metadata = metadata
        self._accumulator = accumulator
        self._settings = settings
        self._idempotence = idempotence
        self._metrics = metrics
        self._clock = clock
        # With one request in flight, mute partitions, so that no batch is overtaken.
        self._in_order = settings.max_in_flight == 1
        self._transactions = None
        if isinstance(idempotence, TransactionManager):
            self._transactions = TransactionDriver(
                client, idempotence, accumulator, settings
            )
        self._telemetry = make_telemetry_sender(
            client, metadata, settings, metrics, clock
        )
        self._in_flight: dict[ProducerBatch, None] = {}
        self._sent_ms: dict[int, float] = {}  # when the last batches went, by node
        self._init_pending = False
        self._init_not_before_ms = 0.0
        self._is_closing = False
        self._is_forced = False
        # When closing stops waiting for the end of a transaction.
        self._end_by_ms: float | None = None
        self._none_expires_before_ms = -float("inf")
        self._refusal: AuthenticationError | None = None  # the last that was passed on

    # -- the loop ----------------------------------------------------------------------

    def run(self) -> None:
        """Run turns until `close` is called and all work is done.

        After a call of `force_close`, it stops at once.
        """
        self._accumulator.complete_here()
        while not self._is_closing or (not self._is_forced and self._has_work()):
            try:
                self.run_once()
            except Exception:  # noqa: BLE001 - a bug here must not hang futures
                _log.exception("error in the producer's thread")
        if self._accumulator.has_incomplete:
            error = ProducerClosedError(
                "the producer was closed before this record was acknowledged; it may be"
                " written: give close() more time, or call flush() before it"
            )
            self.abort_all(error)
        if isinstance(self._idempotence, TransactionManager):
            self._idempotence.close(
                ProducerClosedError("the producer was closed before this was answered")
            )
        self._client.close_all()

    def _has_work(self) -> bool:
        if self._accumulator.has_incomplete or self._must_end_transaction():
            return True
        return self._telemetry is not None and self._telemetry.must_end(self._clock())

    def _must_end_transaction(self) -> bool:
        """Abort a transaction when closing; return whether to wait for its end."""
        state = self._idempotence
        if not isinstance(state, TransactionManager) or self._is_forced:
            return False
        if state.state in (
            TransactionState.IN_TRANSACTION,
            TransactionState.ABORTABLE_ERROR,
        ):
            # The call of another thread may have ended it just now.
            with suppress(TransactionStateError):
                state.begin_abort()
        if not state.is_completing:
            return False
        # Wait as long as a record may take. The broker itself aborts it later.
        now_ms = self._clock()
        if self._end_by_ms is None:
            self._end_by_ms = now_ms + self._settings.delivery_timeout_ms
        if now_ms < self._end_by_ms:
            return True
        _log.warning(
            "closing without knowing how the transaction of %s ended: no answer in"
            " %d ms (delivery.timeout.ms)",
            state.transactional_id,
            self._settings.delivery_timeout_ms,
        )
        return False

    def close(self) -> None:
        """End `run` when all batches are sent and answered."""
        self._accumulator.is_closed = True
        self._is_closing = True
        self._client.wakeup()

    def force_close(self) -> None:
        """End `run` now; records that are not acknowledged fail."""
        self._is_forced = True
        self.close()

    def run_once(self) -> None:
        """Run one turn: send all that is ready, then poll for responses."""
        now_ms = self._clock()
        wait_ms = self._prepare(now_ms)
        wait_ms = min(wait_ms, self._send_batches(now_ms))
        if self._telemetry is not None:
            wait_ms = min(wait_ms, self._telemetry.step(now_ms))
        if self._end_by_ms is not None:
            wait_ms = min(wait_ms, max(0.0, self._end_by_ms - now_ms))
        self._client.poll(wait_ms, now_ms)
        self._metrics.follow(self._client.counts, now_ms)

    def _prepare(self, now_ms: float) -> float:
        """Send the requests that must precede batches, such as InitProducerId.

        Returns:
            How long until this has to be called again, in ms.
        """
        self._note_refusal()
        state = self._idempotence
        if state is None:
            return float("inf")
        if state.fatal_error is not None:
            self._fail_all(state.fatal_error)
            return float("inf")
        if self._transactions is not None:
            return self._transactions.step(now_ms)
        state.begin_turn()
        if state.has_producer_id or self._init_pending:
            return float("inf")
        return self._ask_for_id(state, now_ms)

    def _ask_for_id(self, state: Idempotence, now_ms: float) -> float:
        if now_ms < self._init_not_before_ms:
            return self._init_not_before_ms - now_ms
        node = self._client.least_loaded_node(now_ms)
        if node is None:
            return self._settings.client.retry_backoff_ms
        if not self._client.ready(node, now_ms):
            return float("inf")  # an event will come: an answer, or a lost connection
        self._init_pending = True
        self._client.send(
            node,
            state.init_request(),
            InitProducerIdResponse,
            self._take_id,
            now_ms,
        )
        return float("inf")

    def _take_id(self, answer: ClientResponse) -> None:
        state = self._idempotence
        assert state is not None
        self._init_pending = False
        now_ms = self._clock()
        response = answer.response
        if isinstance(response, InitProducerIdResponse):
            code = response.error_code
            if not code:
                state.take_id(response)
                state.took_new_id()
                return
            error = error_of(code, "no producer id")
            if not error_code_of(code).retriable:
                state.fatal_error = _as_fatal(error)
        elif isinstance(answer.error, UnsupportedVersionError):
            state.fatal_error = FatalError(
                f"{answer.error}: set enable.idempotence=false for this broker",
                ErrorCode.UNSUPPORTED_VERSION,
            )
        self._init_not_before_ms = now_ms + self._settings.client.retry_backoff_ms

    def _note_refusal(self) -> None:
        """Pass a refused login or certificate on to batches and transactions.

        Batches wait until a login succeeds, or delivery.timeout.ms is over.
        """
        refusal = self._metadata.refusal
        if refusal is self._refusal:
            return
        self._refusal = refusal
        self._accumulator.trouble = "" if refusal is None else str(refusal)
        if refusal is not None and isinstance(self._idempotence, TransactionManager):
            self._idempotence.login_refused(authentication_failed(refusal))

    def _fail_all(self, error: ProducerError) -> None:
        accumulator = self._accumulator
        accumulator.abort(accumulator.undrained(), error)

    # -- sending -----------------------------------------------------------------------

    def _send_batches(self, now_ms: float) -> float:
        """Send the batches that are ready; return how long to wait for more, in ms."""
        accumulator, client = self._accumulator, self._client
        snapshot = self._metadata.snapshot
        accumulator.occupied = _NO_NODES  # records that come from here on wake us
        ready = accumulator.ready(snapshot, now_ms, self._unanswered_ms)
        if ready.leaderless:
            for topic in ready.leaderless:
                self._metadata.add_topic(topic, now_ms)
            self._metadata.request_update()
        nodes, not_ready_ms = [], float("inf")
        for node in ready.nodes:
            is_ready = client.ready(node, now_ms)
            accumulator.note_node(node, is_ready, now_ms)
            if is_ready:
                nodes.append(node)
            else:
                not_ready_ms = min(not_ready_ms, client.delay_ms(node, now_ms))
        drained = accumulator.drain(snapshot, nodes, now_ms) if nodes else {}
        sent = False
        for node, batches in drained.items():
            for batch in batches:
                self._in_flight[batch] = None
                if self._in_order:
                    accumulator.mute(batch)
            if batches:
                sent = True
                self._sent_ms[node] = now_ms
                self._send_request(node, batches, now_ms)
        if now_ms >= self._none_expires_before_ms:
            self._expire(now_ms)
            self._none_expires_before_ms = self._next_expiry_ms(now_ms)
        accumulator.occupied = occupied = {
            node for node in ready.nodes if client.is_occupied(node)
        }
        if sent and accumulator.has_undrained and not occupied.issuperset(nodes):
            return 0.0  # the next batches of these partitions may be ready, too
        wait_ms = min(ready.next_check_ms, not_ready_ms)
        if accumulator.has_incomplete:
            wait_ms = min(wait_ms, max(0.0, self._none_expires_before_ms - now_ms))
        return wait_ms

    def _unanswered_ms(self, node: int) -> float:
        """Return the time, in ms, at which a node got batches that it has not answered.

        Return -inf if it has answered all requests. Return -inf, too, if it takes no
        more requests now: batches wait for such a node anyway.
        """
        client = self._client
        if not client.in_flight(node) or client.is_occupied(node):
            return -float("inf")
        return self._sent_ms.get(node, -float("inf"))

    def _next_expiry_ms(self, now_ms: float) -> float:
        """Return a time, in ms, before which no sent or later batch can expire."""
        oldest = min((batch.created_ms for batch in self._in_flight), default=now_ms)
        return min(
            min(oldest, now_ms) + self._settings.delivery_timeout_ms,
            self._accumulator.next_expiry_ms(),
        )

    def _send_request(
        self, node: int, batches: list[ProducerBatch], now_ms: float
    ) -> None:
        codec = self._settings.codec
        topics: dict[str, list[PartitionProduceData]] = {}
        by_partition: _Batches = {}
        for batch in batches:
            by_partition[batch.topic, batch.partition] = batch
            topics.setdefault(batch.topic, []).append(
                PartitionProduceData(index=batch.partition, records=batch.encode(codec))
            )
        self._metrics.sent(batches, now_ms)
        state = self._idempotence
        first = isinstance(state, TransactionManager) and state.version == 1
        request = ProduceRequest(
            transactional_id=self._settings.transactional_id,
            acks=self._settings.acks,
            timeout_ms=self._settings.client.request_timeout_ms,
            topic_data=[
                TopicProduceData(name=name, partition_data=partitions)
                for name, partitions in topics.items()
            ],
        )
        self._client.send(
            node,
            request,
            ProduceResponse,
            lambda answer: self._take_answer(answer, by_partition),
            now_ms,
            max_version=(
                _FIRST_TRANSACTIONS_MAX_VERSION if first else _NAMED_TOPICS_MAX_VERSION
            ),
            expect_answer=self._settings.acks != 0,
        )
        # The request is encoded, and a retry needs only the batches. Drop its copy of
        # the records, which does not count as buffer.memory.
        request.topic_data = []

    def _expire(self, now_ms: float) -> None:
        """Fail batches that are older than delivery.timeout.ms, sent or not."""
        accumulator, limit_ms = self._accumulator, self._settings.delivery_timeout_ms
        late = [
            batch for batch in self._in_flight if now_ms - batch.created_ms >= limit_ms
        ]
        for batch in late:
            batch.in_retry = True  # so that the error tells that it was sent
        for batch in [*late, *accumulator.expired(now_ms)]:
            error = accumulator.expiry_error(batch, now_ms)
            if self._idempotence is not None:
                self._idempotence.expired(batch)
            self._finish_failed(batch, error, {}, now_ms, tell=False)

    # -- answers -----------------------------------------------------------------------

    def _take_answer(self, answer: ClientResponse, batches: _Batches) -> None:
        now_ms = self._clock()
        response = answer.response
        if isinstance(response, ProduceResponse):
            self._metrics.answered(
                answer.node, answer.latency_ms, response.throttle_time_ms, now_ms
            )
            self._take_response(response, batches, now_ms)
            return
        if answer.error is None:  # acks=0
            for batch in batches.values():
                self._succeed(batch, -1, -1)
            return
        if isinstance(answer.error, UnsupportedVersionError):
            code = ErrorCode.UNSUPPORTED_VERSION
        elif answer.timed_out:
            code = ErrorCode.REQUEST_TIMED_OUT
        else:
            code = ErrorCode.NETWORK_EXCEPTION
        for batch in batches.values():
            refusal = PartitionProduceResponse(
                index=batch.partition,
                error_code=code,
                base_offset=-1,
                error_message=str(answer.error),
            )
            self._complete(batch, refusal, {}, now_ms)

    def _take_response(
        self, response: ProduceResponse, batches: _Batches, now_ms: float
    ) -> None:
        endpoints = {entry.node_id: entry for entry in response.node_endpoints}
        left = dict(batches)
        for topic in response.responses:
            for entry in topic.partition_responses:
                batch = left.pop((topic.name, entry.index), None)
                if batch is not None:
                    self._complete(batch, entry, endpoints, now_ms)
        for batch in left.values():
            # An answer without the partition does not tell whether it is written.
            silent = PartitionProduceResponse(
                index=batch.partition,
                error_code=ErrorCode.NETWORK_EXCEPTION,
                base_offset=-1,
                error_message="the answer does not mention this partition",
            )
            self._complete(batch, silent, {}, now_ms)

    def _complete(
        self,
        batch: ProducerBatch,
        entry: PartitionProduceResponse,
        endpoints: dict[int, NodeEndpoint],
        now_ms: float,
    ) -> None:
        """Complete a batch, try it again, split it or fail it, as its response says."""
        if batch.is_done:
            self._forget(batch)  # expired while it was in flight
            return
        code = error_code_of(entry.error_code)
        if not entry.error_code:
            self._succeed(batch, entry.base_offset, entry.log_append_time_ms)
            return
        if code == ErrorCode.DUPLICATE_SEQUENCE_NUMBER:
            self._succeed(
                batch, -1, -1
            )  # the broker has it, and does not tell its offset
            return
        if code in _STALE_METADATA:
            self._learn_leader(batch, entry, endpoints)
        expired = now_ms - batch.created_ms >= self._settings.delivery_timeout_ms
        if (
            code in (ErrorCode.MESSAGE_TOO_LARGE, ErrorCode.RECORD_LIST_TOO_LARGE)
            and batch.record_count > 1
            and not expired
        ):
            self._split(batch, entry, now_ms)
        elif (
            not expired
            and batch.attempts < self._settings.retries
            and self._may_retry(batch, code, entry.log_start_offset)
        ):
            self._forget(batch)
            self._metrics.count("record-retry", batch.record_count, now_ms, batch.topic)
            said = f" ({entry.error_message})" if entry.error_message else ""
            batch.last_refusal = f"the last try ended with {code.name}{said}"
            self._accumulator.reenqueue(batch, now_ms)
        else:
            self._fail(batch, entry, now_ms)

    def _may_retry(
        self, batch: ProducerBatch, code: ErrorCode, log_start_offset: int
    ) -> bool:
        if self._is_forced:
            return False
        if self._idempotence is None:
            return code.retriable
        return self._idempotence.may_retry(batch, code, log_start_offset)

    def _learn_leader(
        self,
        batch: ProducerBatch,
        entry: PartitionProduceResponse,
        endpoints: dict[int, NodeEndpoint],
    ) -> None:
        leader = entry.current_leader
        if leader is not None and leader.leader_id in endpoints:
            endpoint = endpoints[leader.leader_id]
            address = Address(endpoint.host, endpoint.port)
            if self._metadata.update_leader(
                batch.topic,
                batch.partition,
                leader.leader_id,
                leader.leader_epoch,
                address,
            ):
                return
        self._metadata.request_update()

    def _split(
        self, batch: ProducerBatch, entry: PartitionProduceResponse, now_ms: float
    ) -> None:
        self._forget(batch)
        try:
            children = self._accumulator.split_and_reenqueue(batch)
        except Exception:  # noqa: BLE001 - a codec's error, or no memory
            _log.exception("splitting a batch of %s-%d", batch.topic, batch.partition)
            self._fail(batch, entry, now_ms)
            return
        if self._idempotence is not None:
            self._idempotence.replaced(batch, children)
        self._metrics.count("batch-split", 1, now_ms)

    def _succeed(
        self, batch: ProducerBatch, base_offset: int, log_append_time: int
    ) -> None:
        self._forget(batch)
        if self._idempotence is not None:
            self._idempotence.completed(batch, base_offset)
        batch.complete(base_offset, log_append_time)
        self._accumulator.release(batch)

    def _fail(
        self, batch: ProducerBatch, entry: PartitionProduceResponse, now_ms: float
    ) -> None:
        what = f"{batch.record_count} record(s) for {batch.topic}-{batch.partition}"
        error = error_of(entry.error_code, what, entry.error_message)
        if entry.error_code == ErrorCode.NETWORK_EXCEPTION:
            error = NetworkError(
                f"{error}; they may be written, and all retries are used up"
                if self._settings.acks == ACKS_ALL
                else f"{error}; they may be written",
                ErrorCode.NETWORK_EXCEPTION,
            )
        errors: dict[int, ProducerError] = {}
        for record in entry.record_errors:
            errors[record.batch_index] = RefusedError(
                f"record {record.batch_index} of a batch for"
                f" {batch.topic}-{batch.partition}:"
                f" {record.batch_index_error_message or error}",
                error.error_code,
            )
        if errors:
            error = RefusedError(
                f"{what} were not written because others of their batch were refused;"
                " they can be sent again",
                error.error_code,
            )
        self._finish_failed(batch, error, errors, now_ms, tell=True)

    def _finish_failed(
        self,
        batch: ProducerBatch,
        error: ProducerError,
        errors: dict[int, ProducerError],
        now_ms: float,
        *,
        tell: bool,
    ) -> None:
        self._forget(batch)
        if tell and self._idempotence is not None:
            self._idempotence.failed(batch, error)
        count = batch.record_count or len(batch.records)
        self._metrics.count("record-error", count, now_ms, batch.topic)
        batch.fail(error, errors)
        self._accumulator.release(batch)

    def _forget(self, batch: ProducerBatch) -> None:
        self._in_flight.pop(batch, None)
        if self._in_order:
            self._accumulator.unmute(batch)

    def abort_all(self, error: ProducerError) -> None:
        """Fail all batches that are neither acknowledged nor failed."""
        accumulator = self._accumulator
        in_flight, self._in_flight = list(self._in_flight), {}
        accumulator.abort([*in_flight, *accumulator.undrained()], error)


def _as_fatal(error: ProducerError) -> FatalError:
    if isinstance(error, FatalError):
        return error
    return FatalError(str(error), error.error_code)
