"""Judge each partition's batch of a Produce, append it, and say what acks asks for.

    acks=0   there is no answer; an error closes the connection, so the client notices
    acks=1   answered when the batch is in the log, that is, in the page cache
    acks=all answered when the batch is on disk

A request is executed a second time if its handler dies. The request's progress words
say what the first execution appended: that is answered, and is not appended again. The
core executes the same for plain batches (native/storage/append.c).

Source: Kafka protocol guide, "Produce"; KafkaApis.handleProduceRequest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.fast_produce import SingleProduce, encode_single_answer
from mpbroker.protocol.messages.produce import (
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
    ValidationPolicy,
    validate_produce,
)
from mpbroker.protocol.transactional_produce import producer_of

if TYPE_CHECKING:
    from mpbroker.metadata.log_config import LogConfig
    from mpbroker.metadata.topics import Topic
    from mpbroker.server.produce_transactions import ProduceTransactions
    from mpbroker.storage.log.partition_log import AppendResult, PartitionLog

_ACKS_ALL: Final = -1
_VALID_ACKS: Final = (-1, 0, 1)
_ZSTD_SINCE: Final = 7
_IMPLICIT_ADD_SINCE: Final = 12
_TOPIC_IDS_SINCE: Final = 13


class Progress(Protocol):
    """What earlier executions of a request have done, and a place to note more."""

    slot: int

    def earlier(self) -> Sequence[int]:
        """Return a word a partition done: its base offset, or -1 - error code."""

    def capacity(self) -> int:
        """Return for how many partitions there are words."""

    def note(self, ordinal: int, word: int) -> None:
        """Note the result of a partition to which nothing was appended."""


class Topics(Protocol):
    """Where partitions are found."""

    def topic(self, name: str) -> Topic | None: ...

    def topic_by_id(self, topic_id: bytes) -> Topic | None: ...


class Learn(Protocol):
    """Let the core execute the next plain produces: see ``CoreCache.learn_produce``."""

    def __call__(
        self, topic: Topic, partition: int, log: PartitionLog, policy: ValidationPolicy
    ) -> None: ...


# Raises ApiError if the sender may not write to the topic of this name.
Check = Callable[[str], None]


class ProduceOutcome:
    """A request's response so far, and the logs that must be on disk before it goes."""

    __slots__ = ("answers", "failed", "needed", "response")

    def __init__(self) -> None:
        self.response = ProduceResponse()
        self.needed: dict[int, tuple[PartitionLog, int]] = {}  # row -> log, offset
        self.answers: dict[int, PartitionProduceResponse] = {}  # row -> its answer
        self.failed = False

    def encode(self, version: int) -> bytes:
        return self.response.encode(version)

    def errors(self) -> set[int]:
        """Return the codes of the partitions that failed, each once."""
        codes = {
            partition.error_code
            for topic in self.response.responses
            for partition in topic.partition_responses
        }
        return codes - {ErrorCode.NONE}

    def fail(self, row: int, error_code: ErrorCode, message: str) -> None:
        """Refuse a partition that was appended and could not be made durable."""
        refuse(self.answers[row], error_code, message)

    def wait_for(
        self, log: PartitionLog, offset: int, answer: PartitionProduceResponse
    ) -> None:
        """Hold the response back until all below ``offset`` is on disk."""
        row = log.row.index
        self.needed[row] = (log, offset)
        self.answers[row] = answer


class SingleOutcome:
    """The same for the commonest request: one partition, whose append succeeded."""

    __slots__ = ("_error", "_request", "_result", "needed")

    def __init__(
        self, request: SingleProduce, result: AppendResult, log: PartitionLog
    ) -> None:
        self._request = request
        self._result = result
        self._error: ApiError | None = None
        self.needed: dict[int, tuple[PartitionLog, int]] = {}
        if request.acks == _ACKS_ALL:
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
        """The partition could not be made durable."""
        self._error = ApiError(error_code, message)


class _Execution:
    """One execution of a request: what it was given, and its outcome so far."""

    __slots__ = (
        "capacity",
        "check",
        "earlier",
        "inflation",
        "now_ms",
        "outcome",
        "progress",
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
    ) -> None:
        self.request = request
        self.version = version
        self.progress = progress
        self.now_ms = now_ms
        self.check = check
        self.earlier = progress.earlier()
        self.capacity = progress.capacity()
        self.outcome = ProduceOutcome()
        self.inflation = InflationBudget(
            sum(
                len(partition.records)
                for topic in request.topic_data
                for partition in topic.partition_data
                if partition.records is not None
            )
        )


class ProduceHandler:
    """Appends what clients produce, for one handler process.

    Args:
        topics: the registry.
        log: finds a partition's log.
        appended: told of every log that has grown, to wake waiting fetches.
        learn: told of what a plain produce was judged by and appended to.
        transactions: None: no transaction is ever open, nor asked for.
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
    ) -> ProduceOutcome:
        """Append every partition's batch; each has its own result.

        Args:
            check: called with the name of each topic; None: every sender may write.
        """
        execution = _Execution(request, version, progress, now_ms, check)
        outcome = execution.outcome
        ordinal = 0
        for data in request.topic_data:
            topic = self._topic(data, version)
            answers = []
            for partition in data.partition_data:
                try:
                    self._judge(execution, data, topic, partition.index, ordinal)
                    assert topic is not None
                    log = self._log(topic, partition.index)
                    if ordinal < len(execution.earlier):
                        answer = self._again(execution, log, partition.index, ordinal)
                    else:
                        answer = self._append(execution, log, topic, partition, ordinal)
                except ApiError as error:
                    if ordinal < execution.capacity:
                        progress.note(ordinal, -1 - error.error_code)
                    outcome.failed = True
                    answer = _refusal(partition.index, error)
                answers.append(answer)
                ordinal += 1
            outcome.response.responses.append(
                TopicProduceResponse(
                    name=data.name,
                    topic_id=data.topic_id,
                    partition_responses=answers,
                )
            )
        return outcome

    def begins_elsewhere(
        self, request: ProduceRequest, version: int, check: Check | None = None
    ) -> bool:
        """Return whether the coordinator must open transactions before the appends.

        It must if a producer's transaction is not open in a partition: it adds the
        partition, or refuses. Partitions that ``check`` refuses do not count.
        """
        if self._is_open is None:
            return False
        if not self._verify and version < _IMPLICIT_ADD_SINCE:
            # The client adds partitions by itself. If it has not, no marker will end
            # these records, and this setting accepts that.
            return False
        return any(
            any(self._must_begin(topic, each) for each in data.partition_data)
            for data in request.topic_data
            if (topic := self._topic(data, version)) is not None
            and _passes(check, topic.name)
        )

    def _must_begin(self, topic: Topic, partition: PartitionProduceData) -> bool:
        """Return whether records are of a transaction that is not open here."""
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
        """Append the one batch of a request; None: ``handle`` must see to it.

        None means that nothing was appended, or that it was by an earlier execution:
        all that is not a plain success is the other method's business.
        """
        topic = self._topics.topic(request.topic)
        if (
            topic is None
            or topic.is_internal
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
            batch = validate_produce(request.records, policy, now_ms)
            if batch.header.is_transactional:
                return None  # of nobody's transaction: this request names none
            result = log.append(batch, slot=progress.slot, now_ms=now_ms)
        except ApiError:
            return None
        if result.duplicate:
            progress.note(0, result.base_offset)
        else:
            self._appended(log)
            self._learn(topic, request.partition, log, policy)
        return SingleOutcome(request, result, log)

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
        index: int,
        ordinal: int,
    ) -> None:
        """Refuse what needs no look at the records.

        The order matters: the authorizer comes before all that tells whether a topic
        exists.

        Raises:
            ApiError: the partition's error.
        """
        acks, check = execution.request.acks, execution.check
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
        # this request's append was committed. Only what appends nothing is noted here.
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
            self._learn(topic, partition.index, log, policy)
        answer = PartitionProduceResponse(
            index=partition.index,
            error_code=0,
            base_offset=result.base_offset,
            log_append_time_ms=result.log_append_time_ms,
            log_start_offset=result.log_start_offset,
        )
        if request.acks == _ACKS_ALL:
            execution.outcome.wait_for(log, result.last_offset + 1, answer)
        return answer

    def _again(
        self, execution: _Execution, log: PartitionLog, index: int, ordinal: int
    ) -> PartitionProduceResponse:
        """Answer what an earlier execution of this request did.

        Raises:
            ApiError: the error that it was refused with.
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
        if execution.request.acks == _ACKS_ALL:
            # The progress word has the batch's first offset only, so wait for the end.
            execution.outcome.wait_for(log, log.row.log_end_offset, answer)
        return answer

    def _policy(self, topic: Topic, version: int) -> ValidationPolicy:
        """Return what a topic accepts now; kept until its config changes."""
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
    """Encode the answer to a request for one partition that was refused."""
    answer = _refusal(request.partition, error)
    topic = TopicProduceResponse(name=request.topic, partition_responses=[answer])
    return ProduceResponse(responses=[topic]).encode(version)


def _name(topic: Topic | None, data: TopicProduceData, version: int) -> str:
    """Return a topic's name, whether it exists or not; "" if only an id is known."""
    if topic is not None:
        return topic.name
    return "" if version >= _TOPIC_IDS_SINCE else data.name


def _passes(check: Check | None, name: str) -> bool:
    """Return whether the sender may write to a topic."""
    try:
        if check is not None:
            check(name)
    except ApiError:
        return False
    return True


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
    """Turn the answer for an appended partition into that of a failed one."""
    answer.error_code = error_code
    answer.error_message = message
    answer.base_offset = answer.log_append_time_ms = answer.log_start_offset = -1


def _refusal(index: int, error: ApiError) -> PartitionProduceResponse:
    return PartitionProduceResponse(
        index=index,
        error_code=error.error_code,
        base_offset=-1,
        error_message=str(error),
    )


def validation_policy(config: LogConfig, version: int) -> ValidationPolicy:
    """Return what a topic accepts from a Produce request of a version."""
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
