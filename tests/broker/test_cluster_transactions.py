"""Offsets in transactions of a cluster, whose groups and transactions are on any node.

The first node that is asked coordinates transactions, and has the topic of their
records. Offsets are of a shared topic; each node coordinates some groups.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import psutil
import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.messages.add_offsets_to_txn import (
    AddOffsetsToTxnRequest,
    AddOffsetsToTxnResponse,
)
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
from mpbroker.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetCommitResponse,
)
from mpbroker.protocol.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestTopic,
    OffsetFetchResponse,
)
from mpbroker.protocol.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
    TxnOffsetCommitResponse,
)
from tests.broker.load import ask, dial
from tests.broker.test_cluster_groups import (  # noqa: F401 - a fixture
    PARTITIONS,
    PATIENCE_S,
    TOPIC,
    bootstrap,
    coordinator,
    coordinator_id,
    nodes,
    processes,
    produce,
)
from tests.broker.test_shared_topics import (  # noqa: F401 - a fixture
    create,
    knows,
    settings,
)
from tests.cluster.conftest import (  # noqa: F401 - fixtures
    cluster_template,
    empty_url,
    execute,
    own_server,
    shared_server,
)
from tests.compat.adapters.line_client import LineClient
from tests.compat.test_transactions import needs_java_client
from tests.support.apache_kafka import java_command
from tests.support.broker import Broker
from tests.support.children import wait_until

E = ErrorCode
TARGET = "target"
# Both are tried again: the group is being loaded, or its node has just died.
TRANSIENT = (
    E.CONCURRENT_TRANSACTIONS,
    E.COORDINATOR_LOAD_IN_PROGRESS,
    E.COORDINATOR_NOT_AVAILABLE,
    E.NOT_COORDINATOR,
)


def transaction_coordinator(brokers: Sequence[Broker]) -> Broker:
    """Return the node that coordinates transactions; the first becomes it."""

    def asked() -> int:
        with dial(brokers[0]) as sock:
            request = FindCoordinatorRequest(key="x", key_type=1).encode(2)
            answer = ask(sock, ApiKey.FIND_COORDINATOR, 2, request)
        found = FindCoordinatorResponse.decode(2, answer)
        return found.node_id if found.error_code == E.NONE else 0

    return brokers[wait_until(asked) - 1]


def group_of(brokers: Sequence[Broker], home: Broker, *, here: bool) -> str:
    """Return a group that a node coordinates, or that another one does."""
    names = (f"team-{number}" for number in range(100))
    return next(each for each in names if (coordinator(brokers, each) is home) == here)


class Transactor:
    """A producer of transactions that commits offsets, request by request."""

    def __init__(
        self, brokers: Sequence[Broker], group_id: str, version: int = 3
    ) -> None:
        self.brokers = brokers
        self.home = transaction_coordinator(brokers)
        self.group_id = group_id
        self.version = version
        self.producer = (-1, -1)

    def _ask(
        self, broker: Broker, api_key: ApiKey, version: int, request: Any, kind: Any
    ) -> Any:
        with dial(broker) as sock:
            answer = ask(sock, api_key, version, request.encode(version))
        return kind.decode(version, answer)

    def begin(self) -> None:
        """Begin as a new producer: what another one has begun is aborted."""

        def done() -> bool:
            answer = self._ask(
                self.home,
                ApiKey.INIT_PRODUCER_ID,
                4,
                InitProducerIdRequest(
                    transactional_id="x", transaction_timeout_ms=60_000
                ),
                InitProducerIdResponse,
            )
            self.producer = answer.producer_id, answer.producer_epoch
            assert answer.error_code in (E.NONE, *TRANSIENT), answer
            return answer.error_code == E.NONE

        wait_until(done)

    def add(self) -> int:
        answer = self._ask(
            self.home,
            ApiKey.ADD_OFFSETS_TO_TXN,
            3,
            AddOffsetsToTxnRequest(
                transactional_id="x",
                producer_id=self.producer[0],
                producer_epoch=self.producer[1],
                group_id=self.group_id,
            ),
            AddOffsetsToTxnResponse,
        )
        return int(answer.error_code)

    def commit_once(self, offset: int, **fields: Any) -> int:
        request = TxnOffsetCommitRequest(
            transactional_id="x",
            group_id=self.group_id,
            producer_id=self.producer[0],
            producer_epoch=self.producer[1],
            topics=[
                TxnOffsetCommitRequestTopic(
                    name=TOPIC,
                    partitions=[
                        TxnOffsetCommitRequestPartition(
                            partition_index=0, committed_offset=offset
                        )
                    ],
                )
            ],
        )
        for name, value in fields.items():
            setattr(request, name, value)
        live = [each for each in self.brokers if each.is_running]
        with contextlib.suppress(OSError):
            answer = self._ask(
                coordinator_of(live, self.brokers, request.group_id),
                ApiKey.TXN_OFFSET_COMMIT,
                self.version,
                request,
                TxnOffsetCommitResponse,
            )
            return int(answer.topics[0].partitions[0].error_code)
        return int(E.COORDINATOR_NOT_AVAILABLE)

    def commit(self, offset: int, **fields: Any) -> int:
        """Send TxnOffsetCommit until it is served; return its error code."""
        return settled(lambda: self.commit_once(offset, **fields))

    def write(self, offset: int) -> None:
        """Have an offset pending, in the way of the version."""
        if self.version < 5:
            assert settled(self.add) == E.NONE
        assert self.commit(offset) == E.NONE

    def end(self, *, commit: bool) -> int:
        version = 5 if self.version >= 5 else 3

        def ended() -> int:
            answer = self._ask(
                self.home,
                ApiKey.END_TXN,
                version,
                EndTxnRequest(
                    transactional_id="x",
                    producer_id=self.producer[0],
                    producer_epoch=self.producer[1],
                    committed=commit,
                ),
                EndTxnResponse,
            )
            if version >= 5 and answer.error_code == E.NONE:
                self.producer = answer.producer_id, answer.producer_epoch
            return int(answer.error_code)

        return settled(ended)

    def state(self) -> str:
        """Return the state of the transaction, as the coordinator tells it."""
        answer = self._ask(
            self.home,
            ApiKey.DESCRIBE_TRANSACTIONS,
            0,
            DescribeTransactionsRequest(transactional_ids=["x"]),
            DescribeTransactionsResponse,
        )
        return str(answer.transaction_states[0].transaction_state)

    def position(self, *, stable: bool = True) -> int | ErrorCode:
        """Return the group's offset, or the error that is told in its place."""
        found: list[int | ErrorCode] = []

        def fetched() -> int:
            live = [each for each in self.brokers if each.is_running]
            answer = self._ask(
                coordinator_of(live, self.brokers, self.group_id),
                ApiKey.OFFSET_FETCH,
                7,
                OffsetFetchRequest(
                    group_id=self.group_id,
                    topics=[OffsetFetchRequestTopic(name=TOPIC, partition_indexes=[0])],
                    require_stable=stable,
                ),
                OffsetFetchResponse,
            )
            if answer.error_code == E.NONE:
                (row,) = answer.topics[0].partitions
                code = ErrorCode(row.error_code)
                found.append(code if code else row.committed_offset)
            return int(answer.error_code)

        with contextlib.suppress(OSError):
            assert settled(fetched) == E.NONE
        return found[-1] if found else E.UNKNOWN_SERVER_ERROR

    def commit_outside(self, offset: int) -> None:
        """Commit an offset in no transaction."""

        def committed() -> int:
            answer = self._ask(
                coordinator(self.brokers, self.group_id),
                ApiKey.OFFSET_COMMIT,
                7,
                OffsetCommitRequest(
                    group_id=self.group_id,
                    topics=[
                        OffsetCommitRequestTopic(
                            name=TOPIC,
                            partitions=[
                                OffsetCommitRequestPartition(
                                    partition_index=0, committed_offset=offset
                                )
                            ],
                        )
                    ],
                ),
                OffsetCommitResponse,
            )
            return int(answer.topics[0].partitions[0].error_code)

        assert settled(committed) == E.NONE


def coordinator_of(
    live: Sequence[Broker], brokers: Sequence[Broker], group_id: str
) -> Broker:
    """Return a group's coordinator when all live nodes agree, and it is one of them."""

    def agreed() -> Broker | None:
        told = {coordinator_id(each, group_id) for each in live}
        number = told.pop() if len(told) == 1 else -1
        found = brokers[number - 1] if number > 0 else None
        return found if found in live else None

    found: Broker = wait_until(agreed)
    return found


def settled(call: Callable[[], int]) -> int:
    """Repeat a request until its answer is no error that passes; return the code."""
    codes: list[int] = []

    def done() -> bool:
        codes.append(call())
        return codes[-1] not in TRANSIENT

    wait_until(done)
    return codes[-1]


def test_offsets_count_if_their_transaction_commits(nodes):  # noqa: F811
    home = transaction_coordinator(nodes)
    url = str(nodes[0].config["cluster.database.url"])
    for here, version in product((True, False), (3, 5)):
        team = group_of(nodes, home, here=here)
        transactor = Transactor(nodes, team, version)
        transactor.begin()
        transactor.commit_outside(version)
        for number, commit in enumerate((True, False, True)):
            before = transactor.position()
            transactor.write(10 + number)
            assert transactor.position() == E.UNSTABLE_OFFSET_COMMIT
            assert transactor.position(stable=False) == before
            assert transactor.end(commit=commit) == E.NONE
            expected = 10 + number if commit else before
            wait_until(lambda t=transactor, to=expected: t.position() == to)
        # Nothing is left where nodes talk about transactions.
        wait_until(lambda: not execute(url, "SELECT 1 FROM mpbroker.transaction_end"))
        wait_until(lambda t=transactor: t.state().startswith("Complete"))


def test_who_may_not_commit_offsets_is_refused(nodes):  # noqa: F811
    home = transaction_coordinator(nodes)
    team = group_of(nodes, home, here=False)
    zombie, old, new = (Transactor(nodes, team, version) for version in (5, 3, 5))
    zombie.begin()
    zombie.write(7)
    old.begin()  # which aborts what the zombie has begun
    wait_until(lambda: old.position() == -1)
    assert zombie.commit(8) == E.INVALID_PRODUCER_EPOCH
    assert zombie.end(commit=True) in (E.PRODUCER_FENCED, E.INVALID_PRODUCER_EPOCH)
    # Before version 5 the transaction must have been told of the group.
    assert old.commit(9) == E.INVALID_TXN_STATE
    new.begin()
    assert new.commit(9, producer_id=12345) == E.INVALID_PRODUCER_ID_MAPPING
    assert new.commit(9, transactional_id="y") == E.INVALID_PRODUCER_ID_MAPPING
    wrong = {"generation_id": 3, "member_id": "m"}
    assert new.commit(9, **wrong) == E.UNKNOWN_MEMBER_ID
    assert new.commit(9, **wrong, group_id="new") == E.ILLEGAL_GENERATION
    assert new.end(commit=False) == E.NONE
    with consuming(nodes, team) as consumer:
        new.begin()
        wrong = {"generation_id": 1, "member_id": "nobody"}
        assert new.commit(9, **wrong) == E.UNKNOWN_MEMBER_ID
        wrong = {"generation_id": 1000, "member_id": consumer.memberid()}
        assert new.commit(9, **wrong) == E.ILLEGAL_GENERATION
        assert new.end(commit=False) == E.NONE
    wait_until(lambda: new.position() == -1)


@contextlib.contextmanager
def consuming(brokers: Sequence[Broker], group_id: str) -> Iterator[Consumer]:
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap(brokers),
            "group.id": group_id,
            "enable.auto.commit": False,
        }
    )
    consumer.subscribe([TOPIC])
    try:

        def joined() -> bool:
            consumer.poll(0.1)
            return bool(consumer.assignment())

        wait_until(joined)
        yield consumer
    finally:
        consumer.close()


@pytest.mark.parametrize("commit", [True, False])
def test_pending_offsets_outlive_the_nodes(nodes, commit):  # noqa: F811
    home = transaction_coordinator(nodes)
    transactor = Transactor(nodes, group_of(nodes, home, here=False), 5)
    transactor.begin()
    transactor.commit_outside(3)
    transactor.write(7)
    coordinator(nodes, transactor.group_id).kill()
    wait_until(lambda: transactor.position() == E.UNSTABLE_OFFSET_COMMIT)
    home.kill()
    home.start()
    transactor.write(8)
    assert transactor.position() == E.UNSTABLE_OFFSET_COMMIT
    assert transactor.end(commit=commit) == E.NONE
    wait_until(lambda: transactor.position() == (8 if commit else 3))


@pytest.mark.parametrize("victims", ["group", "transaction", "both"])
def test_a_decision_outlives_the_nodes(nodes, victims):  # noqa: F811
    """They die when the decision is on disk, and no shard has written it."""
    home = transaction_coordinator(nodes)
    transactor = Transactor(nodes, group_of(nodes, home, here=False), 3)
    transactor.begin()
    transactor.write(7)
    other = coordinator(nodes, transactor.group_id)
    (pid,) = processes(other, "group-coordinator")
    os.kill(pid, signal.SIGSTOP)
    assert transactor.end(commit=True) == E.NONE
    assert transactor.state() == "PrepareCommit"
    if victims != "transaction":
        other.kill()
    else:
        os.kill(pid, signal.SIGCONT)
    if victims != "group":
        home.kill()
        home.start()
    wait_until(lambda: transactor.position() == 7)
    wait_until(lambda: transactor.state() == "CompleteCommit")
    # The same epoch may begin the next one, which nothing of the last one ends.
    transactor.write(8)
    assert transactor.position() == E.UNSTABLE_OFFSET_COMMIT
    assert transactor.position(stable=False) == 7
    assert transactor.end(commit=False) == E.NONE
    wait_until(lambda: transactor.position() == 7)


class Transform:
    """Consumes a topic, and writes each record to another one, exactly once.

    Whatever fails, it begins anew: a new producer, and a consumer that goes on where
    the last transaction was committed.
    """

    def __init__(self, brokers: Sequence[Broker], group_id: str) -> None:
        self._servers = ",".join(each.bootstrap for each in brokers)
        self._group_id = group_id
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.errors: list[str] = []
        self.committed = 0

    def __enter__(self) -> Transform:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_S)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._work()
            except KafkaException as error:
                self.errors.append(str(error))

    def _work(self) -> None:
        own = {"bootstrap.servers": self._servers}
        producer = Producer({**own, "transactional.id": "transform"})
        consumer = Consumer(
            {
                **own,
                "group.id": self._group_id,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "session.timeout.ms": 6000,
            }
        )
        try:
            producer.init_transactions(PATIENCE_S / 2)
            consumer.subscribe([TOPIC])
            while not self._stop.is_set():
                found = [
                    each for each in consumer.consume(5, 0.2) if each.error() is None
                ]
                if not found:
                    continue
                producer.begin_transaction()
                for each in found:
                    producer.produce(TARGET, each.value(), partition=each.partition())
                producer.send_offsets_to_transaction(
                    [
                        TopicPartition(TOPIC, each.partition(), each.offset() + 1)
                        for each in found
                    ],
                    consumer.consumer_group_metadata(),
                    PATIENCE_S / 2,
                )
                producer.commit_transaction(PATIENCE_S / 2)
                self.committed += 1
        finally:
            consumer.close()


def read_target(brokers: Sequence[Broker], count: int) -> list[list[int]]:
    """Return the committed records of each partition, as soon as there are so many."""
    found: list[list[int]] = [[] for _ in range(PARTITIONS)]
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap(brokers),
            "group.id": "reader",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
        }
    )
    consumer.assign([TopicPartition(TARGET, n, 0) for n in range(PARTITIONS)])
    try:

        def done() -> bool:
            for each in consumer.consume(100, 0.2):
                if each.error() is None:
                    found[each.partition()].append(int(each.value()))
            return sum(map(len, found)) >= count

        wait_until(done)
    finally:
        consumer.close()
    return found


def test_records_are_transformed_exactly_once_while_nodes_die(nodes):  # noqa: F811
    home = transaction_coordinator(nodes)
    create(home, TARGET, PARTITIONS, **{"diskless.enable": "false"})
    for each in nodes:
        wait_until(lambda each=each: knows(each, TARGET))
    team = group_of(nodes, home, here=False)
    rounds = (
        lambda: kill_process(coordinator(nodes, team), "group-coordinator"),
        lambda: kill_process(home, "group-coordinator"),
        lambda: kill_and_start(coordinator(nodes, team)),
        lambda: kill_and_start(home),
    )
    with Transform(nodes, team) as transform:
        for number, disturb in enumerate(rounds):
            before = transform.committed
            produce(nodes, 10 * number, 10 * number + 5)
            wait_until(lambda before=before: transform.committed > before)
            disturb()
            before = transform.committed
            produce(nodes, 10 * number + 5, 10 * number + 10)
            wait_until(lambda before=before: transform.committed > before)
        everything = list(range(10 * len(rounds)))
        expected = [everything] * PARTITIONS
        assert read_target(nodes, len(everything) * PARTITIONS) == expected
    ends = Transactor(nodes, team)
    wait_until(lambda: ends.position() == len(everything))


@needs_java_client
@pytest.mark.parametrize("group_protocol", ["classic", "consumer"])
def test_java_transforms_exactly_once_while_a_node_dies(nodes, group_protocol):  # noqa: F811
    """Every other transaction is aborted; the offsets are sent by version 5."""
    home = transaction_coordinator(nodes)
    create(home, TARGET, PARTITIONS, **{"diskless.enable": "false"})
    for each in nodes:
        wait_until(lambda each=each: knows(each, TARGET))
    team = group_of(nodes, home, here=False)
    produce(nodes, 0, 5)
    child = LineClient(java_command("TransactionalClient"), os.environ)
    with contextlib.closing(child), ThreadPoolExecutor() as thread:
        transformed = thread.submit(
            child.ask,
            "transform",
            bootstrap=bootstrap(nodes),
            transaction_timeout_ms=60_000,
            timeout_s=60,
            source=TOPIC,
            target=TARGET,
            transactional_id="java",
            group=team,
            group_protocol=group_protocol,
            batch=4,
            count=10 * PARTITIONS,
        )
        position = Transactor(nodes, team).position
        wait_until(lambda: position(stable=False) not in (-1, E.UNKNOWN_SERVER_ERROR))
        dead = coordinator(nodes, team)
        dead.kill()
        live = [each for each in nodes if each is not dead]
        produce(live, 5, 10)
        ended = transformed.result(3 * PATIENCE_S)
    assert ended["aborted"] >= ended["committed"] > 0
    expected = [list(range(10))] * PARTITIONS
    assert read_target(live, 10 * PARTITIONS) == expected
    wait_until(lambda: position() == 10)


def kill_process(broker: Broker, title: str) -> None:
    (pid,) = wait_until(lambda: processes(broker, title))
    with contextlib.suppress(psutil.NoSuchProcess):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: processes(broker, title) not in ([], [pid]))


def kill_and_start(broker: Broker) -> None:
    broker.kill()
    broker.start()
