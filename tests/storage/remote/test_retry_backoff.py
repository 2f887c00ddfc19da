"""A store that failed is asked again later and later, and the log tells once."""

from __future__ import annotations

import random

from mpbroker.base.storage_errors import RemoteStorageError, RemoteUnreachableError
from mpbroker.storage.remote.fetch_failures import FetchFailures
from mpbroker.storage.remote.retry_backoff import BackoffLimits, RetryBackoff


def test_the_time_doubles_up_to_a_limit_and_is_drawn_by_chance():
    now = [100.0]
    draw = random.Random(1)
    backoff = RetryBackoff(
        BackoffLimits(0.5, 30.0, 0.2), lambda: now[0], lambda: draw.random()
    )
    assert backoff.is_due() and not backoff.is_failing
    waits = []
    for _ in range(2000):
        backoff.failed()
        assert backoff.is_failing and not backoff.is_due()
        waits.append(backoff._due - now[0])
        now[0] = backoff._due
        assert backoff.is_due()
    for wait, middle in zip(waits, (0.5, 1, 2, 4, 8, 16, 30, 30), strict=False):
        assert middle * 0.8 <= wait <= middle * 1.2
    assert max(waits) <= 36 and min(waits[6:]) >= 24
    assert len(set(waits)) == len(waits)
    backoff.worked()
    assert backoff.is_due() and not backoff.is_failing


def test_the_log_tells_once_of_the_store_and_once_of_each_segment(caplog):
    caplog.set_level("INFO")
    failures = FetchFailures(BackoffLimits(first_s=1e9))
    away, damaged = RemoteUnreachableError("away"), RemoteStorageError("other bytes")
    for segment in ("a", "b"):
        for chunk in (0, 1):
            assert failures.may_ask(segment, chunk)
            failures.failed(segment, chunk, segment, away)
            assert not failures.may_ask(segment, chunk)
    assert failures.may_ask("a", 2)
    assert caplog.text.count("a: away") == 1 and "b: away" not in caplog.text
    failures.worked("a", 0)
    assert failures.may_ask("a", 0) and not failures.may_ask("a", 1)
    assert caplog.text.count("can be read again") == 1
    for segment in ("c", "d", "c"):
        failures.failed(segment, 0, segment, damaged)
    assert caplog.text.count("c: other bytes") == 1
    assert caplog.text.count("d: other bytes") == 1
    failures.worked("c", 0)
    failures.failed("c", 0, "c", damaged)
    assert caplog.text.count("c: other bytes") == 2
