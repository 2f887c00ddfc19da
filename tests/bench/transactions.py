"""Transactions of one producer: ten records over three partitions, a commit each.

Twice: as clients of the first transaction version do it, who ask for each partition to
be added, and as those of the second, who just write.

Beside it stands what this machine allows just then: how often a second the same client
can make its requests and be answered something empty as many times, with the syncs that
a transaction takes made in a row, in files where the broker's logs are.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any, Final

from mpbroker.protocol.message import Message
from mpbroker.protocol.messages.add_partitions_to_txn import (
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    AddPartitionsToTxnTopic,
)
from mpbroker.protocol.messages.end_txn import EndTxnRequest, EndTxnResponse
from mpbroker.protocol.messages.init_producer_id import (
    InitProducerIdRequest,
    InitProducerIdResponse,
)
from mpbroker.protocol.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)
from mpbroker.protocol.records.record_batch import RecordBatchBuilder
from tests.bench import wire
from tests.bench.brokers import scratch_directory
from tests.bench.cases import Case, Context

ADD_PARTITIONS: Final = (24, 3)
RECORDS: Final = (4, 3, 3)  # by partition
_RETRIABLE: Final = (14, 15, 16, 51)  # 51: CONCURRENT_TRANSACTIONS
_HEAD: Final = 5  # correlation id and tagged fields, before an answer's body
# What has to be on disk in this order: the records, the decision. So one a partition,
# and after that the one of __transaction_state.
_FILES: Final = 1 + len(RECORDS)
_MARKER_BYTES: Final = 78
_BOUND_S: Final = 0.5


class RawProducer:
    """A transactional producer made of bytes, on one connection.

    Args:
        version: the client's transaction version, 1 or 2.
    """

    def __init__(
        self, connection: wire.Connection, topic: str, name: str, version: int
    ) -> None:
        self._connection = connection
        self._topic = topic
        self._name = name
        self._implicit = version >= 2
        self._produce = (0, 12 if self._implicit else 11)
        self._end = (26, 5 if self._implicit else 3)
        self._sequences = [0] * len(RECORDS)
        self.retries = 0
        request = InitProducerIdRequest(
            transactional_id=name, transaction_timeout_ms=60_000
        )
        answer = self._until_done((22, 4), request, InitProducerIdResponse)
        self._producer_id = answer.producer_id
        self._epoch = answer.producer_epoch

    def _ask(
        self, api: tuple[int, int], request: Message, response: type[Message]
    ) -> Any:
        payload = self._connection.ask(wire.request(api, request.encode(api[1])))
        return response.decode(api[1], payload[_HEAD:])

    def _until_done(
        self, api: tuple[int, int], request: Message, response: type[Message]
    ) -> Any:
        while True:
            answer = self._ask(api, request, response)
            if not answer.error_code:
                return answer
            if answer.error_code not in _RETRIABLE:
                raise wire.AnswerError(f"error {answer.error_code} from API {api[0]}")
            self.retries += 1
            time.sleep(0.001)

    def transact(self) -> None:
        """Write a transaction and commit it."""
        if not self._implicit:
            self._add_partitions()
        answer = self._ask(self._produce, self._records(), ProduceResponse)
        for topic in answer.responses:
            for row in topic.partition_responses:
                if row.error_code:
                    raise wire.AnswerError(f"error {row.error_code} from Produce")
        ended = self._until_done(self._end, self._commit(), EndTxnResponse)
        if self._implicit:
            self._producer_id, self._epoch = ended.producer_id, ended.producer_epoch
            self._sequences = [0] * len(RECORDS)

    def ask_nothing(self) -> None:
        """Make a transaction's requests, and ask something empty in place of each."""
        made = [(self._produce, self._records()), (self._end, self._commit())]
        if not self._implicit:
            made.append((ADD_PARTITIONS, self._addition()))
        for api, request in made:
            wire.request(api, request.encode(api[1]))
            self._connection.ask(wire.api_versions())

    def _commit(self) -> EndTxnRequest:
        return EndTxnRequest(
            transactional_id=self._name,
            producer_id=self._producer_id,
            producer_epoch=self._epoch,
            committed=True,
        )

    def _addition(self) -> AddPartitionsToTxnRequest:
        return AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=self._name,
            v3_and_below_producer_id=self._producer_id,
            v3_and_below_producer_epoch=self._epoch,
            v3_and_below_topics=[
                AddPartitionsToTxnTopic(
                    name=self._topic, partitions=list(range(len(RECORDS)))
                )
            ],
        )

    def _add_partitions(self) -> None:
        request = self._addition()
        while True:
            answer = self._ask(ADD_PARTITIONS, request, AddPartitionsToTxnResponse)
            (topic,) = answer.results_by_topic_v3_and_below
            codes = {row.partition_error_code for row in topic.results_by_partition}
            if codes == {0}:
                return
            if not codes <= set(_RETRIABLE):
                raise wire.AnswerError(f"errors {codes} from AddPartitionsToTxn")
            self.retries += 1
            time.sleep(0.001)

    def _records(self) -> ProduceRequest:
        partitions = []
        now_ms = int(time.time() * 1000)
        for partition, count in enumerate(RECORDS):
            builder = RecordBatchBuilder(
                producer_id=self._producer_id,
                producer_epoch=self._epoch,
                base_sequence=self._sequences[partition],
                transactional=True,
            )
            for _ in range(count):
                builder.append(now_ms, None, b"x" * 100)
            self._sequences[partition] += count
            partitions.append(
                PartitionProduceData(index=partition, records=builder.build())
            )
        return ProduceRequest(
            transactional_id=self._name,
            acks=-1,
            timeout_ms=30_000,
            topic_data=[TopicProduceData(name=self._topic, partition_data=partitions)],
        )


def _bound(producer: RawProducer) -> float:
    """Return how many transactions a second there could be if they were no work.

    By the median: on a disk that others use too, a few syncs take all the time.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    with scratch_directory() as directory, contextlib.ExitStack() as stack:
        files = []
        for number in range(_FILES):
            files.append(os.open(Path(directory, str(number)), flags))
            stack.callback(os.close, files[-1])
        times = []
        end = time.monotonic() + _BOUND_S
        while not times or time.monotonic() < end:
            started = time.monotonic()
            producer.ask_nothing()
            for fd in files:
                os.write(fd, bytes(_MARKER_BYTES))
                os.fdatasync(fd)
            times.append(time.monotonic() - started)
        times.sort()
        return 1 / times[len(times) // 2]


def _commit_case(version: int) -> Case:
    def run(context: Context) -> dict[str, float]:
        broker = context.broker
        topic = broker.topic(f"bench-transactions-{version}", len(RECORDS))
        # Another one in each round: the epochs of an id are few.
        name = f"{topic}-producer-{broker.next_number()}"
        with broker.connect() as connection:
            producer = RawProducer(connection, topic, name, version)
            producer.transact()  # the first one makes files
            producer.retries = 0
            times = []
            cpu_s = broker.tree.cpu_seconds()
            end = time.monotonic() + context.seconds
            started = time.monotonic()
            while started < end:
                producer.transact()
                now = time.monotonic()
                times.append(now - started)
                started = now
            cpu_s = broker.tree.cpu_seconds() - cpu_s
            bound = _bound(producer)
        times.sort()
        return {
            "per_s": len(times) / sum(times),
            "bound_per_s": bound,
            "cpu_us": cpu_s / len(times) * 1e6,
            "retries": producer.retries / len(times),
            "p50_ms": times[len(times) // 2] * 1e3,
            "p99_ms": times[len(times) * 99 // 100] * 1e3,
        }

    return Case(f"transactions/commit/v{version}", run)


CASES: Final = [_commit_case(1), _commit_case(2)]
