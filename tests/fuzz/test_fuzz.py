"""A short fuzzing run with the suite; CI also runs `python -m tests.fuzz` longer."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from tests.bench import wire
from tests.fuzz import scenarios
from tests.fuzz.attack import Attacker, BrokenPromiseError
from tests.fuzz.campaign import Campaign
from tests.fuzz.recent import CLASSES, TOPIC_ID, plausible_request
from tests.fuzz.scenarios import Owed, Scenario
from tests.support.broker import Broker


def test_hostile_bytes_hurt_nobody_else(
    make_broker: Callable[..., Broker], tmp_path: Path
) -> None:
    Campaign(make_broker(), seed=2, save_dir=tmp_path).run(seconds=4.0)


def test_a_scenario_depends_on_seed_and_number_alone() -> None:
    first = [scenarios.scenario(1, n) for n in range(50)]
    assert first == [scenarios.scenario(1, n) for n in range(50)]
    assert first != [scenarios.scenario(2, n) for n in range(50)]


@pytest.mark.parametrize("owed", Owed)
def test_a_broker_that_breaks_its_promise_is_found_out(
    liar: tuple[str, int], owed: Owed
) -> None:
    bad = Scenario("probe", [wire.api_versions()], owed, [0])
    with pytest.raises(BrokenPromiseError):
        Attacker(liar).play(bad, 0)


def test_plausible_requests_reach_the_topic_in_its_newest_versions() -> None:
    """By name and by id, of which the campaign knows the right one."""
    made = [plausible_request(Random(n))[0] for n in range(3000)]
    named = {struct.unpack_from(">hh", payload) for payload in made}
    newest = {(cls.api_key, cls.valid_versions[-1]) for cls, _ in CLASSES}
    assert newest <= named
    by_id = [p for p in made if TOPIC_ID in p]
    assert {(0, 13), (1, 18)} <= {struct.unpack_from(">hh", p) for p in by_id}
