"""As test_power_cuts.py, with more going on beside it.

Several producers whose ids are in the same log, in turn; others that take an id over;
transactions that are too old; Produces that come late; markers and records that cannot
be written for a while; deleted records; seconds that pass.
"""

from __future__ import annotations

import gc
import random
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.message import Message
from mpbroker.protocol.records.control_record import parse_end_transaction_marker
from mpbroker.protocol.records.record_batch import iter_records
from tests.coordinator.transactions.test_power_cuts import (
    PARTITIONS,
    SEEDS,
    TRY_AGAIN,
    Killed,
    Machine,
    Producer,
    Refused,
    require_whole,
)
from tests.storage.batches import batch


class CrowdedMachine(Machine):
    """A broker with a clock that can be put on, and a disk that may be full.

    Attributes:
        late: appends what a handler has had for long, unless it is refused.
    """

    def __init__(self, directory: Path, chance: random.Random) -> None:
        self.late: list[Callable[[], None]] = []
        self.is_full = False
        self._passed_ms = 0
        super().__init__(directory, chance)

    def _start(self) -> None:
        super()._start()
        clock = self.process._clock
        now_ms = clock.now_ms
        clock.now_ms = lambda: now_ms() + self._passed_ms  # type: ignore[method-assign]

    def is_open(self, producer_id: int, epoch: int, row: int) -> bool:
        return self.table.contains(producer_id, epoch, row)

    def _burn_around(self, whose: Any, method: str) -> None:
        super()._burn_around(whose, method)
        burning: Callable[..., Any] = getattr(whose, method)

        def unless_full(*args: Any) -> Any:
            if self.is_full and self.chance.random() < 0.3:
                raise ApiError(ErrorCode.KAFKA_STORAGE_ERROR, "no space left")
            return burning(*args)

        setattr(whose, method, unless_full)

    def burn(self) -> None:
        if self.late and self.chance.random() < 0.25:
            self.late.pop()()
        super().burn()

    def _cut_power(self) -> None:
        self.late.clear()
        self.is_full = False
        super()._cut_power()

    def wait(self, ms: int) -> None:
        """Let time pass; what failed is tried again."""
        self._passed_ms += ms
        self.process._timers.expire(self.process._clock.now_ms())
        self.process._loading.go_on(60.0)
        self._settle()

    def abort_what_is_old(self) -> None:
        self._passed_ms += 61_000
        now_ms = self.process._clock.now_ms()
        self.transactions.coordinator._abort_timed_out(now_ms)
        self._settle()


class CrowdedProducer(Producer):
    """One of several; what it does may be done in steps."""

    def __init__(self, machine: CrowdedMachine, version: int, index: int) -> None:
        self._name = f"x{index}"
        self._crowded = machine
        super().__init__(machine, version)
        self._number = 1000 * index

    def _ask(
        self,
        api: ApiKey,
        request: Message,
        response: type[Message],
        version: int,
        code: Callable[[Any], int],
    ) -> Any:
        machine, wait_ms = self._crowded, 0
        # Whoever is called by one name in those tests, here there are several.
        for field in ("transactional_id", "v3_and_below_transactional_id"):
            if getattr(request, field, None):
                setattr(request, field, self._name)
        for _ in range(200):
            try:
                if wait_ms or self._chance.random() < 0.05:
                    machine.wait(wait_ms or 1100)
                body = machine.ask(api, request, version)
            except Killed:
                machine.recover()
                continue
            except KeyError:  # not answered yet: it waits for markers
                body = b""
            if body is None:
                return None
            found: Any = response.decode(version, body) if body else None
            error = code(found) if body else ErrorCode.COORDINATOR_NOT_AVAILABLE
            if error in TRY_AGAIN:
                machine.is_full = False
                wait_ms = 2100
                continue
            if error:
                raise Refused(ErrorCode(error).name)
            return found
        raise AssertionError("it never ends")

    def take_over(self) -> None:
        """As another producer of the same id, of which this one does not know."""
        mine = self._id, self._epoch
        self.init()
        self._id, self._epoch = mine

    def steps(self) -> Iterator[None]:
        for _ in range(self._chance.randint(2, 6)):
            self._number += 1
            self.acknowledged[self._number] = set()
            self.outcomes[self._number] = False  # unless it is asked for
            try:
                yield from self._transact()
            except Killed:
                self._crowded.recover()
                self.init()
            except Refused:
                self.init()

    def _transact(self) -> Iterator[None]:
        chance, machine = self._chance, self._crowded
        usual = chance.random() < 0.7
        for step in range(chance.randint(1, 3)):
            rows = list(range(PARTITIONS))
            if not usual:
                rows = sorted(chance.sample(rows, chance.randint(1, PARTITIONS)))
            if self._version < 2:
                self._add(rows)
                yield
            self._maybe_noise()
            for row in rows:
                if chance.random() < 0.9:
                    self._write(row, step)
                yield
            self._maybe_trouble()
        commit = chance.random() < 0.7
        if commit:
            self.outcomes[self._number] = None
        elif chance.random() < 0.5:
            machine.late.append(self._late_produce())
        self._end(commit)
        self.outcomes[self._number] = commit
        yield

    def _maybe_trouble(self) -> None:
        chance, machine = self._chance, self._crowded
        if chance.random() < 0.1:
            machine.is_full = True
        if chance.random() < 0.03:
            machine.abort_what_is_old()
        if chance.random() < 0.05:
            log = machine.log_of(chance.randrange(PARTITIONS))
            start, end = log.row.log_start_offset, log.row.log_end_offset
            log.delete_records(chance.randint(start, end))

    def _made(self, row: int, step: str) -> Any:
        return batch(
            f"{self._number}-{row}-{step}".encode(),
            producer=(self._id, self._epoch, self._sequences[row]),
            transactional=True,
        )

    def _late_produce(self) -> Callable[[], None]:
        """What it has given up to wait for before it aborts."""
        row, number = self._chance.randrange(PARTITIONS), self._number
        made, sync = self._made(row, "late"), self._chance.random() < 0.7
        self._sequences[row] += 1

        def append() -> None:
            # Of older clients nobody can tell whether it is of the next one.
            if self._number != number:
                return
            log = self._crowded.log_of(row)
            try:
                log.append(made, now_ms=1, is_open=self._crowded.is_open)
            except ApiError:
                return
            if sync:
                log.sync.flush(log.row.log_end_offset)

        return append

    def _write(self, row: int, step: int) -> None:
        # The table says no more than this at once: it may be closed in between.
        try:
            super()._write(row, step)
        except Refused as error:
            if str(error) != ErrorCode.INVALID_TXN_STATE.name:
                raise
            self._write(row, step)


def read(machine: Machine) -> Iterator[tuple[str, bool | None]]:
    """Each record of a transaction, and how it ended there; None: it has not."""
    for row in range(PARTITIONS):
        open_records: dict[int, list[str]] = defaultdict(list)
        for _, header, each in machine.batches(row):
            if header.is_control:
                (record,) = iter_records(each)
                commit = parse_end_transaction_marker(record).commit
                for value in open_records.pop(header.producer_id, ()):
                    yield value, commit
            elif header.is_transactional:
                open_records[header.producer_id] += [
                    bytes(record.value or b"").decode() for record in iter_records(each)
                ]
        for values in open_records.values():
            for value in values:
                yield value, None


@pytest.mark.parametrize("first_seed", range(0, SEEDS // 2, 25))
def test_transactions_are_whole_beside_other_producers_and_failures(
    tmp_path: Path, first_seed: int
) -> None:
    for seed in range(first_seed, first_seed + 25):
        directory = tmp_path / str(seed)
        directory.mkdir()
        run(directory, seed)
        shutil.rmtree(directory)
        gc.collect()  # the mappings, which hold a descriptor each


def run(directory: Path, seed: int) -> None:
    chance = random.Random(seed)
    machine = CrowdedMachine(directory, chance)
    producers = [
        CrowdedProducer(machine, chance.choice([1, 2]), index)
        for index in range(chance.randint(1, 3))
    ]
    under_way = [(producer, producer.steps()) for producer in producers]
    while under_way:
        if machine.fuse < 0:
            machine.fuse = chance.randrange(1, 90)
        each = producer, steps = chance.choice(under_way)
        if chance.random() < 0.01:
            producer.take_over()
        try:
            next(steps)
        except StopIteration:
            under_way.remove(each)
    machine.fuse, machine.is_full = -1, False
    machine.late.clear()
    for producer in producers:
        producer.init()  # aborts what is open
    machine.close()
    records = list(read(machine))
    for index, producer in enumerate(producers):
        own = [each for each in records if int(each[0].split("-")[0]) // 1000 == index]
        require_whole(producer, own, f"seed {seed}, producer {index}, {machine.deaths}")
