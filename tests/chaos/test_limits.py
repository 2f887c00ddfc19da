"""The limits on pauses that a campaign may set: they can be broken."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from tests.chaos import __main__ as chaos
from tests.chaos.campaign import Campaign, Promises, Result, dying_command, table


def test_a_supervisor_that_repairs_late_breaks_the_limit(tmp_path: Path) -> None:
    """All wait for the only handler's successor, 8 s longer than for a sound one."""
    campaign = Campaign(
        tmp_path,
        connections=8,
        config={"num.io.threads": 1},
        command=dying_command(tmp_path / "never", "late-repair", "none", 1),
    )
    try:
        result = campaign.kills("handler", 1, Promises(disconnects=0, pause_ms=1000))
    finally:
        pid = campaign.broker.pid
        campaign.close()
    assert not list(Path("/dev/shm").glob(f"mpbroker-{pid}-*"))
    assert [text[:7] for text in result.broken] == ["a pause"], table([result])


@pytest.mark.parametrize(
    ("arguments", "load", "limit_ms"),
    [
        ([], 0, None),
        (["--limits", "10"], 0, 1000),
        (["--limits", "10"], 4, 1000),
        (["--limits", "10"], 12, 3000),
        (["--pauses"], 12, 100),
        (["--pauses", "--limits", "10"], 0, 100),
    ],
)
def test_a_stage_is_held_to_so_many_times_what_is_promised(
    arguments: list[str],
    load: float,
    limit_ms: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cores = os.cpu_count() or 1
    monkeypatch.setattr(os, "getloadavg", lambda: (load * cores, 0.0, 0.0))
    promises = Promises(disconnects=0, pause_ms=100)
    held_to = chaos.promise(promises, chaos.parse(arguments))
    assert held_to == Promises(disconnects=0, pause_ms=limit_ms)
    longer = Result("a stage", held_to, worst_net_ms=3001)
    assert longer.ok == (limit_ms is None)


@pytest.mark.parametrize(("before", "after"), [(12, 0), (0, 12)])
def test_a_load_that_comes_or_goes_during_a_stage_counts(
    before: float, after: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = iter((before, after))
    cores = os.cpu_count() or 1
    monkeypatch.setattr(os, "getloadavg", lambda: (next(loads) * cores, 0.0, 0.0))
    held = chaos.held(
        partial(Result, "a stage", worst_net_ms=2999),
        Promises(pause_ms=100),
        chaos.parse(["--limits", "10"]),
    )
    assert (held.promises.pause_ms, held.ok) == (3000, True)


@pytest.mark.parametrize(
    ("arguments", "judges"),
    [([], False), (["--limits", "10"], True), (["--pauses"], True)],
)
def test_the_verdict_says_whether_pauses_were_judged(
    arguments: list[str], judges: bool
) -> None:
    said = chaos.judged(chaos.parse(arguments))
    assert ("Not judged: how long pauses were" not in said) == judges
    assert "no record lost, doubled, reordered" in said
