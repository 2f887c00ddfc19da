"""Produce: validate each partition's batch, append it, answer when acks says so.

    acks=0   nothing is answered; an error closes the connection, so that it is noticed
    acks=1   answered once the batch is in the log: the page cache
    acks=all answered once the batch is on disk

A request may be executed a second time, when the handler that had it died. What the
first execution appended is in the request's progress words, and is answered, not
appended again.

Source: Kafka protocol guide, "Produce"; KafkaApis.handleProduceRequest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.produce import (
    PartitionProduceData,
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
    TopicProduceResponse,
)
from mpbroker.protocol.records.batch_header import RecordBatchError
from mpbroker.protocol.records.log_validator import ValidationPolicy, validate_produce
from mpbroker.protocol.transactional_produce import producer_of

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


class Progress(Protocol):
    """What earlier executions of this request have done, and a place to note more."""

    slot: int

    def earlier(self) -> Sequence[int]:
        """A word a partition done: its base offset, or -1 - error code."""

    def capacity(self) -> int:
        """How many partitions can be noted."""

    def note(self, ordinal: int, word: int) -> None:
        """Note a partition that needed no append."""


class Topics(Protocol):
    """Where partitions are found."""

    def topic(self, name: str) -> Topic | None: ...

    def topic_by_id(self, topic_id: bytes) -> Topic | None: ...


class Learn(Protocol):
    """Let the core execute the next plain produces: see ``CoreCache.learn_produce``."""

    def __call__(
        self, topic: Topic, partition: int, log: PartitionLog, policy: ValidationPolicy
    ) -> None: ...


# Raises ApiError if the sender may not write to the topic of a name.
Check = Callable[[str], None]


class ProduceOutcome:
    """A request's answer so far, and the logs that must be on disk before it goes."""

    __slots__ = ("answers", "failed", "needed", "response")

    def __init__(self) -> None:
        self.response = ProduceResponse()
        self.needed: dict[int, tuple[PartitionLog, int]] = {}  # row -> log, offset
        self.answers: dict[int, PartitionProduceResponse] = {}  # row -> its answer
        self.failed = False

    def errors(self) -> set[int]:
        """The codes of the partitions that failed, each once."""
        codes = {
            partition.error_code
            for topic in self.response.responses
            for partition in topic.partition_responses
        }
        return codes - {ErrorCode.NONE}

    def fail(self, row: int, error_code: ErrorCode, message: str) -> None:
        """A partition that was appended could not be made durable."""
        refuse(self.answers[row], error_code, message)

    def wait_for(
        self, log: PartitionLog, offset: int, answer: PartitionProduceResponse
    ) -> None:
        """Hold the answer back until all below ``offset`` is on disk."""
        row = log.row.index
        self.needed[row] = (log, offset)
        self.answers[row] = answer


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
        self._is_open = None if transactions is None else transactions.table.contains
        self._verify = transactions is not None and transactions.verify
        self._log = log
        self._appended = appended
        self._learn = learn
        self._policies: dict[int, tuple[LogConfig, ValidationPolicy]] = {}

    def handle(
        self,
        request: ProduceRequest,
        version: int,
        progress: Progress,
        now_ms: int,
        check: Check | None = None,
    ) -> ProduceOutcome:
        """Append every partition's batch; each has its own outcome.

        Args:
            check: asked for each topic, if anybody is to be asked.
        """
        outcome = ProduceOutcome()
        earlier = progress.earlier()
        capacity = progress.capacity()
        ordinal = 0
        for data in request.topic_data:
            topic = (
                self._topics.topic_by_id(data.topic_id)
                if version >= _TOPIC_IDS_SINCE
                else self._topics.topic(data.name)
            )
            answers = []
            for partition in data.partition_data:
                try:
                    if ordinal >= capacity:
                        raise ApiError(
                            ErrorCode.INVALID_REQUEST,
                            f"more than {capacity} partitions in a request of this"
                            " size: most of them have no records",
                        )
                    if request.acks not in _VALID_ACKS:
                        raise ApiError(
                            ErrorCode.INVALID_REQUIRED_ACKS,
                            f"acks={request.acks}; Kafka knows -1 (all), 0 and 1",
                        )
                    if check is not None and (name := _name(topic, data, version)):
                        check(name)
                    if topic is None:
                        raise _unknown_topic(data, version)
                    if topic.is_internal:
                        raise ApiError(
                            ErrorCode.INVALID_TOPIC_EXCEPTION,
                            f"Cannot append to internal topic {topic.name}",
                        )
                    if not 0 <= partition.index < len(topic.partitions):
                        raise ApiError(
                            ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
                            f"{topic.name} has {len(topic.partitions)} partitions",
                        )
                    done = earlier[ordinal] if ordinal < len(earlier) else None
                    log = self._log(topic, partition.index)
                    answers.append(
                        self._again(log, partition, done, request, outcome)
                        if done is not None
                        else self._append(
                            log,
                            topic,
                            partition,
                            ordinal,
                            request,
                            version,
                            progress,
                            now_ms,
                            outcome,
                        )
                    )
                except ApiError as error:
                    if ordinal < capacity:
                        progress.note(ordinal, -1 - error.error_code)
                    outcome.failed = True
                    answers.append(_refusal(partition.index, error))
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
        """Whether the coordinator has to be asked before this can be appended.

        It has if a producer's transaction is not open in a partition: it adds that, or
        knows better; not of what ``check`` will refuse.
        """
        if self._is_open is None:
            return False
        if not self._verify and version < _IMPLICIT_ADD_SINCE:
            return False  # and if nobody has added them, nobody ends what is written
        for data in request.topic_data:
            topic = (
                self._topics.topic_by_id(data.topic_id)
                if version >= _TOPIC_IDS_SINCE
                else self._topics.topic(data.name)
            )
            if topic is None or not _passes(check, topic.name):
                continue
            for partition in data.partition_data:
                if not 0 <= partition.index < len(topic.partitions):
                    continue
                try:
                    producer = producer_of(partition.records)
                except RecordBatchError:
                    continue  # said when it is to be appended
                if producer is not None and not self._is_open(
                    *producer, topic.partitions[partition.index]
                ):
                    return True
        return False

    def _append(
        self,
        log: PartitionLog,
        topic: Topic,
        partition: PartitionProduceData,
        ordinal: int,
        request: ProduceRequest,
        version: int,
        progress: Progress,
        now_ms: int,
        outcome: ProduceOutcome,
    ) -> PartitionProduceResponse:
        records = partition.records
        if records is None:
            raise ApiError(ErrorCode.INVALID_RECORD, "no records")
        policy = self._policy(topic, version)
        batch = validate_produce(memoryview(records), policy, now_ms)
        if batch.header.is_transactional and request.transactional_id is None:
            raise ApiError(
                ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
                "transactional records in a request without a transactional id",
            )
        result = log.append(
            batch,
            slot=progress.slot,
            ordinal=ordinal,
            now_ms=now_ms,
            is_open=self._is_open if self._verify else None,
        )
        if result.duplicate:
            progress.note(ordinal, result.base_offset)
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
            outcome.wait_for(log, result.last_offset + 1, answer)
        return answer

    def _again(
        self,
        log: PartitionLog,
        partition: PartitionProduceData,
        done: int,
        request: ProduceRequest,
        outcome: ProduceOutcome,
    ) -> PartitionProduceResponse:
        """Answer what an earlier execution of this request did."""
        if done < 0:
            raise ApiError(ErrorCode(-1 - done), "refused before")
        self._appended(log)  # the dead may not have told anybody
        answer = PartitionProduceResponse(
            index=partition.index,
            error_code=0,
            base_offset=done,
            log_start_offset=log.row.log_start_offset,
        )
        if request.acks == _ACKS_ALL:
            outcome.wait_for(log, log.row.log_end_offset, answer)
        return answer

    def _policy(self, topic: Topic, version: int) -> ValidationPolicy:
        key = topic.partitions[0] << 4 | version
        known = self._policies.get(key)
        if known is not None and known[0] is topic.config:
            return known[1]
        policy = validation_policy(topic.config, version)
        if len(self._policies) > 10_000:
            self._policies.clear()
        self._policies[key] = (topic.config, policy)
        return policy


def _name(topic: Topic | None, data: TopicProduceData, version: int) -> str:
    """What a topic is called, whether it is there or not; "": only an id is known."""
    if topic is not None:
        return topic.name
    return "" if version >= _TOPIC_IDS_SINCE else data.name


def _passes(check: Check | None, name: str) -> bool:
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
    """Make the answer for a partition that was appended one for one that failed."""
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
    """What a topic accepts from a Produce request of a version."""
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
