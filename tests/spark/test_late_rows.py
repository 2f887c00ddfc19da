"""Late rows are kept, dropped or set aside, and counted; so in each run of a batch."""

from __future__ import annotations

import datetime as dt
import io

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace
from pyarrow import fs

from mpbroker.spark.checkpoint import batch_time_s
from mpbroker.spark.pipeline.decode import row_schema
from mpbroker.spark.pipeline.description import Table, ValueFormat
from mpbroker.spark.pipeline.errors import PipelineError
from mpbroker.spark.pipeline.event_time import FILE, EventTimes
from mpbroker.spark.pipeline.progress import Progress
from mpbroker.spark.pipeline.staging import DROPPED, LATE, REACHED, ROWS, Stager
from mpbroker.spark.pipeline.tables.opening import open_table
from tests.spark.test_decode import batch_of

DAY_S = 86_400
VALUE = ValueFormat("json", {"at": "timestamp(s)", "day": "date"})
SCHEMA = row_schema(VALUE, with_headers=False)
# Ten days, and an unknown one. The last day is the latest of earlier batches.
VALUES = [b'{"at":%d,"day":"1970-01-%02d"}' % (n * DAY_S, n + 1) for n in range(10)]
VALUES.append(b"{}")


@pytest.mark.parametrize("event_time", ["at", "day"])
@pytest.mark.parametrize("fate", ["keep", "drop", "aside"])
def test_late_rows_go_where_the_description_says(fate, event_time, tmp_path):
    table = Table(
        str(tmp_path / "lake"),
        partition_by=("date",),
        event_time=event_time,
        late_after="3d",
        late=fate,
    )
    aside = replace(table, path=str(tmp_path / "late")) if fate == "aside" else None
    lakes = {ROWS: open_table(table, SCHEMA, "p")}
    if aside is not None:
        lakes[LATE] = open_table(aside, SCHEMA, "p")
    for lake in lakes.values():
        lake.claim("q")
    directories = {kind: lake.staging(0) for kind, lake in lakes.items()}
    reached_us = 9 * DAY_S * 1_000_000
    stager = Stager(
        VALUE, table, None, directories, False, 0, aside, reached_us=reached_us
    )
    [report] = stager([batch_of(VALUES)])
    files = report.to_pylist()
    for kind, lake in lakes.items():
        lake.commit(0, [each for each in files if each["kind"] == kind])
    assert sum(each["late"] for each in files) == 6
    assert days(lakes[ROWS]) == [*range(0 if fate == "keep" else 6, 10), None]
    if aside is not None:
        assert days(lakes[LATE]) == list(range(6))
    dropped = [each for each in files if each["kind"] == DROPPED]
    assert len(dropped) == (fate == "drop")


@pytest.mark.parametrize("event_time", ["at", "day"])
def test_a_row_without_event_time_is_at_the_day_of_its_record(event_time, tmp_path):
    path = str(tmp_path / "lake")
    table = Table(path, partition_by=("date",), event_time=event_time)
    lake = open_table(table, SCHEMA, "p")
    lake.claim("q")
    values = [b'{"at":864000,"day":"1970-01-11"}', None, b"{}"]
    stager = Stager(VALUE, table, None, {ROWS: lake.staging(0)}, False, 0)
    [report] = stager([batch_of(values)])
    lake.commit(0, [each for each in report.to_pylist() if each["kind"] == ROWS])
    found = pd.read_parquet(path)
    record_day = str(found["_timestamp"].iloc[0].date())
    assert record_day != "1970-01-11"
    assert sorted(map(str, found["date"])) == sorted(["1970-01-11", *[record_day] * 2])
    assert found[event_time].isna().sum() == 2


def days(lake):
    tables = [pq.ParquetFile(path).read() for path in lake.data_files()]
    found = pa.concat_tables(tables)["at"].to_pylist()
    numbers = [None if at is None else int(at.timestamp()) // DAY_S for at in found]
    return sorted(numbers, key=lambda each: (each is None, each))


@pytest.mark.parametrize("event_time", ["at", "day"])
def test_the_age_of_rows_counts_from_the_latest_of_earlier_batches(
    event_time, tmp_path
):
    table = Table(str(tmp_path / "lake"), event_time=event_time, late_after="3d")
    times = EventTimes(str(tmp_path / "checkpoint"))

    def late(batch_id, *days, planned_day=10_000):
        values = [
            b'{"at":%d,"day":"%s"}'
            % (day * DAY_S, str(dt.date(1970, 1, 1) + dt.timedelta(day)).encode())
            for day in days
        ]
        stager = Stager(
            VALUE,
            table,
            None,
            {ROWS: f"{tmp_path}/staged"},
            False,
            planned_day * DAY_S,
            reached_us=times.before(batch_id),
        )
        [report] = stager([batch_of([*values, b"{}"])])
        files = report.to_pylist()
        for each in files:
            if each["kind"] == REACHED:
                times.add(batch_id, int(each["partition"]))
        return sum(each["late"] for each in files)

    # A backlog of another year, in order: nothing is late, but for what comes after.
    assert [
        late(number, *range(9 * number, 9 * number + 10)) for number in range(4)
    ] == [0] * 4
    assert late(4, 32, 33, 34) == 1
    assert late(4, 32, 33, 34) == 1, "a batch that runs again is judged as before"
    assert late(5) == 0
    assert late(6, 32, 33) == 1, "a batch without event times changes nothing"
    # A time that cannot be is no progress, and hides none.
    assert late(7, 35, 20_000, planned_day=36) == 0
    assert late(8, 32, 31) == 1 + 1
    assert late(9, -719_000, -700_000) == 2


def test_event_times_that_a_later_version_has_written_are_refused(tmp_path):
    times = EventTimes(str(tmp_path))
    assert times.before(3) is None
    times.add(3, 70)
    times.add(4, 60)
    assert [times.before(each) for each in (3, 4, 5)] == [None, 70, 70]
    file = tmp_path / FILE
    for content in (b'{"version":2,"latest_us":{"4":[1]}}', b'{"version":2}', b"{"):
        file.write_bytes(content)
        why = "has version 2, and this mpbroker reads" if b"2" in content else "read:"
        with pytest.raises(PipelineError, match=f"{FILE} .*{why}"):
            times.before(5)


def test_a_batch_that_runs_again_has_the_time_of_its_first_run(tmp_path):
    offsets = tmp_path / "offsets"
    offsets.mkdir()
    meta = '{"batchWatermarkMs":0,"batchTimestampMs":1357016400500,"conf":{}}'
    (offsets / "7").write_text(f'v1\n{meta}\n{{"t":{{"0":5}}}}')
    files = fs.LocalFileSystem()
    assert batch_time_s(files, str(tmp_path), 7) == 1357016400.5
    (offsets / "8").write_text("v1\n")  # Spark was killed
    with pytest.raises(ValueError, match=r"offsets/8 is not Spark's"):
        batch_time_s(files, str(tmp_path), 8)


def test_the_line_of_a_batch_says_what_became_of_late_rows():
    progress = Progress("p", io.StringIO(), late_label="late and set aside")
    progress.batch(0, 10, 1.0, bad=0, late=1234)
    progress.report()
    first, last = progress.out.getvalue().splitlines()
    assert first == "p: batch 0: 10 rows, 1,234 late and set aside in 1.0 s, 10/s"
    assert last.endswith("0 bad, 1,234 late and set aside")
