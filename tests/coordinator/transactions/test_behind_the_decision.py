"""Records behind the place in a partition that a decision names.

They are part of the next transaction only. The decided transaction ends as decided,
also after further failures.
"""

from __future__ import annotations

import errno
import random
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mpbroker.protocol.api_key import ApiKey
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.end_txn import EndTxnRequest
from mpbroker.storage.log.partition_log import PartitionLog
from tests.coordinator.transactions.test_power_cuts import (
    NAME,
    STATE_ROW,
    Killed,
    Machine,
    Producer,
    read,
)
from tests.storage.batches import batch


class Disk(Machine):
    """A broker whose power cuts leave of each log so many batches.

    Attributes:
        late: is called when the coordinator next touches the disk.
        is_full: no marker can be written.
        away: partitions on a disk that is not there.
    """

    def __init__(self, directory: Path) -> None:
        self.late: Any = None
        self.is_full = False
        self.away: tuple[int, ...] = ()
        super().__init__(directory, random.Random(1))

    def _burn_around(self, whose: Any, method: str) -> None:
        super()._burn_around(whose, method)
        if method == "_append":
            inner = whose._append

            def append(*args: Any) -> Any:
                if self.is_full:
                    raise ApiError(ErrorCode.KAFKA_STORAGE_ERROR, "no space left")
                return inner(*args)

            whose._append = append

    def _log(self, topic: Any, partition: int) -> PartitionLog:
        if topic.partitions[partition] in self.away:
            refused = ApiError(ErrorCode.KAFKA_STORAGE_ERROR, "it cannot be read")
            raise refused from OSError(errno.EIO, "an error")
        return super()._log(topic, partition)

    def burn(self) -> None:
        late, self.late = self.late, None
        if late is not None:
            late()
        self.fuse -= 1
        if self.fuse == 0:
            raise Killed

    def cut_power(self, kept: dict[int, int]) -> None:
        sizes = {row: self.batches(row)[count - 1][0] for row, count in kept.items()}
        self.close()
        for row, size in sizes.items():
            path = self.directory / str(row) / f"{0:020d}.log"
            data = path.read_bytes()
            shutil.rmtree(path.parent)
            path.parent.mkdir()
            path.write_bytes(data[:size])
        self._switch_on(closed=True)

    def die(self) -> None:
        self.close()
        self._start()

    def load_again(self) -> None:
        self.process._timers.expire(self.process._clock.now_ms() + 3000)
        self.process._loading.go_on(60.0)
        self._settle()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path)
    yield disk
    with suppress(OSError):
        disk.close()


class Client(Producer):
    def begin(self, *rows: int) -> None:
        self._number += 1
        self.acknowledged[self._number] = set()
        if self._version < 2:
            self._add(rows)

    def write(self, row: int) -> None:
        self._write(row, 0)

    def end(self, *, commit: bool) -> None:
        self._end(commit)

    def write_late(self, row: int) -> None:
        """As a handler does with what its client has given up waiting for."""
        me = self._id, self._epoch
        made: Any = batch(b"late", producer=(*me, 0), transactional=True)

        def late() -> None:
            log = self._machine.log_of(row)
            is_open = self._machine.table.contains
            with suppress(ApiError):
                log.append(made, now_ms=1, is_open=is_open)

        self._machine.late = late  # type: ignore[attr-defined]


def test_a_late_produce_is_no_part_of_the_next_transaction(disk: Disk) -> None:
    """Its epoch is the same, with older clients."""
    client = Client(disk, 1)
    client.begin(0, 1)
    client.write(0)
    disk.answers.clear()
    client.write_late(1)
    disk.fuse = 5  # behind the decision's sync, and the answer; before a marker
    with pytest.raises(Killed):
        ask_for_the_end(client)
    disk.fuse = -1
    assert disk.answers, "it was told that it is aborted"
    disk.die()
    client.begin(0, 1)
    client.write(0)
    client.end(commit=True)
    ends = dict(read(disk))
    assert ends.get("late") is not True
    assert (ends["1-0-0"], ends["2-0-0"]) == (False, True)


def ask_for_the_end(client: Client) -> None:
    request = EndTxnRequest(
        transactional_id=NAME,
        producer_id=client._id,
        producer_epoch=client._epoch,
        committed=False,
    )
    client._machine.ask(ApiKey.END_TXN, request, 3)


def test_an_end_in_the_same_turn_closes_a_partition_added_just_before(
    disk: Disk,
) -> None:
    """A partition is added once more, and all is ended, in the same turn."""
    client = Client(disk, 1)
    client.begin(0, 1)
    coordinator = disk.transactions.coordinator
    transaction = coordinator.get(NAME)
    assert transaction is not None
    coordinator.add(transaction, [("t", 1)], 0, 1)
    coordinator._prepare(transaction, False, 0, 1)
    for _, run in disk.process._out.take_appended():
        run()
    assert not disk.table.contains(client._id, client._epoch, 1)


@pytest.mark.parametrize("version", [1, 2])
def test_a_decision_is_carried_out_when_the_disk_has_room_again(
    disk: Disk, version: int
) -> None:
    """Though the next transaction, which is all that is left behind it, goes on."""
    client = Client(disk, version)
    for number in (1, 2):
        client.begin(0, 1)
        client.write(0)
        if number == 1:
            client.write(1)
            client.end(commit=True)
    decided = len(disk.batches(STATE_ROW)) - 2  # then: Complete, and Ongoing
    disk.is_full = True
    disk.cut_power({0: 3, 1: 1, STATE_ROW: decided})
    disk.is_full = False
    disk.load_again()
    client.end(commit=False)
    assert dict(read(disk)) == {"1-0-0": True, "1-1-0": True, "2-0-0": False}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("lost", [1, 2])  # Ongoing, and Complete
@pytest.mark.parametrize("commit", [True, False])
def test_records_on_an_offline_disk_are_neither_committed_nor_lost(
    disk: Disk, version: int, lost: int, commit: bool
) -> None:
    """All that is left of the next transaction is there."""
    client = Client(disk, version)
    for number in (1, 2):
        client.begin(0, 1)
        client.write(0)
        if number == 1:
            client.write(1)
            client.end(commit=True)
    disk.away = (0,)
    disk.cut_power({0: 3, 1: 2, STATE_ROW: len(disk.batches(STATE_ROW)) - lost})
    if commit:
        client.end(commit=True)
    disk.away = ()
    disk.die()
    assert dict(read(disk)) == {
        "1-0-0": True,
        "1-1-0": True,
        "2-0-0": True if commit else None,
    }
    client.init()
    assert dict(read(disk))["2-0-0"] is commit
