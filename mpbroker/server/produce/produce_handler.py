"""Judge each partition's batch of a Produce, and append it.

The outcome says what must happen before the answer is sent, which acks decides:

    acks=0   there is no answer; an error closes the connection, so the client notices
    acks=1   answered when the batch is in the log, that is, in the page cache
    acks=all answered when the batch is on disk; if the topic has flush.acks.all=false,
             when it is in the log

A request is executed a second time if its handler dies. The request's progress words
say what the first execution appended. The second execution answers these partitions
without a second append. The core executes plain batches in the same way
(native/server/produce.c).

Source: Kafka protocol guide, "Produce"; KafkaApis.handleProduceRequest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from mpbroker.base.named_tuple import NamedTuple
from mpbroker.ipc import pulse
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.fast_produce import SingleProduce, encode_single_answer
from mpbroker.protocol.messages.produce import (
    BatchIndexAndErrorMessage,
    PartitionProduceData,
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
    TopicProduceResponse,
)
from mpbroker.protocol.records.batch_header import RecordBatchError
from mpbroker.protocol.records.log_validator import (
    InflationBudget,
    RecordsError,
    ValidatedBatch,
    ValidationPolicy,
    is_compressed,
    validate_produce,
)
from mpbroker.protocol.transactional_produce import producer_of
from mpbroker.storage.log.partition_log import AppendResult

if TYPE_CHECKING:
    from mpbroker.metadata.log_config import LogConfig
    from mpbroker.metadata.topics import Topic
    from mpbroker.server.produce_transactions import ProduceTransactions
    from mpbroker.storage.log.partition_log import PartitionLog

_ACKS_ALL: Final = -1
_VALID_ACKS: Final = (-1, 0, 1)
_ZSTD_SINCE: Final = 7
_IMPLICIT_ADD_SINCE: Final = 12
_TOPIC_IDS_SINCE: Final = 13
# A batch that Kafka refuses with one of these was compared with the log, so the answer
# has the log's start.
_WITH_LOG_START: Final = (
    ErrorCode.INVALID_RECORD,
    ErrorCode.INVALID_TIMESTAMP,
    ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
    ErrorCode.DUPLICATE_SEQUENCE_NUMBER,
    ErrorCode.INVALID_PRODUCER_EPOCH,
    ErrorCode.UNKNOWN_PRODUCER_ID,
    ErrorCode.INVALID_TXN_STATE,
)


class Progress(Protocol):
    """Stores what a request's execution has appended, for a repeated execution.

    A request is executed again if its handler process dies.
    """

    slot: int

    def earlier(self) -> Sequence[int]:
        """Return what an earlier execution has done, an integer for each partition.

        It is the base offset of the append, or -1 minus the error code.
        """

    def capacity(self) -> int:
        """Return for how many partitions there is room to store what was done."""

    def note(self, ordinal: int, word: int) -> None:
        """Store the result of a partition to which nothing was appended.

        Args:
            ordinal: the partition's place in the request.
            word: the base offset of the earlier append, or -1 minus the error code.
        """


class Topics(Protocol):
    """Finds topics by name or id."""

    def topic(self, name: str) -> Topic | None: ...

    def topic_by_id(self, topic_id: bytes) -> Topic | None: ...


class Learn(Protocol):
    """Lets the compiled core (C code) execute the next plain produces to a partition.

    ``CoreCache.learn_produce`` does this.
    """

    def __call__(
        self, topic: Topic, partition: int, log: PartitionLog, policy: ValidationPolicy
    ) -> None: ...


# Raises ApiError if the sender may not write to the topic of this name.
Check = Callable[[str], None]
# Raises ApiError if the sender may not copy records from another cluster.
CheckCopy = Callable[[], None]
_NO_SOURCE: Final = -1


class SharedAppend(NamedTuple):
    """Holds a validated batch for a topic whose records are in the object store.

    The process that writes the cluster's objects must commit it.

    Attributes:
        answer: the partition's answer, which still lacks the batch's base offset.
        topic_id: the topic's id.
        partition: the partition's index in the topic.
        row: the partition's row in the shared partition table.
        batch: the batch.
    """

    answer: PartitionProduceResponse
    topic_id: bytes
    partition: int
    row: int
    batch: ValidatedBatch


class ProduceOutcome:
    """Holds a request's response, and what must be done before it is sent.

    Attributes:
        response: the response, with an answer for each partition.
        needed: by partition row, the log, and the offset below which it must be on
            disk.
        answers: the answers of these partitions, by row.
        failed: whether any partition was refused.
        shared: the batches that the cluster must commit; None: there are none.
    """

    __slots__ = ("answers", "failed", "needed", "response", "shared")

    def __init__(self) -> None:
        self.response = ProduceResponse()
        self.needed: dict[int, tuple[PartitionLog, int]] = {}  # row -> log, offset
        self.answers: dict[int, PartitionProduceResponse] = {}  # row -> its answer
        self.failed = False
        self.shared: list[SharedAppend] | None = None

    def encode(self, version: int) -> bytes:
        return self.response.encode(version)

    def errors(self) -> set[int]:
        """Return the error codes of all partitions that failed, each once."""
        codes = {
            partition.error_code
            for topic in self.response.responses
            for partition in topic.partition_responses
        }
        return codes - {ErrorCode.NONE}

    def fail(self, row: int, error_code: ErrorCode, message: str) -> None:
        """Turn a partition's answer into an error: its records are not on disk."""
        refuse(self.answers[row], error_code, message)

    def wait_for(
        self, log: PartitionLog, offset: int, answer: PartitionProduceResponse
    ) -> None:
        """Note that records of a log must be on disk before the response is sent.

        Args:
            log: the log.
            offset: all records below it must be on disk.
            answer: the partition's answer, for the case that this fails.
        """
        row = log.row.index
        self.needed[row] = (log, offset)
        self.answers[row] = answer


class SingleOutcome:
    """Holds the response to a Produce of one partition, like `ProduceOutcome`."""

    __slots__ = ("_error", "_request", "_result", "needed")

    def __init__(
        self,
        request: SingleProduce,
        result: AppendResult,
        log: PartitionLog,
        waits_for_disk: bool,
    ) -> None:
        self._request = request
        self._result = result
        self._error: ApiError | None = None
        self.needed: dict[int, tuple[PartitionLog, int]] = {}
        if request.acks == _ACKS_ALL and waits_for_disk:
            self.needed[log.row.index] = (log, result.last_offset + 1)

    def encode(self, version: int) -> bytes:
        request, result = self._request, self._result
        if self._error is not None:
            return encode_single_refusal(request, version, self._error)
        return encode_single_answer(
            version,
            request.topic,
            request.partition,
            result.base_offset,
            result.log_append_time_ms,
            result.log_start_offset,
        )

    def fail(self, row: int, error_code: ErrorCode, message: str) -> None:
        """Turn the response into an error, because the records are not on disk."""
        self._error = ApiError(error_code, message)


class _Execution:
    """Holds the arguments of one execution of a Produce, and its outcome so far."""

    __slots__ = (
        "capacity",
        "check",
        "check_copy",
        "earlier",
        "inflation",
        "now_ms",
        "outcome",
        "progress",
        "replaced",
        "request",
        "version",
    )

    def __init__(
        self,
        request: ProduceRequest,
        version: int,
        progress: Progress,
        now_ms: int,
        check: Check | None,
        check_copy: CheckCopy | None,
        *,
        has_turn: bool,
    ) -> None:
        self.request = request
        self.version = version
        self.progress = progress
        self.now_ms = now_ms
        self.check = check
        self.check_copy = check_copy
        self.earlier = progress.earlier()
        self.capacity = progress.capacity()
        self.outcome = ProduceOutcome()
        self.replaced = _replaced(request, version)
        self.inflation = InflationBudget(
            sum(
                len(partition.records)
                for topic in request.topic_data
                for partition in topic.partition_data
                if partition.records is not None
            ),
            has_turn=has_turn,
        )


def _replaced(request: ProduceRequest, version: int) -> Collection[int]:
    """Return the ordinals of partitions that the request names again behind them.

    Kafka keeps the last batch of each partition and drops the others in silence. So a
    request cannot have a thousand batches of one partition inflated.
    """
    last: dict[tuple[str | bytes, int], int] = {}
    replaced = set()
    ordinal = 0
    for data in request.topic_data:
        topic = data.topic_id if version >= _TOPIC_IDS_SINCE else data.name
        for partition in data.partition_data:
            key = topic, partition.index
            if key in last:
                replaced.add(last[key])
            last[key] = ordinal
            ordinal += 1
    return replaced


class ProduceHandler:
    """Appends the records that clients produce, for one handler process.

    Args:
        topics: the topic registry.
        log: finds a partition's log.
        appended: called with each log that has grown, to wake waiting fetches.
        learn: lets the core execute the next produces to a partition.
        transactions: finds open transactions; None: they are not checked.
    """

    def __init__(
        self,
        topics: Topics,
        log: Callable[[Topic, int], PartitionLog],
        appended: Callable[[PartitionLog], None],
        learn: Learn,
        transactions: ProduceTransactions | None = None,
    ) -> None:
        self._topics = topics
        self._log = log
        self._appended = appended
        self._learn = learn
        self._verify = transactions is not None and transactions.verify
        self._is_open = None if transactions is None else transactions.table.contains
        self._policies: dict[int, tuple[LogConfig, ValidationPolicy]] = {}

    def handle(
        self,
        request: ProduceRequest,
        version: int,
        progress: Progress,
        now_ms: int,
        check: Check | None = None,
        check_copy: CheckCopy | None = None,
        *,
        has_turn: bool = True,
    ) -> ProduceOutcome:
        """Append the batch of every partition of a request, if it is valid.

        A partition that is refused has an error in the response; the others are
        appended. If the request names a partition again, its last batch counts, and the
        partition has one answer, as in Kafka.

        Args:
            request: the request.
            version: its version.
            progress: what an earlier execution has done, as its slot in shared memory
                says.
            now_ms: wall clock.
            check: called with the name of each topic; None: every sender may write.
            check_copy: called for each batch that keeps its offsets; None: every
                sender may copy.
            has_turn: whether it may inflate batches to as much as one request may.

        Raises:
            HeavyRequestError: it must wait for its turn. The caller executes it again,
                as after a death: what was appended until now stays.
        """
        execution = _Execution(
            request, version, progress, now_ms, check, check_copy, has_turn=has_turn
        )
        outcome = execution.outcome
        ordinal = 0
        for data in request.topic_data:
            topic = self._topic(data, version)
            answers = []
            for partition in data.partition_data:
                if ordinal in execution.replaced:
                    ordinal += 1
                    continue
                log = None
                try:
                    self._judge(execution, data, topic, partition, ordinal)
                    assert topic is not None
                    log = self._log(topic, partition.index)
                    if topic.config.diskless_enable:
                        # The writer gives a repeated request the answer of the first.
                        answer = self._share(execution, log, topic, partition)
                    elif ordinal < len(execution.earlier):
                        answer = self._again(
                            execution, log, topic, partition.index, ordinal
                        )
                    else:
                        answer = self._append(execution, log, topic, partition, ordinal)
                except ApiError as error:
                    if ordinal < execution.capacity:
                        progress.note(ordinal, -1 - error.error_code)
                    outcome.failed = True
                    answer = _refusal(partition.index, error, log)
                answers.append(answer)
                pulse.step()
                ordinal += 1
            if answers or not data.partition_data:
                outcome.response.responses.append(_rows_of(data, answers))
        return outcome

    def refusal(
        self, request: ProduceRequest, code: ErrorCode, message: str
    ) -> ProduceOutcome:
        """Return an outcome with the same error for all partitions of a request."""
        outcome = ProduceOutcome()
        outcome.failed = True
        error = ApiError(code, message)
        for data in request.topic_data:
            answers = [
                _refusal(each.index, error, None) for each in data.partition_data
            ]
            outcome.response.responses.append(_rows_of(data, answers))
        return outcome

    def begins_elsewhere(
        self, request: ProduceRequest, version: int, check: Check | None = None
    ) -> bool:
        """Return whether a request must go to the coordinator before it is executed.

        That is so if it has records of a transaction that is not open in their
        partition. The coordinator then adds the partition to the transaction, or
        refuses to. Partitions that ``check`` refuses do not count.
        """
        if self._is_open is None:
            return False
        if not self._verify and version < _IMPLICIT_ADD_SINCE:
            # The client adds partitions by itself. If it has not done so, no marker
            # will end these records, and this setting accepts that.
            return False
        return any(
            any(self._must_begin(topic, each) for each in data.partition_data)
            for data in request.topic_data
            if (topic := self._topic(data, version)) is not None
            and not topic.config.diskless_enable
            and _passes(check, topic.name)
        )

    def _must_begin(self, topic: Topic, partition: PartitionProduceData) -> bool:
        """Return whether records are of a transaction not open in their partition.

        Return False if the partition does not exist or the records cannot be read.
        """
        assert self._is_open is not None
        if not 0 <= partition.index < len(topic.partitions):
            return False
        try:
            producer = producer_of(partition.records)
        except RecordBatchError:
            return False  # the append refuses it, with a reason
        row = topic.partitions[partition.index]
        return producer is not None and not self._is_open(*producer, row)

    def handle_single(
        self,
        request: SingleProduce,
        version: int,
        progress: Progress,
        now_ms: int,
        check: Check | None = None,
    ) -> SingleOutcome | None:
        """Append the batch of a request that has one batch, for one partition.

        Returns:
            The outcome. None if nothing was appended now: the request was refused,
            needs more checks, or was executed before. Then the caller calls ``handle``.

        Raises:
            HeavyRequestError: as ``handle`` without its turn.
        """
        topic = self._topics.topic(request.topic)
        if (
            topic is None
            or topic.is_internal
            or topic.config.mirror_source
            or topic.config.diskless_enable
            or not 0 <= request.partition < len(topic.partitions)
            or request.acks not in _VALID_ACKS
            or progress.earlier()
        ):
            return None
        try:
            if check is not None:
                check(topic.name)
            log = self._log(topic, request.partition)
            policy = self._policy(topic, version)
            budget = None
            if is_compressed(request.records):
                budget = InflationBudget(len(request.records), has_turn=False)
            batch = validate_produce(request.records, policy, now_ms, budget)
            if batch.header.is_transactional:
                return None  # the request names no transaction: `handle` refuses it
            result = log.append(batch, slot=progress.slot, now_ms=now_ms)
        except ApiError:
            return None
        if result.duplicate:
            progress.note(0, result.base_offset)
        else:
            self._appended(log)
            self._teach(topic, request.partition, log, policy)
        return SingleOutcome(request, result, log, topic.config.flush_acks_all)

    # -- one partition ---------------------------------------------------------------

    def _topic(self, data: TopicProduceData, version: int) -> Topic | None:
        if version >= _TOPIC_IDS_SINCE:
            return self._topics.topic_by_id(data.topic_id)
        return self._topics.topic(data.name)

    def _judge(
        self,
        execution: _Execution,
        data: TopicProduceData,
        topic: Topic | None,
        partition: PartitionProduceData,
        ordinal: int,
    ) -> None:
        """Check a partition of a Produce, as far as this needs none of its records.

        The authorizer comes before all checks of the topic, so that a sender without
        permission does not learn whether a topic exists.

        Args:
            execution: the execution of the request.
            data: the topic's part of the request.
            topic: the topic; None: there is no such topic.
            partition: the partition's part of the request.
            ordinal: the partition's place in the request.

        Raises:
            ApiError: the partition's error.
        """
        acks, check = execution.request.acks, execution.check
        index = partition.index
        if ordinal >= execution.capacity:
            raise ApiError(
                ErrorCode.INVALID_REQUEST,
                f"more than {execution.capacity} partitions in a request of this"
                " size: most of them have no records",
            )
        if acks not in _VALID_ACKS:
            raise ApiError(
                ErrorCode.INVALID_REQUIRED_ACKS,
                f"acks={acks}; Kafka knows -1 (all), 0 and 1",
            )
        if check is not None and (name := _name(topic, data, execution.version)):
            check(name)
        if topic is None:
            raise _unknown_topic(data, execution.version)
        if topic.is_internal:
            raise ApiError(
                ErrorCode.INVALID_TOPIC_EXCEPTION,
                f"Cannot append to internal topic {topic.name}",
            )
        is_copy = partition.source_offset != _NO_SOURCE
        if is_copy and execution.check_copy is not None:
            execution.check_copy()
        if is_copy != bool(topic.config.mirror_source):
            raise _not_mirrored(topic) if is_copy else _mirrored(topic)
        if not 0 <= index < len(topic.partitions):
            raise ApiError(
                ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
                f"{topic.name} has {len(topic.partitions)} partitions",
            )

    def _append(
        self,
        execution: _Execution,
        log: PartitionLog,
        topic: Topic,
        partition: PartitionProduceData,
        ordinal: int,
    ) -> PartitionProduceResponse:
        """Validate a partition's batch and append it.

        Raises:
            ApiError: the partition's error.
        """
        request, now_ms = execution.request, execution.now_ms
        records = partition.records
        if records is None:
            raise ApiError(ErrorCode.INVALID_RECORD, "no records")
        if partition.source_offset != _NO_SOURCE:
            return self._append_copies(execution, log, topic, partition, ordinal)
        policy = self._policy(topic, execution.version)
        batch = validate_produce(
            memoryview(records), policy, now_ms, execution.inflation
        )
        if batch.header.is_transactional and request.transactional_id is None:
            raise ApiError(
                ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
                "transactional records in a request without a transactional id",
            )
        # Under the row's lock the log stores an intent in the slot, commits, and stores
        # the progress word; so the repair after a death in between can tell whether
        # this request's append was committed. A duplicate appends nothing, so it is
        # noted by this method.
        result = log.append(
            batch,
            slot=execution.progress.slot,
            ordinal=ordinal,
            now_ms=now_ms,
            is_open=self._is_open if self._verify else None,
        )
        if result.duplicate:
            execution.progress.note(ordinal, result.base_offset)
        else:
            self._appended(log)
            self._teach(topic, partition.index, log, policy)
        return self._answer(execution, log, topic, partition.index, result)

    def _share(
        self,
        execution: _Execution,
        log: PartitionLog,
        topic: Topic,
        partition: PartitionProduceData,
    ) -> PartitionProduceResponse:
        """Validate a batch of a shared topic, and keep it for the topic's writer.

        A shared topic has its records in the object store; one process writes them
        there.

        Return the partition's answer, which still lacks the base offset.

        Raises:
            ApiError: the partition's error.
        """
        if partition.records is None:
            raise ApiError(ErrorCode.INVALID_RECORD, "no records")
        batch = validate_produce(
            memoryview(partition.records),
            self._policy(topic, execution.version),
            execution.now_ms,
            execution.inflation,
        )
        if batch.header.is_transactional:
            raise ApiError(
                ErrorCode.POLICY_VIOLATION,
                f"{topic.name} is shared by a cluster, and takes no records of"
                " transactions yet: produce to it without a transactional id",
            )
        answer = PartitionProduceResponse(
            index=partition.index,
            error_code=0,
            base_offset=-1,
            log_start_offset=log.row.log_start_offset,
        )
        row = topic.partitions[partition.index]
        append = SharedAppend(answer, topic.topic_id, partition.index, row, batch)
        if execution.outcome.shared is None:
            execution.outcome.shared = []
        execution.outcome.shared.append(append)
        return answer

    def _append_copies(
        self,
        execution: _Execution,
        log: PartitionLog,
        topic: Topic,
        partition: PartitionProduceData,
        ordinal: int,
    ) -> PartitionProduceResponse:
        """Append batches of another cluster, with the offsets that they have there.

        A batch that the log has already is skipped. So this method may be killed at any
        line and executed again, and needs no note in the request's slot (in shared
        memory) for each batch.

        Raises:
            ApiError: OFFSET_OUT_OF_RANGE if the log lacks records before these, or the
                partition's error. Batches before the refused one stay in the log.
        """
        # Imported here: few brokers are the target of a mirror.
        from mpbroker.protocol.records.copied_batch import copies_in

        assert partition.records is not None
        end = log.lookup.latest()
        if end < partition.source_offset:
            # The disk or the page cache has lost records that were answered.
            raise ApiError(
                ErrorCode.OFFSET_OUT_OF_RANGE,
                f"copies from offset {partition.source_offset} on, but"
                f" {topic.name}-{partition.index} ends at {end}",
            )
        first = -1
        for batch in copies_in(memoryview(partition.records)):
            if first < 0:
                first = batch.header.base_offset
            if batch.header.last_offset >= log.row.log_end_offset:
                log.append(batch, now_ms=execution.now_ms, keep_offset=True)
            pulse.step()
        log.raise_log_start(partition.source_log_start_offset)
        start = log.row.log_start_offset
        if first >= 0:
            execution.progress.note(ordinal, first)
        self._appended(log)
        last = log.row.log_end_offset - 1
        result = AppendResult(first, -1, start, False, last)
        return self._answer(execution, log, topic, partition.index, result)

    def _answer(
        self,
        execution: _Execution,
        log: PartitionLog,
        topic: Topic,
        index: int,
        result: AppendResult,
    ) -> PartitionProduceResponse:
        """Return the answer for a partition whose batch was appended.

        With acks=all, note in the outcome that the log must be on disk first, unless
        the topic has flush.acks.all=false.
        """
        answer = PartitionProduceResponse(
            index=index,
            error_code=0,
            base_offset=result.base_offset,
            log_append_time_ms=result.log_append_time_ms,
            log_start_offset=result.log_start_offset,
        )
        if execution.request.acks == _ACKS_ALL and topic.config.flush_acks_all:
            execution.outcome.wait_for(log, result.last_offset + 1, answer)
        return answer

    def _teach(
        self, topic: Topic, partition: int, log: PartitionLog, policy: ValidationPolicy
    ) -> None:
        """Let the C core, instead of Python, append the next batches to a partition.

        Do nothing if the topic has flush.acks.all=false.
        """
        # The core makes each acks=all wait for the disk.
        if topic.config.flush_acks_all:
            self._learn(topic, partition, log, policy)

    def _again(
        self,
        execution: _Execution,
        log: PartitionLog,
        topic: Topic,
        index: int,
        ordinal: int,
    ) -> PartitionProduceResponse:
        """Return the answer for a partition that a dead handler has already executed.

        Nothing is appended. The base offset or the error is in the slot, which is the
        request's entry in shared memory (`Progress`).

        Args:
            execution: the execution of the request.
            log: the partition's log.
            topic: the topic.
            index: the partition's index in the topic.
            ordinal: the partition's place in the request.

        Raises:
            ApiError: the error with which the batch was refused.
        """
        done = execution.earlier[ordinal]
        if done < 0:
            raise ApiError(ErrorCode(-1 - done), "refused before")
        # The dead handler may have been killed between its append and its notices.
        self._appended(log)
        answer = PartitionProduceResponse(
            index=index,
            error_code=0,
            base_offset=done,
            log_start_offset=log.row.log_start_offset,
        )
        if execution.request.acks == _ACKS_ALL and topic.config.flush_acks_all:
            # The progress word has the batch's first offset only, so wait for the end.
            execution.outcome.wait_for(log, log.row.log_end_offset, answer)
        return answer

    def _policy(self, topic: Topic, version: int) -> ValidationPolicy:
        """Return the rules by which a topic's batches are validated.

        They are kept until the topic's config changes.
        """
        key = topic.partitions[0] << 4 | version
        known = self._policies.get(key)
        if known is not None and known[0] is topic.config:
            return known[1]
        policy = validation_policy(topic.config, version)
        if len(self._policies) > 10_000:
            self._policies.clear()
        self._policies[key] = (topic.config, policy)
        return policy


def encode_single_refusal(
    request: SingleProduce, version: int, error: ApiError
) -> bytes:
    """Encode the answer to a refused Produce that has one partition."""
    answer = _refusal(request.partition, error)
    topic = TopicProduceResponse(name=request.topic, partition_responses=[answer])
    return ProduceResponse(responses=[topic]).encode(version)


def _name(topic: Topic | None, data: TopicProduceData, version: int) -> str:
    """Return a topic's name, also if only the request has it.

    Args:
        topic: the topic; None: there is no such topic. Then the name is that of the
            request, or "" if the request names topics by id.
        data: the topic's part of the request.
        version: the request's version.
    """
    if topic is not None:
        return topic.name
    return "" if version >= _TOPIC_IDS_SINCE else data.name


def _passes(check: Check | None, name: str) -> bool:
    """Return whether a sender may write to a topic: ``check`` raises no ApiError."""
    try:
        if check is not None:
            check(name)
    except ApiError:
        return False
    return True


def _mirrored(topic: Topic) -> ApiError:
    return ApiError(
        ErrorCode.POLICY_VIOLATION,
        f"{topic.name} is being mirrored from {topic.config.mirror_source}: it takes"
        " records of producers when the mirror is complete, or when its setting"
        " mirror.source is removed",
    )


def _not_mirrored(topic: Topic) -> ApiError:
    return ApiError(
        ErrorCode.POLICY_VIOLATION,
        f"{topic.name} has no mirror.source: its records get offsets here",
    )


def _unknown_topic(data: TopicProduceData, version: int) -> ApiError:
    if version >= _TOPIC_IDS_SINCE:
        return ApiError(
            ErrorCode.UNKNOWN_TOPIC_ID, f"no topic has the id {data.topic_id.hex()}"
        )
    return ApiError(
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic {data.name}"
    )


def refuse(
    answer: PartitionProduceResponse, error_code: ErrorCode, message: str
) -> None:
    """Change a partition's answer, which names an offset, into an error."""
    answer.error_code = error_code
    answer.error_message = message
    answer.base_offset = answer.log_append_time_ms = answer.log_start_offset = -1


def _rows_of(
    data: TopicProduceData, rows: list[PartitionProduceResponse]
) -> TopicProduceResponse:
    """Return a topic's part of an answer, with the rows of its partitions."""
    return TopicProduceResponse(
        name=data.name, topic_id=data.topic_id, partition_responses=rows
    )


def _refusal(
    index: int, error: ApiError, log: PartitionLog | None = None
) -> PartitionProduceResponse:
    """Return the answer for a partition that is refused.

    Args:
        index: the partition's index in the topic.
        error: the reason.
        log: the partition's log; None: it was not looked at.
    """
    answer = PartitionProduceResponse(
        index=index,
        error_code=error.error_code,
        base_offset=-1,
        error_message=str(error),
    )
    if isinstance(error, RecordsError):
        answer.record_errors = [
            BatchIndexAndErrorMessage(
                batch_index=record, batch_index_error_message=reason
            )
            for record, reason in error.reasons.items()
        ]
    if log is not None and error.error_code in _WITH_LOG_START:
        answer.log_start_offset = log.row.log_start_offset
    return answer


def validation_policy(config: LogConfig, version: int) -> ValidationPolicy:
    """Return the rules for validating a topic's batches in a version of Produce."""
    codec = config.compression_type
    return ValidationPolicy(
        max_message_bytes=config.max_message_bytes,
        timestamp_type=config.message_timestamp_type,
        before_max_ms=config.message_timestamp_before_max_ms,
        after_max_ms=config.message_timestamp_after_max_ms,
        compression_type=codec,
        compression_level=getattr(config, f"compression_{codec}_level", None),
        compacted="compact" in config.cleanup_policy,
        allow_zstd=version >= _ZSTD_SINCE,
    )
