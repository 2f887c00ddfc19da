"""Groups and transactions in a campaign; and proof that what is wrong is found."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.chaos.campaign import Campaign, Promises, Result, table
from tests.chaos.company import MAX_SILENCE_S, Group, Notes, Told
from tests.chaos.stalls import LOADED


def test_groups_and_transactions_notice_no_death_of_the_coordinator(
    tmp_path: Path,
) -> None:
    campaign = Campaign(tmp_path, connections=8)
    try:
        campaign.accompany()
        killed = campaign.kills("coordinator", 4, Promises(disconnects=0))
        campaign.part()
        campaign.leftovers()
        assert all(result.ok for result in campaign.results), table(campaign.results)
        assert killed.events == 4
        assert killed.transactions > 1
        assert killed.delivered > 1
    finally:
        campaign.close()


def test_what_was_committed_outlives_the_supervisor(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path, connections=8)
    try:
        campaign.accompany(session_ms=6000)
        campaign.supervisor_kills(2)
        campaign.part()
        assert all(result.ok for result in campaign.results), table(campaign.results)
    finally:
        campaign.close()


# -- the checker can be disappointed ---------------------------------------------------


def message(offset: int, value: bytes) -> SimpleNamespace:
    return SimpleNamespace(
        error=lambda: None,
        topic=lambda: "t",
        partition=lambda: 0,
        offset=lambda: offset,
        value=lambda: value,
    )


def test_a_record_below_what_was_committed_is_noticed() -> None:
    notes = Notes()
    group = Group("g", "127.0.0.1:9", "t", "classic", notes)
    group.take(message(4, b"a"), {("t", 0): 5}, {})
    assert ["below" in text for text in notes.take().wrong] == [True]


def test_a_record_that_comes_again_is_noticed() -> None:
    notes = Notes()
    group = Group("g", "127.0.0.1:9", "t", "classic", notes)
    got: dict[tuple[str, int], int] = {}
    for offset in (0, 1, 1):
        group.take(message(offset, b"a"), {}, got)
    assert ["1 after 2" in text for text in notes.take().wrong] == [True]


def test_records_that_a_group_was_not_given_and_those_of_no_log_are_noticed() -> None:
    notes = Notes()
    group = Group("g", "127.0.0.1:9", "t", "classic", notes)
    group.delivered = Counter([b"there", b"strange"])
    group.compare(committed={b"there", b"missing"}, there={b"there", b"missing"})
    assert notes.take().wrong == [
        "g was not given 1 committed records: [b'missing']",
        "g got what no log has: [b'strange']",
    ]


def test_errors_break_a_stage_whose_connections_are_promised_to_last() -> None:
    told = Told(errors={"writer: NOT_COORDINATOR": 2}, stuck=["classic-1"])
    kept, restarted = (
        Campaign.with_told("stage", Promises(disconnects=number), told, MAX_SILENCE_S)
        for number in (0, None)
    )
    assert kept.broken == ["1 clients stuck", "2 errors; promised 0"]
    assert restarted.broken == ["1 clients stuck"]


@pytest.mark.parametrize(
    ("disconnects", "broken"), [(0, ["2 errors; promised 0"]), (None, [])]
)
def test_what_is_heard_after_the_last_stage_is_judged_as_in_it(disconnects, broken):
    campaign = Campaign.__new__(Campaign)
    campaign.results = [Result("stage", Promises(disconnects=disconnects))]
    campaign._crowd = 1.0
    told = Told(errors={"classic-2: _TRANSPORT": 2})
    company = SimpleNamespace(end=lambda: told, close=lambda: None)
    campaign._company = company  # type: ignore[assignment]
    assert campaign.part().broken == broken


@pytest.mark.parametrize("crowd", [1, 3])
def test_a_group_that_waits_for_the_session_of_no_dead_member_is_stuck(
    monkeypatch: pytest.MonkeyPatch, crowd: int
) -> None:
    """On a slow machine, too; and one that is as slow as the machine is not."""
    load = crowd * LOADED * (os.cpu_count() or 1)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    campaign, sessions = Campaign.__new__(Campaign), []
    campaign.broker = SimpleNamespace(listeners={})  # type: ignore[assignment]
    campaign._companies = 0
    made = SimpleNamespace()
    monkeypatch.setattr(
        "tests.chaos.campaign.Company",
        lambda bootstrap, name, session_ms: sessions.append(session_ms) or made,
    )
    campaign.accompany()
    most_s = campaign._max_silence_s()
    for longest_s, broken in (
        (crowd * 40.0, []),
        (sessions[0] / 1000, ["1 clients stuck"]),
    ):
        told = Told(longest_s=longest_s)
        result = Campaign.with_told("stage", Promises(disconnects=0), told, most_s)
        assert result.broken == broken


def test_a_load_that_went_during_a_stage_counts(monkeypatch) -> None:
    campaign = Campaign.__new__(Campaign)
    campaign._crowd = 3.0
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    assert campaign._max_silence_s() == 3 * MAX_SILENCE_S
    assert campaign._max_silence_s() == MAX_SILENCE_S
