"""Positions of groups, as the exporter reads them from a log that may be damaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mpbroker.coordinator.groups.group_records import offset_key, offset_value
from mpbroker.coordinator.outbox import TransactionalRecord
from mpbroker.exporter.group_lag import GroupLag
from mpbroker.metadata.topic_names import OFFSETS_TOPIC
from tests.coordinator.test_damaged_logs import DAMAGE, Logs

COUNT = 12


def key_of(number: int) -> bytes:
    return offset_key("g", "t", number)


def value_of(offset: int) -> bytes:
    return offset_value(offset, -1, "", 0, -1)


class Followed(Logs):
    """A partition of __consumer_offsets, and the exporter that follows it."""

    def __init__(self, data: Path, **options: int) -> None:
        directory = data / f"{OFFSETS_TOPIC}-0"
        directory.mkdir()
        super().__init__(directory, load_bytes=1 << 20)
        self.found.topic_id = b"i" * 16
        registry: Any = SimpleNamespace(topic=lambda name: self.found)
        logs: Any = SimpleNamespace(
            node_id=None,
            directories=[SimpleNamespace(path=str(data))],
            log=lambda topic, partition: self.log,
        )
        self.lag = GroupLag(registry, logs, **options)

    def commit(self, number: int, offset: int) -> None:
        self.append(key_of(number), value_of(offset))

    def committed(self) -> dict[int, int]:
        """Return what the exporter shows when it has nothing more to read."""
        self.lag.catch_up()
        return {partition: at for _, _, partition, at in self.lag.committed()}


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Followed]]:
    made = []

    def make(**options: int) -> Followed:
        made.append(Followed(tmp_path, **options))
        return made[-1]

    yield make
    for each in made:
        each.log.close()


@pytest.mark.parametrize("number", [0, 5, COUNT - 1])
@pytest.mark.parametrize("what", DAMAGE)
def test_commits_behind_a_damaged_batch_are_shown_and_those_that_come_then(
    make: Callable[..., Followed], what: str, number: int
) -> None:
    followed = make()
    for n in range(COUNT):
        followed.commit(n, 100 + n)
    followed.damage(followed.positions()[number], what)
    expected = {n: 100 + n for n in range(COUNT)}
    if not DAMAGE[what][2]:
        del expected[number]
    assert followed.committed() == expected
    # In this order: once the log has grown to a base offset that is too high, the old
    # commit is taken for a new one, until the group commits again.
    for n in (COUNT, 0, COUNT - 1):
        followed.commit(n, 200 + n)
        expected[n] = 200 + n
        assert followed.committed() == expected


def test_damage_that_comes_while_it_is_followed_hides_nothing(
    make: Callable[..., Followed],
) -> None:
    followed = make()
    for n in range(COUNT):
        followed.commit(n, 100 + n)
        assert followed.committed() == {each: 100 + each for each in range(n + 1)}
    first = len(followed.path.read_bytes())
    followed.commit(0, 200)
    followed.commit(1, 201)
    followed.damage(first, "checksum")
    assert followed.committed() == {n: 201 if n == 1 else 100 + n for n in range(COUNT)}


def test_a_long_log_is_read_in_several_calls(make: Callable[..., Followed]) -> None:
    followed = make(budget_bytes=1)
    followed.append(key_of(0), value_of(7))
    followed.topic.append(0, [(b"\0\2other", b"v" * (1 << 20))], 1)
    followed.append(key_of(1), value_of(8))
    assert followed.committed() == {0: 7}
    while len(followed.committed()) < 2:
        pass
    assert followed.committed() == {0: 7, 1: 8}


def test_a_record_that_cannot_be_read_hides_none_of_its_batch(
    make: Callable[..., Followed],
) -> None:
    followed = make()
    records = [(key_of(0), value_of(7)), (key_of(1), b"\0"), (key_of(2), value_of(9))]
    followed.topic.append(0, records, 1)
    assert followed.committed() == {0: 7, 2: 9}


def test_offsets_of_a_transaction_wait_for_its_end(
    make: Callable[..., Followed],
) -> None:
    followed = make()
    followed.commit(0, 7)
    record = TransactionalRecord(7, 0, key_of(0), value_of(9))
    followed.topic.append_transactional(0, [record], 1)
    assert followed.committed() == {0: 7}
