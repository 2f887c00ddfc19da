"""Clients' rates in shared memory: Kafka's numbers, whoever counts and whoever dies."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpbroker.ipc.quota_layout import (
    MAX_QUOTA_ROWS,
    QUOTA_CHARGED,
    QUOTA_REFUSED,
    quota_row,
)
from mpbroker.ipc.tables import quota_table
from mpbroker.ipc.tables.quota_table import (
    GONE,
    PROBES,
    QuotaKind,
    QuotaTable,
    read_quotas,
)

S = 1_000_000_000
START = 1000 * S
KIND = QuotaKind.PRODUCE


@pytest.fixture
def segment():
    return QuotaTable.create_segment()


@pytest.fixture
def table(segment):
    return QuotaTable(segment, 11, S)


def find(table, user="", client_id="c", kind=KIND, now=START):
    row = table.find(kind, user, client_id, now)
    assert row is not None
    return row


def test_a_spike_is_throttled_as_kafka_throttles_it(table):
    # ClientQuotaManagerTest.testQuotaViolation: 6300 bytes in 10.5 s are 600 a second;
    # 100 above 500, times 10.5 s, is 2100 ms.
    row, now = find(table), START
    for _ in range(10):
        assert row.charge(400, 500, now) == 0
        now += S
    now += S // 2
    assert row.charge(2300, 500, now) == 2100
    now += 2100 * S // 1000
    for _ in range(10):
        row.charge(400, 500, now)
        now += S
    assert row.charge(0, 500, now) == 0


def test_a_raised_bound_counts_at_once_and_what_was_charged_still_counts(table):
    row = find(table)
    assert row.charge(2500 * 11, 2000, START) > 0
    assert row.charge(0, 3000, START) == 0
    assert row.charge(0, 500, START) > 0


def test_a_refund_takes_back(table):
    row = find(table)
    assert row.charge(50_000, 1000, START) > 0
    assert row.charge(-50_000, 1000, START) == 0
    assert row.charge(10_000, 1000, START) == 0
    assert row.charge(1, 1000, START) == 1  # 10,001 in 10 s: a ms too many


def test_what_is_older_than_all_windows_is_forgotten(table):
    row = find(table)
    assert row.charge(10_000_000, 1000, START) > 0
    assert row.charge(0, 1000, START + 10 * S) > 0
    assert row.charge(0, 1000, START + 11 * S) == 0


class Oracle:
    """Kafka's SampledStat and Rate, written down plainly."""

    def __init__(self, samples, window):
        self._count, self._window = samples, window
        self._samples = []  # start, value, last
        self._current = 0

    def charge(self, amount, bound, now):
        samples, window = self._samples, self._window
        if not samples:
            samples.append([now, 0, now])
        if now - samples[self._current][0] >= window:
            self._current = (self._current + 1) % (self._count + 1)
            if self._current >= len(samples):
                samples.append([now, 0, now])
            else:
                samples[self._current] = [now, 0, now]
        samples[self._current][1] += amount
        samples[self._current][2] = now
        for sample in samples:
            if now - sample[2] >= self._count * window:
                sample[:] = [now, 0, now]
        elapsed = now - min(sample[0] for sample in samples)
        missing = max(0, self._count - 1 - elapsed // window)
        elapsed = max(elapsed + missing * window, 1_000_000)
        rate = sum(sample[1] for sample in samples) / (elapsed / 1e9)
        return max(0.0, (rate - bound) / bound * elapsed / 1e6)


@given(
    st.lists(
        st.tuples(st.integers(0, 4 * S), st.integers(0, 5000)), min_size=1, max_size=80
    ),
    st.integers(1, 12),
    st.integers(1, 3),
)
@settings(max_examples=100, deadline=None)
def test_any_history_gives_kafkas_throttle_time(history, samples, window_s):
    table = QuotaTable(QuotaTable.create_segment(), samples, window_s * S)
    row, oracle, now = find(table), Oracle(samples, window_s * S), START
    for pause, amount in history:
        now += pause
        found = row.charge(amount, 700.0, now)
        assert abs(found - oracle.charge(amount, 700.0, now)) < 0.6


def test_kinds_users_and_clients_are_counted_apart(table):
    clients = [("a", ""), ("", "a"), ("a", "a"), ("b", "a"), ("a", "b")]
    rows = [
        find(table, user, client, kind)
        for user, client in clients
        for kind in QuotaKind
    ]
    assert len({row.row for row in rows}) == len(rows)
    assert find(table, "a", "b", QuotaKind.FETCH) in rows


def test_a_strict_bucket_refuses_only_while_there_is_a_debt(table):
    # StrictControllerMutationQuotaTest.
    row = find(table, kind=QuotaKind.CONTROLLER_MUTATION)
    take = lambda permits, now: row.mutate(permits, 10, 100, now, strict=True)  # noqa: E731
    assert take(90, START) == (True, 0)
    assert take(90, START) == (True, 0)
    assert take(90, START) == (False, 8000)
    assert take(90, START + 5 * S) == (False, 3000)
    assert take(1, START + 8 * S) == (True, 0)


def test_a_permissive_bucket_takes_all_and_says_how_long_to_wait(table):
    # PermissiveControllerMutationQuotaTest.
    row = find(table, kind=QuotaKind.CONTROLLER_MUTATION)
    take = lambda permits, now: row.mutate(permits, 10, 100, now, strict=False)  # noqa: E731
    assert take(90, START) == (True, 0)
    assert take(90, START) == (True, 8000)
    assert take(90, START) == (True, 17000)
    assert take(0, START + 5 * S) == (True, 12000)


def test_processes_count_together_and_lose_nothing(segment):
    def count():
        row = find(QuotaTable(segment, 11, S))
        for step in range(2000):
            row.charge(3, 1e12, START + step)
        os._exit(0)

    children = []
    for _ in range(4):
        pid = os.fork()
        if not pid:
            count()
        children.append(pid)
    for pid in children:
        assert os.waitpid(pid, 0)[1] == 0
    row = find(QuotaTable(segment, 11, S))
    assert segment.words[quota_row(row.row) + QUOTA_CHARGED] == 4 * 2000 * 3


class _DyingWords:
    """Words of which the store number ``last`` is the last that its writer makes."""

    def __init__(self, words, last):
        self._words, self._left = words, last

    def __getitem__(self, index):
        return self._words[index]

    def __setitem__(self, index, value):
        if not self._left:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1
        self._words[index] = value


@pytest.mark.parametrize("stores", range(8))
@pytest.mark.parametrize("later", [0, 2 * S], ids=["same window", "next window"])
def test_who_is_killed_while_it_counts_leaves_a_charge_more_or_less(
    segment, stores, later
):
    row = find(QuotaTable(segment, 11, S))
    row.charge(100, 1000, START)
    pid = os.fork()
    if not pid:
        row._words = _DyingWords(segment.words, stores)
        row.charge(20_000, 1000, START + later)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    successor = find(QuotaTable(segment, 11, S))
    counted = successor.charge(0, 1000, START + later)  # and it takes the lock
    assert counted in (0, round((20_100 / 10 - 1000) / 1000 * 10_000), 8280, 10_100)
    assert successor.charge(-100_000, 1000, START + later) == 0


@pytest.mark.parametrize("stores", [0, 1, 2, 100, 245, 250])
def test_who_is_killed_while_it_gives_a_row_gives_none(segment, stores):
    pid = os.fork()
    if not pid:
        table = QuotaTable(segment, 11, S)
        table._words = _DyingWords(segment.words, stores)
        table.find(KIND, "", "c", START)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    table = QuotaTable(segment, 11, S)
    row = find(table)
    assert row.charge(10, 1000, START) == 0
    assert [each.charged for each in read_quotas(segment, 11, S, START, S)] == [10]
    assert os.WIFSIGNALED(status) == (stores < 250)


def test_a_row_that_says_nothing_any_more_is_given_to_another(table, monkeypatch):
    monkeypatch.setattr(quota_table, "_key", lambda place: (7, hash(place)))
    first = find(table, client_id="first")
    assert first.charge(10, 1000, START) == 0
    for number in range(PROBES - 1):
        find(table, client_id=str(number))
    assert table.find(KIND, "", "one more", START + 11 * S) is None
    assert find(table, client_id="one more", now=START + 12 * S).row in {
        (7 + step) % MAX_QUOTA_ROWS for step in range(PROBES)
    }
    for number in range(PROBES - 1):
        find(table, client_id=f"and {number}", now=START + 12 * S)
    assert first.charge(10, 1000, START) == GONE
    again = find(table, client_id="first", now=START + 24 * S)
    assert again.charge(10, 1000, START + 24 * S) == 0


def test_clients_that_find_no_row_are_counted(segment, table, monkeypatch):
    monkeypatch.setattr(quota_table, "_key", lambda place: (7, hash(place)))
    for number in range(PROBES):
        find(table, client_id=str(number))
    assert table.find(KIND, "", "late", START) is None
    assert segment.words[QUOTA_REFUSED] == 1
    find(table, client_id="0")


def test_readings_name_clients_and_rates(segment, table):
    find(table, "ü", "c" * 1000).charge(1000, 50, START)
    [reading] = read_quotas(segment, 11, S, START, S)
    assert (reading.kind, reading.user, reading.client_id[:3]) == (KIND, "ü", "ccc")
    assert (reading.rate, reading.charged, reading.throttles) == (100.0, 1000, 1)
    assert reading.throttle_ms == 10_000
    assert not list(read_quotas(segment, 11, S, START + 3 * S, S))
