"""Quotas in the metrics: rates, and how often and how long clients were held."""

import time

from mpbroker.exporter.exposition import render
from mpbroker.exporter.quota_metrics import quota_families
from mpbroker.ipc.tables.quota_table import QuotaKind, QuotaTable

S = 1_000_000_000


def test_clients_with_quotas_show_their_rates_and_throttles():
    segment = QuotaTable.create_segment()
    table = QuotaTable(segment, 11, S)
    now = time.monotonic_ns()
    table.find(QuotaKind.PRODUCE, "u", 'c"1', now).charge(2000, 100, now)
    table.find(QuotaKind.REQUEST, "u", "", now).charge(S // 2, S, now)
    text = render(quota_families(segment, 11, S)).decode()
    client = '{quota="producer_byte_rate",user="u",client_id="c\\"1"}'
    assert f"mpbroker_throttles_total{client} 1\n" in text
    assert f"mpbroker_throttle_seconds_total{client} 10\n" in text
    [line] = [
        line for line in text.splitlines() if line.startswith("mpbroker_quota_bytes_")
    ]
    # It goes down as time goes by.
    assert 0 < float(line.rpartition(" ")[2]) <= 200
    assert 'mpbroker_quota_time_ratio{quota="request_percentage",user="u"' in text
    assert "mpbroker_quota_clients_refused_total 0\n" in text


def test_no_two_clients_are_shown_as_one_however_long_their_names_are():
    segment = QuotaTable.create_segment()
    table = QuotaTable(segment, 11, S)
    now = time.monotonic_ns()
    places = [("u", "c" * 300), ("u", "c" * 301), ("u" * 300, "c"), ("u" * 300, "d")]
    for user, client_id in places:
        table.find(QuotaKind.PRODUCE, user, client_id, now).charge(2000, 100, now)
    table.find(QuotaKind.PRODUCE, "u", "short", now).charge(1, 100, now)
    shown = {
        labels
        for family in quota_families(segment, 11, S)
        if family.name == "mpbroker_throttles_total"
        for _, labels, _ in family.samples
    }
    assert len(shown) == len(places) + 1
    assert ("client_id", "short") in {pair for labels in shown for pair in labels}
