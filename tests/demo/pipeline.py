"""The flights of 2013 through a broker into a lake, by window, and as a picture.

Publishes every flight as JSON, in the order of departure, runs two pipelines from their
TOML (both are left beside the results, to be run again by hand), and proves: the lake
has each flight once with its fields; each day's window has the data set's count and
mean delay. Then draws flights and delays by day.

    python -m tests.demo.pipeline [--out DIR]
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from mpbroker.base.errors import MpbrokerError
from mpbroker.spark.pipeline.run import run_file
from tests.demo.flights import (
    EXPECTED,
    DemoFailedError,
    create_topic,
    fail,
    flights,
    own_broker,
    publish,
)
from tests.demo.plot import Series, draw

TOPIC: Final = "flights"
NUMBERS: Final = ("flight", "dep_delay", "arr_delay", "distance")
TEXTS: Final = ("carrier", "tailnum", "origin", "dest", "time_hour")

INGEST: Final = """\
# Topic to lake: mpbroker pipeline run ingest.toml
[pipeline]
job = "ingest"
name = "flights"
checkpoint = "{out}/checkpoints/ingest"

[source]
bootstrap = "{bootstrap}"
subscribe = "flights"
maxOffsetsPerTrigger = 120000

[value]
format = "json"
[value.fields]
carrier = "string"
flight = "int"
tailnum = "string"
origin = "string"
dest = "string"
dep_delay = "double"
arr_delay = "double"
distance = "double"
time_hour = "timestamp"

[table]
path = "{out}/lake/flights"
partition_by = ["origin"]
event_time = "time_hour"

[dead_letter]
path = "{out}/lake/flights_bad"
"""

AGGREGATE: Final = """\
# Windows of a day: mpbroker pipeline run daily.toml
[pipeline]
job = "aggregate"
name = "daily"
checkpoint = "{out}/checkpoints/daily"

[source]
bootstrap = "{bootstrap}"
subscribe = "flights"
maxOffsetsPerTrigger = 120000

[value]
format = "json"
[value.fields]
origin = "string"
dep_delay = "double"
time_hour = "timestamp"

[aggregate]
event_time = "time_hour"
window = "1 day"
watermark = "7 days"
[aggregate.measures]
flights = "count(*)"
mean_delay = "avg(dep_delay)"

[table]
path = "{out}/lake/daily"
"""


def documents() -> list[dict[str, Any]]:
    """Return every flight with the fields that the pipelines know, by departure."""
    lines = [line.decode() for _, line in flights()]
    columns = HEADER.split(",")
    found = []
    for line in lines:
        fields = dict(zip(columns, line.split(","), strict=True))
        document: dict[str, Any] = {name: fields[name] for name in TEXTS}
        for name in NUMBERS:
            document[name] = None if fields[name] == "NA" else int(fields[name])
        found.append(document)
    return sorted(found, key=lambda each: str(each["time_hour"]))


HEADER: Final = (
    "year,month,day,dep_time,sched_dep_time,dep_delay,arr_time,sched_arr_time,"
    "arr_delay,carrier,flight,tailnum,origin,dest,air_time,distance,hour,minute,"
    "time_hour"
)


def check_lake(out: Path, sent: list[dict[str, Any]]) -> None:
    """Compare the lake with the data set, flight by flight."""
    table = ds.dataset(out / "lake" / "flights", partitioning="hive").to_table()
    if table.num_rows != EXPECTED:
        fail(f"the lake has {table.num_rows:,} rows, not {EXPECTED:,}")
    hours = table.column("time_hour").cast(pa.timestamp("s", tz="UTC"))
    times = pc.strftime(hours, "%Y-%m-%dT%H:%M:%SZ")
    names = [*TEXTS[:-1], *NUMBERS]
    columns = [table.column(name).to_pylist() for name in names]
    rows = sorted(map(repr, zip(times.to_pylist(), *columns, strict=True)))
    wanted = sorted(
        repr(
            (
                each["time_hour"],
                *(each[name] for name in TEXTS[:-1]),
                each["flight"],
                *(_float(each[name]) for name in NUMBERS[1:]),
            )
        )
        for each in sent
    )
    if rows != wanted:
        fail("the lake's rows are not the data set's")
    print(f"lake: every one of {EXPECTED:,} flights once, all fields equal")


def _float(value: int | None) -> float | None:
    return None if value is None else float(value)


def check_windows(out: Path, sent: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare each window with the data set; return them by day."""
    counts: dict[str, int] = defaultdict(int)
    delays: dict[str, list[float]] = defaultdict(list)
    for each in sent:
        day = each["time_hour"][:10]
        counts[day] += 1
        if each["dep_delay"] is not None:
            delays[day].append(each["dep_delay"])
    table = ds.dataset(out / "lake" / "daily").to_table()
    windows = sorted(table.to_pylist(), key=lambda each: each["window_start"])
    for window in windows:
        day = str(window["window_start"].date())
        mean = sum(delays[day]) / len(delays[day])
        if window["flights"] != counts[day] or abs(window["mean_delay"] - mean) > 1e-9:
            fail(f"window {day}: {window}, not {counts[day]} and {mean}")
    if len(windows) != len({each["window_start"] for each in windows}):
        fail("a window came twice")
    missing = len(counts) - len(windows)
    if not 0 <= missing <= 9:
        fail(f"{missing} of {len(counts)} days have no window")
    print(
        f"windows: {len(windows)} of {len(counts)} days, each as in the data set; the"
        f" last {missing} wait for the watermark"
    )
    return windows


def run(bootstrap: str, out: Path) -> None:
    sent = documents()
    if len(sent) != EXPECTED:
        fail(f"the data set has {len(sent):,} flights, not {EXPECTED:,}")
    create_topic(bootstrap, TOPIC)
    records = [(each["tailnum"].encode(), orjson.dumps(each)) for each in sent]
    _, figures = publish(bootstrap, TOPIC, records)
    print(f"published {figures}")
    for name, text in (("ingest", INGEST), ("daily", AGGREGATE)):
        path = out / f"{name}.toml"
        path.write_text(text.format(out=out, bootstrap=bootstrap))
        report = run_file(path)
        if report["bad"] or report["late"]:
            fail(f"{name}: {report}")
    check_lake(out, sent)
    windows = check_windows(out, sent)
    picture = out / "flights.svg"
    days = [each["window_start"].date() for each in windows]
    picture.write_text(
        draw(
            "Flights out of New York, 2013: streamed through mpbroker and Spark",
            days,
            [
                Series("flights a day", [each["flights"] for each in windows]),
                Series(
                    "mean departure delay, minutes",
                    [each["mean_delay"] for each in windows],
                ),
            ],
        )
    )
    print(f"drawn: {picture}")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/demo-pipeline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out", type=Path, default=Path("demo-pipeline"), help="a new directory"
    )
    out = parser.parse_args().out.resolve()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        if out.exists():
            fail(f"{out} is there already; remove it, or name another with --out")
        out.mkdir(parents=True)
        with own_broker() as bootstrap:
            run(bootstrap, out)
    except (DemoFailedError, MpbrokerError) as error:
        sys.exit(f"FAILED: {error}")


if __name__ == "__main__":
    main()
