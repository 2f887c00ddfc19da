"""A small campaign of kills; and proof that the harness finds what it is for."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpbroker.ipc.compiled import IS_COMPILED
from tests.bench import wire
from tests.chaos.campaign import Campaign, Promises, dying_command, table
from tests.chaos.census import differences
from tests.chaos.clients import STUCK_S
from tests.chaos.ledger import Ledger
from tests.support.broker import BrokerFailedError
from tests.support.promises import promised


@promised("no answer is wrong, and no record is lost, doubled or another's")
def expect_no_wrong_answer(campaign: Campaign) -> None:
    assert not any(result.wrong for result in campaign.results), table(campaign.results)


def test_clients_notice_no_kill_and_no_resize_and_nothing_is_left(
    tmp_path: Path,
) -> None:
    campaign = Campaign(tmp_path, connections=24)
    try:
        campaign.kills("handler", 8, Promises(disconnects=0))
        campaign.kills("acceptor", 2, Promises(disconnects=0))
        campaign.kills("processor", 4, Promises(disconnects=0))
        campaign.resizes(4, Promises(disconnects=0))
        campaign.leftovers()
        expect_no_wrong_answer(campaign)
        assert all(result.ok for result in campaign.results), table(campaign.results)
        assert [result.events for result in campaign.results] == [8, 2, 4, 4, 0]
        assert all(result.answers > 100 for result in campaign.results[:4])
    finally:
        campaign.close()


def test_what_was_acknowledged_outlives_the_supervisor(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path, connections=16)
    try:
        campaign.supervisor_kills(2)
        campaign.leftovers()
        expect_no_wrong_answer(campaign)
        assert all(result.ok for result in campaign.results), table(campaign.results)
    finally:
        campaign.close()


def deaths_with(
    fault: str, tmp_path: Path, count: int, stuck_s: float, points: str = "lines"
) -> Campaign:
    campaign = Campaign(
        tmp_path,
        connections=8,
        config={"num.io.threads": 2},
        command=dying_command(tmp_path / "go", fault, "handler", 400, points),
        stuck_s=stuck_s,
    )
    try:
        campaign.own_deaths(fault, count, Promises(disconnects=0), tmp_path / "go")
    finally:
        campaign.close()
    return campaign


def test_a_sound_broker_survives_deaths_at_any_line(tmp_path: Path) -> None:
    campaign = deaths_with("none", tmp_path, 60, STUCK_S)
    expect_no_wrong_answer(campaign)
    assert all(result.ok for result in campaign.results), table(campaign.results)


@pytest.mark.skipif(not IS_COMPILED, reason="needs the compiled core")
def test_a_sound_broker_survives_deaths_at_any_step(tmp_path: Path) -> None:
    campaign = deaths_with("none", tmp_path, 60, STUCK_S, "steps")
    assert all(result.ok for result in campaign.results), table(campaign.results)


@pytest.mark.parametrize(
    ("fault", "points"),
    [
        ("no-wake-all", "lines"),
        ("semaphore", "lines"),
        pytest.param(
            "no-wake-all",
            "steps",
            marks=pytest.mark.skipif(not IS_COMPILED, reason="needs the compiled core"),
        ),
    ],
)
def test_a_planted_fault_is_found(fault: str, points: str, tmp_path: Path) -> None:
    try:
        campaign = deaths_with(fault, tmp_path, 2000, 4.0, points)
    except BrokerFailedError as error:  # stuck only when it was to stop
        assert "after SIGTERM" in str(error)
    else:
        assert campaign.results[0].stuck > 0, table(campaign.results)


# -- the checker can be disappointed ---------------------------------------------------


class _Log:
    """Stands in for a connection to a broker whose one partition holds this."""

    def __init__(self, records: list[wire.StoredRecord]) -> None:
        self._records = records

    def __call__(self, *_: object) -> _Log:
        return self

    def __enter__(self) -> _Log:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read_all(self, topic: str, partition: int) -> list[wire.StoredRecord]:
        return self._records


def two_batches() -> tuple[Ledger, list[wire.StoredRecord]]:
    """A ledger with two acknowledged batches of a record, and the log they are in."""
    ledger = Ledger("t", 1)
    batches = [ledger.send(number, 0, 1, 100) for number in (1, 2)]
    for offset, batch in enumerate(batches):
        ledger.acknowledge(batch, offset)
    return ledger, [
        wire.StoredRecord(offset, -1, None, batch.value(0))
        for offset, batch in enumerate(batches)
    ]


def complaints(
    ledger: Ledger, log: list[wire.StoredRecord], monkeypatch: pytest.MonkeyPatch
) -> str:
    monkeypatch.setattr(wire, "Connection", _Log(log))
    ledger.verify(("127.0.0.1", 9))
    return "; ".join(ledger.wrong)


def test_a_log_as_acknowledged_is_no_reason_to_complain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ledger, log = two_batches()
    assert complaints(ledger, log, monkeypatch) == ""


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda log: log[:1], "is lost"),
        (lambda log: [*log, log[0]._replace(offset=2)], "is there 2 times"),
        (
            lambda log: [
                log[0]._replace(value=log[1].value),
                log[1]._replace(value=log[0].value),
            ],
            "was said to hold",
        ),
        (lambda log: [log[0], log[1]._replace(value=b"9.0.x")], "never sent"),
        (lambda log: [log[0], log[1]._replace(value=b"2.0.x")], "other bytes"),
        (lambda log: [log[0], log[1]._replace(offset=3)], "is lost"),
    ],
)
def test_a_log_that_differs_is(damage, complaint, monkeypatch):
    ledger, log = two_batches()
    assert complaint in complaints(ledger, damage(log), monkeypatch)


def test_a_fetch_that_contradicts_an_acknowledgement_is_noticed() -> None:
    ledger, log = two_batches()
    ledger.read(0, [log[0]._replace(offset=1)])
    assert ledger.wrong_count == 1


def test_an_open_descriptor_more_or_less_is_noticed() -> None:
    from collections import Counter

    fresh = {"handler": Counter({"socket:[]": 2}), "supervisor": Counter()}
    now = {"handler": Counter({"socket:[]": 1, "pipe:[]": 1})}
    assert differences(fresh, now) == [
        "handler: 1 more pipe:[]",
        "handler: 1 less socket:[]",
    ]
