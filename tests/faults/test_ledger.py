"""The fault tests are only worth something if the ledger can be disappointed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.bench import wire
from tests.faults.producers import Ledger, Producer

ADDRESS = ("127.0.0.1", 9)


class _Log:
    """Stands in for a connection to a broker whose one partition holds this."""

    values: list[bytes] = []  # noqa: RUF012

    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self) -> _Log:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read_all(
        self, topic: str, partition: int, offset: int
    ) -> list[wire.StoredRecord]:
        records = enumerate(self.values[offset:], offset)
        return [wire.StoredRecord(at, -1, None, value) for at, value in records]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_Log]]:
    monkeypatch.setattr(wire, "Connection", _Log)
    yield _Log
    _Log.values = []


def producer(*, idempotent: bool = False) -> Producer:
    made = Producer(ADDRESS, "t", 0, "p", idempotent=idempotent)
    made.acknowledged = {0: 0, 1: 1}
    return made


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ([b"p:0"], "lost"),
        ([b"p:0", b"p:1", b"p:1"], "again"),
        ([b"p:1", b"p:0"], "comes after"),
        ([b"p:0", b"p:1", b"p:2"], "never sent"),
        ([b"p:0", b"p:5", b"p:6"], "lost"),
    ],
)
def test_a_log_that_does_not_hold_what_it_should_is_found_out(
    log: type[_Log], values: list[bytes], complaint: str
) -> None:
    log.values = values
    with pytest.raises(AssertionError, match=complaint):
        Ledger("t", [producer()]).check(ADDRESS)


def test_a_record_at_another_offset_is_found_out(log: type[_Log]) -> None:
    moved = producer()
    moved.acknowledged = {0: 0, 1: 7}
    log.values = [b"p:0", b"p:1"]
    with pytest.raises(AssertionError, match="acknowledged at offset 7"):
        Ledger("t", [moved]).check(ADDRESS)


def test_records_in_doubt_may_be_there_or_not(log: type[_Log]) -> None:
    doubtful = producer()
    doubtful.in_doubt = {2, 3}
    ledger = Ledger("t", [doubtful])
    log.values = [b"p:0", b"p:1", b"p:3"]
    assert ledger.check(ADDRESS) == 3


def test_only_what_was_appended_since_is_read_again(log: type[_Log]) -> None:
    once = producer()
    ledger = Ledger("t", [once])
    log.values = [b"p:0", b"p:1"]
    assert ledger.check(ADDRESS) == 2
    once.acknowledged[2] = 2
    log.values = [b"p:0", b"p:1", b"p:2"]
    assert ledger.check(ADDRESS) == 1
