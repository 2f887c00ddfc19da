"""Deaths and power cuts at any step: no transaction is torn, none is lost.

The coordinator's process, its logs and those of the partitions are real. A power cut
leaves of each log what was on disk, and by chance some of what came later; the death of
the process leaves everything. The producer is one that retries what was not answered.
"""

from __future__ import annotations

import gc
import os
import random
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import MagicMock

import pytest

from mpbroker.coordinator.context import CoordinatorContext
from mpbroker.coordinator.coordinator_apis import method_of
from mpbroker.coordinator.coordinator_logs import StateMachines
from mpbroker.coordinator.coordinator_process import (
    Clock,
    CoordinatorProcess,
    RequestPort,
)
from mpbroker.coordinator.coordinator_topic import CoordinatorTopic
from mpbroker.coordinator.durability import Durability
from mpbroker.coordinator.groups.group_coordinator import GroupCoordinator
from mpbroker.coordinator.outbox import Call, Outbox
from mpbroker.coordinator.record_writer import Syncs
from mpbroker.coordinator.timers import Timers
from mpbroker.coordinator.transactions.open_transactions import SharedOpenTransactions
from mpbroker.coordinator.transactions.transaction_markers import MarkerWriter
from mpbroker.coordinator.transactions.transactions import Transactions
from mpbroker.ipc.tables.partition_table import PartitionTable
from mpbroker.ipc.tables.transaction_table import TransactionTable
from mpbroker.metadata.log_config import LogConfig
from mpbroker.metadata.topics import NewTopic
from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
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
from mpbroker.protocol.records.batch_header import iter_batches
from mpbroker.protocol.records.compression import Codec
from mpbroker.protocol.records.control_record import parse_end_transaction_marker
from mpbroker.protocol.records.record_batch import iter_records
from mpbroker.storage.log.own_appends import OwnAppends
from mpbroker.storage.log.partition_log import PartitionLog
from tests.coordinator.rig import FakeTopics, no_sessions, no_share_groups
from tests.coordinator.test_durability import FakeNotices
from tests.storage.batches import Validated, batch
from tests.support.coordinator_settings import group_settings, transaction_settings
from tests.support.promises import promised

PARTITIONS: Final = 3
STATE: Final = "__transaction_state"
STATE_ROW: Final = PARTITIONS
NAME: Final = "x"
ONE_SEGMENT: Final = LogConfig({"segment.ms": 1 << 60})
# MPBROKER_POWER_CUTS=5000 looks harder.
SEEDS: Final = int(os.environ.get("MPBROKER_POWER_CUTS", "50"))
TRY_AGAIN: Final = {
    ErrorCode.CONCURRENT_TRANSACTIONS,
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
    ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_ENOUGH_REPLICAS,
}


_code_of = attrgetter("error_code")


class Killed(BaseException):
    pass


class Refused(Exception):
    """The producer cannot go on with its transaction."""


class Machine:
    """A broker's memory and disk, as far as transactions need them.

    Attributes:
        fuse: after so many steps that touch the disk it blows.
    """

    def __init__(self, directory: Path, chance: random.Random) -> None:
        self.chance = chance
        self.directory = directory
        self.fuse = -1
        self.ids = 100
        self.deaths: list[str] = []
        self._logs: dict[int, PartitionLog] = {}
        self._kept = [0] * (PARTITIONS + 1)  # by power cuts, whether read since or not
        self._switch_on(closed=False)

    # -- memory and processes ----------------------------------------------------------

    def _switch_on(self, *, closed: bool) -> None:
        self.rows = PartitionTable.create()
        for row in range(PARTITIONS + 1):
            self.rows.initialise_row(row)
        transactions = TransactionTable.create_segment()
        self.table = TransactionTable(transactions)
        for segment in (self.rows.segment, transactions):
            os.close(segment.fd)  # it is mapped
        if closed:
            self.table.await_restoring()
        self._start()

    def _start(self) -> None:
        """Start a coordinator on the memory that there is."""
        self.answers: dict[int, Any] = {}
        self.given_back: list[Call] = []
        topics = {
            "t": SimpleNamespace(
                topic_id=bytes(16),
                partitions=list(range(PARTITIONS)),
                config=LogConfig({}),
            ),
            STATE: SimpleNamespace(
                topic_id=b"s" * 16, partitions=[STATE_ROW], config=LogConfig({})
            ),
        }
        registry: Any = SimpleNamespace(topic=topics.get)
        out, timers = Outbox(), Timers()
        own = OwnAppends(self.rows if self.chance.random() < 0.5 else None)
        context = CoordinatorContext(out, timers, FakeTopics(), no_sessions())
        groups = GroupCoordinator(group_settings(), context, 1, lambda: "id")
        topic = CoordinatorTopic(
            registry,
            self._log,
            lambda *_: True,
            NewTopic(STATE, 1, {}),
            codec=Codec.NONE,
            load_bytes=1 << 20,
            own_appends=own,
        )
        self.transactions = Transactions(
            transaction_settings(),
            context,
            topic,
            groups,
            MarkerWriter(registry, self._log, groups, lambda _: None, own),
            SharedOpenTransactions(self.table, registry),
            self._next_id,
            self.given_back.append,
        )
        self._burn_around(self.transactions.markers, "_append")
        self._burn_around(topic, "append")
        no_groups: Any = MagicMock(has_changed=False)
        no_groups.partitions_to_load.return_value = []
        channel = MagicMock()
        channel.send_bytes.side_effect = self.answers.__setitem__
        never: Any = SimpleNamespace(event_fd=-1, is_idle=True)
        anything: Any = MagicMock()
        words: Any = SimpleNamespace(words=defaultdict(int))
        notices: Any = FakeNotices()
        self.bell = os.eventfd(0)
        durability = Durability(lambda _: None, notices, self._sync)
        bell: Any = SimpleNamespace(fd=self.bell)
        self.process = CoordinatorProcess(
            RequestPort(words, anything, bell, channel),
            StateMachines(
                context, groups, no_groups, self.transactions, no_share_groups()
            ),
            Syncs(never, anything, durability, anything),
            Clock(),
            lambda: None,
            lambda *_: b"",
        )
        self.table.begin_restoring()
        self.process._loading.begin()
        self.process._loading.go_on(60.0)
        self._settle()

    def _next_id(self) -> int:
        self.ids += 1
        return self.ids

    def _settle(self) -> None:
        self.process._flush()
        while self.process._syncs.durability.go_on(1):
            self.process._flush()
        self.process._flush()

    def _burn_around(self, whose: Any, method: str) -> None:
        inner: Callable[..., Any] = getattr(whose, method)

        def burning(*args: Any) -> Any:
            self.burn()
            done = inner(*args)
            self.burn()
            return done

        setattr(whose, method, burning)

    def burn(self) -> None:
        """Die here, perhaps; and some log is synced by others, perhaps."""
        if self.chance.random() < 0.1 and self._logs:
            log = self._logs[self.chance.choice(sorted(self._logs))]
            log.sync.flush(log.row.log_end_offset)
        self.fuse -= 1
        if self.fuse == 0:
            raise Killed

    def recover(self) -> None:
        """Come back from the death of the coordinator, or from a power cut."""
        while True:
            again = self.chance.random() < 0.3
            self.fuse = self.chance.randrange(1, 12) if again else -1
            cut = self.chance.random() < 0.6
            self.deaths.append("power" if cut else "coordinator")
            self.close()
            try:
                if cut:
                    self._cut_power()
                else:
                    self._start()
            except Killed:
                continue
            return

    def close(self) -> None:
        os.close(self.bell)
        self.process._epoll.close()
        for log in self._logs.values():
            log.close()
        self._logs.clear()

    # -- the disk ----------------------------------------------------------------------

    def _log(self, topic: Any, partition: int) -> PartitionLog:
        return self.log_of(topic.partitions[partition])

    def log_of(self, row: int) -> PartitionLog:
        log = self._logs.get(row)
        if log is None:
            path = self.directory / str(row)
            path.mkdir(exist_ok=True)
            log = PartitionLog(str(path), self.rows.row(row), ONE_SEGMENT)
            self._logs[row] = log
            log.view.state()
        return log

    def _sync(self, logs: list[PartitionLog]) -> None:
        for log in logs:
            self.burn()
            log.sync.flush(log.row.log_end_offset)
            self.burn()

    def batches(self, row: int) -> list[tuple[int, Any, memoryview]]:
        """Each batch of a log, and the position behind it."""
        found, position = [], 0
        path = self.directory / str(row) / f"{0:020d}.log"
        data = path.read_bytes() if path.exists() else b""
        for header, each in iter_batches(data):
            position += len(each)
            found.append((position, header, each))
        return found

    def _cut_power(self) -> None:
        """Leave what is on disk, some of what came later, and no memory."""
        for row in range(STATE_ROW + 1):
            path = self.directory / str(row) / f"{0:020d}.log"
            if not path.exists():
                continue
            durable = max(self._kept[row], self.rows.row(row).durable_end_offset)
            batches = self.batches(row)
            sure = sum(header.base_offset < durable for _, header, _ in batches)
            count = self.chance.randint(sure, len(batches))
            size, self._kept[row] = 0, 0
            if count:
                size, header, _ = batches[count - 1]
                self._kept[row] = header.base_offset + header.last_offset_delta + 1
            data = path.read_bytes()
            if self.chance.random() < 0.2:  # a part of the next one
                size += self.chance.randrange(60)
            shutil.rmtree(path.parent)
            path.parent.mkdir()
            path.write_bytes(data[:size])
        self._switch_on(closed=True)

    # -- requests ----------------------------------------------------------------------

    def ask(self, api: ApiKey, request: Message, version: int) -> Any:
        """Ask the coordinator; None: it gave a Produce back.

        Raises:
            Killed: nothing was answered.
        """
        answer = SimpleNamespace(
            slot=len(self.answers), api_version=version, throttle_ms=0
        )
        answer.frame = lambda body: body
        call = Call(version, "c", "h", answer)
        handle = method_of(api, self.transactions.parts)
        handle(call, request, self.process._clock.now_ms())
        self._settle()
        if call in self.given_back:
            return None
        return self.answers[answer.slot]

    def is_open(self, producer_id: int, epoch: int, row: int) -> bool:
        return True

    def write(self, row: int, made: Validated, *, sync: bool) -> int:
        """Append as a handler does; return the first offset."""
        log = self.log_of(row)
        sent: Any = made
        result = log.append(sent, now_ms=1, is_open=self.is_open)
        if sync:
            self._sync([log])
        return result.base_offset


class Producer:
    """A transactional producer, and what it was told.

    Attributes:
        acknowledged: the records of each transaction that are on disk.
        outcomes: how each ended: True, False, or None where it was not told.
    """

    def __init__(self, machine: Machine, version: int) -> None:
        self._machine = machine
        self._chance = machine.chance
        self._version = version
        self.acknowledged: dict[int, set[str]] = {}
        self.outcomes: dict[int, bool | None] = {}
        self._number = 0
        self.init()

    def _ask(
        self,
        api: ApiKey,
        request: Message,
        response: type[Message],
        version: int,
        code: Callable[[Any], int],
    ) -> Any:
        """Ask until there is an answer that is one.

        Raises:
            Refused: an error that is not to be tried again.
        """
        for _ in range(50):
            try:
                body = self._machine.ask(api, request, version)
            except Killed:
                self._machine.recover()
                continue
            if body is None:
                return None
            found: Any = response.decode(version, body)
            error = code(found)
            if error in TRY_AGAIN:
                continue
            if error:
                raise Refused(ErrorCode(error).name)
            return found
        raise AssertionError("it never ends")

    def init(self) -> None:
        request = InitProducerIdRequest(
            transactional_id=NAME, transaction_timeout_ms=60_000
        )
        answer = self._ask(
            ApiKey.INIT_PRODUCER_ID,
            request,
            InitProducerIdResponse,
            4,
            lambda a: a.error_code,
        )
        self._id, self._epoch = answer.producer_id, answer.producer_epoch
        self._sequences = [0] * PARTITIONS

    def transact(self) -> None:
        """A transaction with some records, and one of its ends or none."""
        chance = self._chance
        self._number += 1
        self.acknowledged[self._number] = set()
        self.outcomes[self._number] = False  # unless it is asked for
        usual = chance.random() < 0.7
        try:
            for step in range(chance.randint(1, 3)):
                rows = range(PARTITIONS)
                if not usual:
                    rows = sorted(chance.sample(rows, chance.randint(1, PARTITIONS)))
                if self._version < 2:
                    self._add(rows)
                self._maybe_noise()
                for row in rows:
                    self._write(row, step)
            commit = chance.random() < 0.7
            if commit:
                self.outcomes[self._number] = None
            self._end(commit)
            self.outcomes[self._number] = commit
        except Refused:
            self.init()

    def _add(self, rows: Any) -> None:
        request = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=NAME,
            v3_and_below_producer_id=self._id,
            v3_and_below_producer_epoch=self._epoch,
            v3_and_below_topics=[
                AddPartitionsToTxnTopic(name="t", partitions=list(rows))
            ],
        )
        self._ask(
            ApiKey.ADD_PARTITIONS_TO_TXN,
            request,
            AddPartitionsToTxnResponse,
            3,
            lambda a: (
                a.results_by_topic_v3_and_below[0]
                .results_by_partition[0]
                .partition_error_code
            ),
        )

    def _maybe_noise(self) -> None:
        """Others write too, and do not care for the disk."""
        if self._chance.random() < 0.4:
            row = self._chance.randrange(PARTITIONS)
            self._machine.write(row, batch(*[b"other"] * 3), sync=False)

    def _write(self, row: int, step: int) -> None:
        machine, value = self._machine, f"{self._number}-{row}-{step}"
        made = batch(
            value.encode(),
            producer=(self._id, self._epoch, self._sequences[row]),
            transactional=True,
        )
        request = ProduceRequest(
            transactional_id=NAME,
            acks=-1,
            timeout_ms=1000,
            topic_data=[
                TopicProduceData(
                    name="t",
                    partition_data=[
                        PartitionProduceData(index=row, records=bytes(made.data))
                    ],
                )
            ],
        )
        version = 12 if self._version >= 2 else 11
        while True:
            while not machine.table.contains(self._id, self._epoch, row):
                self._ask(
                    ApiKey.PRODUCE,
                    request,
                    ProduceResponse,
                    version,
                    lambda a: a.responses[0].partition_responses[0].error_code,
                )
            try:
                machine.write(row, made, sync=True)
                break
            except Killed:
                machine.recover()
            except ApiError as error:
                raise Refused(error.error_code.name) from error
        self._sequences[row] += 1
        self.acknowledged[self._number].add(value)

    def _end(self, commit: bool) -> None:
        request = EndTxnRequest(
            transactional_id=NAME,
            producer_id=self._id,
            producer_epoch=self._epoch,
            committed=commit,
        )
        version = 5 if self._version >= 2 else 3
        answer = self._ask(ApiKey.END_TXN, request, EndTxnResponse, version, _code_of)
        if self._version >= 2:
            self._id, self._epoch = answer.producer_id, answer.producer_epoch
            self._sequences = [0] * PARTITIONS


def read(machine: Machine) -> Iterator[tuple[str, bool | None]]:
    """Each record of a transaction, and how it ended there; None: it has not."""
    for row in range(PARTITIONS):
        open_records: list[str] = []
        for _, header, each in machine.batches(row):
            if header.is_control:
                (record,) = iter_records(each)
                commit = parse_end_transaction_marker(record).commit
                for value in open_records:
                    yield value, commit
                open_records = []
            elif header.is_transactional:
                open_records += [
                    bytes(record.value or b"").decode() for record in iter_records(each)
                ]
        for value in open_records:
            yield value, None


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("first_seed", range(0, SEEDS, 25))
def test_transactions_are_whole_after_a_death_or_power_cut_at_any_step(
    tmp_path: Path, version: int, first_seed: int
) -> None:
    for seed in range(first_seed, first_seed + 25):
        directory = tmp_path / str(seed)
        directory.mkdir()
        run(directory, version, seed)
        shutil.rmtree(directory)
        gc.collect()  # the mappings, which hold a descriptor each


def run(directory: Path, version: int, seed: int) -> None:
    chance = random.Random(seed)
    machine = Machine(directory, chance)
    producer = Producer(machine, version)
    for _ in range(chance.randint(2, 8)):
        machine.fuse = chance.randrange(1, 60)
        producer.transact()
    machine.fuse = -1
    producer.init()  # aborts what is open
    machine.close()
    what = f"seed {seed}, version {version}, {machine.deaths}"
    require_whole(producer, list(read(machine)), what)


@promised("each transaction ended as its producer was told, and all of it, once")
def require_whole(
    producer: Producer, records: list[tuple[str, bool | None]], what: str
) -> None:
    """Raise unless each transaction ended as its producer was told, and all of it."""
    ends: dict[int, set[bool | None]] = defaultdict(set)
    seen: dict[int, list[str]] = defaultdict(list)
    for value, commit in records:
        number = int(value.split("-")[0])
        ends[number].add(commit)
        seen[number].append(value)
    for number, outcome in producer.outcomes.items():
        told = f"transaction {number} of {what}: told {outcome}, is {ends[number]}"
        assert len(ends[number]) <= 1, f"torn: {told}"
        allowed = {True, False} if outcome is None else {outcome}
        assert ends[number] <= allowed, told
        assert len(seen[number]) == len(set(seen[number])), f"twice: {told}"
        if ends[number] == {True} or outcome:
            missing = producer.acknowledged[number] - set(seen[number])
            assert not missing, f"lost {missing}: {told}"
