"""Driver, executors, broker and store are killed at any moment: each row is there once.

The short form of `tests.spark.flights_campaign`, with invented flights, and one kill of
each. MPBROKER_SPARK_KILLS says how many kills; 20 are for the night, since Spark is
started anew after each kill of a driver:

    MPBROKER_SPARK_KILLS=20 scripts/test tests/spark/test_kills.py -s

0 leaves it out.
"""

from __future__ import annotations

import datetime
import os
import time

import pytest

from tests.spark.cluster import has_java
from tests.spark.flights_campaign import TABLES, VICTIMS, run

KILLS = int(os.environ.get("MPBROKER_SPARK_KILLS", len(VICTIMS)))
# Each job, and each format, once.
SHORT = [("rows", "parquet"), ("windows", "delta"), ("upsert", "iceberg")]

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.timeout(2400 + 300 * KILLS),
    pytest.mark.skipif(not KILLS, reason="MPBROKER_SPARK_KILLS=0"),
    pytest.mark.skipif(not has_java(), reason="Spark needs Java, and there is none"),
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


def test_each_flight_is_in_the_tables_once_whoever_is_killed(tmp_path):
    seed = int(os.environ.get("MPBROKER_SPARK_SEED", time.time_ns() % 100_000))
    print(f"MPBROKER_SPARK_SEED={seed}")
    tables = SHORT if len(VICTIMS) >= KILLS else TABLES
    run(invented(400 * max(KILLS, 4)), KILLS, tmp_path, tables=tables, seed=seed)
