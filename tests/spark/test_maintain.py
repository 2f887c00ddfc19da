"""Maintenance merges files and lets the old go; no row is lost or doubled by it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from mpbroker.cli.spark.pipeline import command
from mpbroker.spark.pipeline.description import Maintain
from mpbroker.spark.pipeline.errors import PipelineError
from mpbroker.spark.pipeline.tables import iceberg, maintain
from mpbroker.spark.pipeline.tables.lake import ParquetTable
from mpbroker.spark.pipeline.tables.maintain import maintain_table
from tests.spark.lakes import FORMATS, bring, lake_table, numbers, opened, rows, stage

DAY_S = 86_400
KEEP = Maintain(keep_snapshots="2d")


@pytest.fixture(params=FORMATS)
def table(request, tmp_path):
    return lake_table(request.param, str(tmp_path / "lake"), f"{tmp_path}/catalog.db")


def fill(table, batches=6):
    for batch_id in range(batches):
        bring(opened(table), batch_id)


def data_files(table):
    return {
        str(each)
        for each in Path(table.path).rglob("*.parquet")
        if "_mpbroker" not in each.parts and "_delta_log" not in each.parts
    }


def make_old(table, days=30):
    """Make the files look as if they had been written long ago."""
    for path in Path(table.path).rglob("*"):
        os.utime(path, (time.time() - days * DAY_S,) * 2)


def test_small_files_are_merged_and_rows_and_batches_stay(table):
    fill(table)
    before = len(data_files(table))
    done = maintain_table(table, KEEP, "_timestamp")
    assert (done.before, done.after) == (before, before // 6)
    assert numbers(table) == list(range(60))
    bring(opened(table), 5)  # which is still known
    bring(opened(table), 6)
    assert numbers(table) == list(range(70))
    assert maintain_table(table, KEEP, "_timestamp").rows is None


def test_old_rows_go_and_the_others_stay(table):
    fill(table, 3)
    # Rows are of the 1st to the 3rd of January 1970: on the 4th, keep those of a day.
    settings = Maintain(keep_rows="36h")
    done = maintain_table(table, settings, "_timestamp", now_s=3.5 * DAY_S)
    assert numbers(table) == [n for n in range(30) if n % 3 == 2]
    # In a Parquet directory whole files: three of each batch.
    assert done.rows == (9 if table.format == "parquet" else 20)
    bring(opened(table), 2)
    bring(opened(table), 3)
    assert set(range(30, 40)) <= set(numbers(table))


def test_a_field_named_date_does_not_say_how_old_a_row_is(tmp_path):
    table = lake_table("delta", str(tmp_path / "lake"), "")
    fill(table, 1)
    keep = Maintain(keep_rows="1d")
    now_s = 3 * DAY_S
    maintain_table(table, keep, "_timestamp", now_s=now_s, by_day=False)
    assert numbers(table) == [n for n in range(10) if n % 3 == 2]
    predicate = maintain._delta_predicate(
        maintain.open_delta(table.path),
        maintain._Task(table, keep, "_timestamp", "p", now_s, False),
        maintain._utc(0),
    )
    assert not predicate.startswith("date")


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_old_snapshots_and_files_of_no_snapshot_are_deleted(kind, tmp_path):
    table = lake_table(kind, str(tmp_path / "lake"), f"{tmp_path}/catalog.db")
    fill(table)
    stage(opened(table), 7, rows(0, 10))  # a task's that was not committed
    maintain_table(table, KEEP, "_timestamp")
    assert len(data_files(table)) > 24  # all of them young
    make_old(table)
    done = maintain_table(table, KEEP, "_timestamp", now_s=time.time() + 3 * DAY_S)
    # Delta's log says when a file was removed: a moment ago.
    assert done.files
    if kind == "iceberg":
        # The pipeline's last snapshot says which batch is in the table.
        assert done.snapshots >= 5
        stored = iceberg.load_iceberg_catalog(table).load_table(table.identifier)
        assert len(stored.snapshots()) == 2
    assert numbers(table) == list(range(60))
    found = opened(table)
    assert found.has_batch(5) and not found.has_batch(6)
    if kind == "delta":
        return
    # The batch under way, in a run at today's time.
    young = stage(opened(table), 6, rows(60, 70))
    maintain_table(table, KEEP, "_timestamp")
    opened(table).commit(6, young)
    assert numbers(table) == list(range(70))


def test_a_pipeline_writes_on_while_its_table_is_maintained(table):
    fill(table, 4)
    ended = threading.Event()
    failures = []

    def write():
        try:
            for batch_id in range(4, 14):
                bring(opened(table), batch_id)
        except PipelineError as error:
            failures.append(error)
        finally:
            ended.set()

    thread = threading.Thread(target=write)
    thread.start()
    rounds = 0
    while not ended.is_set():
        maintain_table(table, KEEP, "_timestamp")
        rounds += 1
    thread.join()
    assert not failures and rounds
    assert numbers(table) == list(range(140))
    maintain_table(table, KEEP, "_timestamp")
    assert numbers(table) == list(range(140))


KILLING = """
import os, signal, sys
from pyiceberg.catalog.sql import SqlCatalog
from mpbroker.spark.pipeline.tables import lake, maintain
from mpbroker.spark.pipeline.description import Maintain
from tests.spark.lakes import lake_table

left = int(sys.argv[4])

def step():
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)

def dying(function):
    def call(*arguments, **options):
        step()
        found = function(*arguments, **options)
        step()
        return found
    return call

for place, names in (
    (lake.ParquetTable, ("_move", "_write_json", "_apply")),
    (maintain, ("_merged", "_replace", "_expire", "_delete_unused", "_delete_old")),
    (SqlCatalog, ("commit_table",)),
):
    for name in names:
        setattr(place, name, dying(getattr(place, name)))
table = lake_table(sys.argv[1], sys.argv[2], sys.argv[3])
settings = Maintain("1h", "36h")
maintain.maintain_table(table, settings, "_timestamp", now_s=3.5 * 86_400)
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["parquet", "iceberg"])
def test_maintenance_killed_at_any_step_loses_and_doubles_nothing(kind, tmp_path):
    table = lake_table(kind, str(tmp_path / "lake"), f"{tmp_path}/catalog.db")
    fill(table, 3)
    kept = [n for n in range(30) if n % 3 == 2]
    killed = 0
    for step in (1, 3, 4, 6, 9, 1000):
        command = [sys.executable, "-c", KILLING, kind, table.path]
        done = subprocess.run(
            [*command, f"{tmp_path}/catalog.db", str(step)], check=False
        )
        killed += done.returncode == -9
        found = numbers(table)
        assert len(found) == len(set(found)) and set(found) <= set(range(30))
        if kind == "iceberg":  # whose readers miss nothing meanwhile
            assert set(kept) <= set(found)
    assert done.returncode == 0
    assert killed >= 3
    assert numbers(table) == kept


def test_two_never_merge_a_parquet_directory_at_once(tmp_path):
    table = lake_table("parquet", str(tmp_path / "lake"), "")
    fill(table)
    other = opened(table)
    before = len(data_files(table))
    with ParquetTable._compacting(other) as alone:
        assert alone
        assert opened(table).compact() == (before, before)
        assert maintain_table(table, KEEP, "_timestamp").after == before
        with pytest.raises(PipelineError, match="being merged by another process"):
            maintain_table(table, Maintain(keep_rows="1d"), "_timestamp")
    assert opened(table).compact() == (before, before // 6)


def test_a_merge_that_was_killed_is_finished_by_whoever_merges_next(
    tmp_path, monkeypatch
):
    table = lake_table("parquet", str(tmp_path / "lake"), "")
    fill(table)

    class KilledError(BaseException):
        """The end, before the first file was removed."""

    def apply(*_arguments, **_options):
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(ParquetTable, "_apply", apply)
        with pytest.raises(KilledError):
            opened(table).compact()
    # Not the pipeline, which would take them for its own.
    maintain_table(table, KEEP, "_timestamp")
    assert numbers(table) == list(range(60))
    opened(table)
    assert numbers(table) == list(range(60))


def test_parquet_on_a_store_without_locks_is_refused(tmp_path, monkeypatch):
    class Elsewhere:
        """A file system that is none of this machine."""

    monkeypatch.setattr(maintain, "open_directory", lambda _: (Elsewhere(), "b/x"))
    table = lake_table("parquet", "s3://b/x", "")
    with pytest.raises(PipelineError, match=r'has no lock.*own pipeline.*"delta"'):
        maintain_table(table, KEEP, "_timestamp")


def test_the_command_maintains_all_tables_and_says_what_it_did(tmp_path):
    rows_table, late = (
        lake_table("delta", str(tmp_path / name), "") for name in ("lake", "late")
    )
    fill(rows_table)
    fill(late, 2)
    path = tmp_path / "p.toml"
    path.write_text(
        f"""
        [pipeline]
        job = "ingest"
        checkpoint = "{tmp_path}/c"
        [source]
        bootstrap = "h:1"
        [value]
        format = "json"
        fields = {{n = "bigint", kind = "string"}}
        [table]
        path = "{rows_table.path}"
        format = "delta"
        partition_by = ["date", "kind"]
        late_after = "3d"
        late = "aside"
        [late]
        path = "{late.path}"
        format = "delta"
        [dead_letter]
        path = "{tmp_path}/bad"
        [maintain]
        keep_rows = "1000d"
        """
    )
    done = CliRunner().invoke(command, ["maintain", str(path), "--json"])
    assert done.exit_code == 0, done.output
    assert "old rows deleted" in done.stderr
    assert f"{tmp_path}/bad: 0 files, now 0" in done.stderr
    told = json.loads(done.stdout)
    assert {path: each["rows"] for path, each in told.items()} == {
        rows_table.path: 60,
        late.path: 20,
        f"{tmp_path}/bad": None,
    }
    assert numbers(late) == []
    path.write_text('[pipeline]\njob = "report"\n[report]\nlog = "l"\nout = "o"\n')
    done = CliRunner().invoke(command, ["maintain", str(path)])
    assert "job report fills no table to maintain" in str(done.exception)


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_a_column_that_is_not_there_is_named(kind, tmp_path):
    table = lake_table(kind, str(tmp_path / "lake"), f"{tmp_path}/catalog.db")
    fill(table, 1)
    with pytest.raises(PipelineError, match=r"no column 'at'; set table.event_time"):
        maintain_table(table, Maintain(keep_rows="1d"), "at")
