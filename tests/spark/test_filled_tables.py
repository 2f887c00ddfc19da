"""A table has all that its checkpoint has read, or the pipeline does not start."""

from __future__ import annotations

import os
import shutil
import time

import pytest

from mpbroker.spark.pipeline.description import Maintain, parse
from mpbroker.spark.pipeline.errors import PipelineError
from mpbroker.spark.pipeline.ingest import open_sink
from mpbroker.spark.pipeline.progress import Progress
from mpbroker.spark.pipeline.staging import ROWS, Stager
from mpbroker.spark.pipeline.tables.lake import ParquetTable
from mpbroker.spark.pipeline.tables.maintain import maintain_table
from tests.spark.test_decode import batch_of

KINDS = ["parquet", "delta", "iceberg"]


@pytest.fixture
def checkpoint(tmp_path):
    """Return a checkpoint as Spark leaves it when a batch is planned."""
    directory = tmp_path / "checkpoint"
    (directory / "offsets").mkdir(parents=True)
    (directory / "commits").mkdir()
    (directory / "metadata").write_text('{"id":"q"}')
    (directory / "offsets" / "0").write_text('v1\n{}\n{"t":{"0":5}}')
    return directory


@pytest.fixture(params=KINDS)
def sink(request, tmp_path, checkpoint):
    """Open the tables of a pipeline as its start does."""

    def opened(lake="lake", name="p", dead_letter=None):
        table = {"path": str(tmp_path / lake), "format": request.param}
        if request.param == "iceberg":
            table["catalog"] = {"uri": f"sqlite:///{tmp_path}/catalog.db"}
            table["identifier"] = f"default.{lake}"
        sections = {
            "pipeline": {"job": "ingest", "checkpoint": str(checkpoint), "name": name},
            "source": {"bootstrap": "h:1", "subscribe": "t"},
            "value": {"format": "raw"},
            "table": table,
        }
        if dead_letter:
            sections["dead_letter"] = {"path": str(tmp_path / dead_letter)}
        return open_sink(parse(sections), Progress(name))

    return opened


@pytest.fixture
def commit(checkpoint):
    """Write a first batch without rows, and note it in the checkpoint as Spark does."""

    def write(opened):
        opened._claim()
        opened.rows.commit(0, [])
        (checkpoint / "commits" / "0").write_text("v1\n{}")

    return write


def test_a_new_table_on_an_old_checkpoint_is_refused(sink, commit):
    message = "another lacks the records that checkpoint .* has read already.*a new dir"
    sink("another")  # nothing is committed yet
    commit(sink())
    sink()
    with pytest.raises(PipelineError, match=message):
        sink("another")


def test_a_table_that_was_removed_is_not_begun_again(sink, commit, tmp_path):
    opened = sink()
    commit(opened)
    table = opened.rows.table
    if table.format == "iceberg":
        opened.rows._catalog.drop_table(table.identifier)
    else:
        shutil.rmtree(tmp_path / "lake")
    with pytest.raises(PipelineError, match="lake lacks the records that checkpoint"):
        sink()


@pytest.fixture
def commit_rows(checkpoint):
    """Write a batch of rows, and note it in the checkpoint as Spark does."""

    def write(opened, batch_id, value=b"v"):
        opened._claim()
        lake = opened.rows
        writer = lake.file_writer()
        stager = Stager(
            *(opened._value, lake.table, None, {ROWS: lake.staging(batch_id)}),
            *(False, 0),
            writers={} if writer is None else {ROWS: writer},
        )
        [report] = stager([batch_of([value])])
        lake.commit(batch_id, report.to_pylist())
        (checkpoint / "commits" / str(batch_id)).write_text("v1\n{}")

    return write


def remove_files(opened):
    for each in opened.rows.data_files():
        os.unlink(each.removeprefix("file://"))


def test_a_table_whose_files_were_removed_is_refused(sink, commit_rows):
    for batch_id in range(2):
        commit_rows(sink(), batch_id)
    one, *_ = sink().rows.data_files()
    assert one
    remove_files(sink())
    for name in ("p", "renamed"):
        with pytest.raises(
            PipelineError, match=r"files of .*lake were removed.*new dir"
        ):
            sink(name=name)


def test_a_table_without_rows_is_not_taken_for_an_emptied_one(sink, commit):
    commit(sink())
    sink()


def delete_rows(opened):
    lake = opened.rows
    if lake.table.format == "delta":
        lake._open().delete()
    else:
        lake._open().delete("true")


@pytest.mark.parametrize("sink", ["delta", "iceberg"], indirect=True)
def test_a_table_whose_rows_were_deleted_is_refused(sink, commit_rows):
    opened = sink()
    commit_rows(opened, 0)
    delete_rows(sink())
    with pytest.raises(PipelineError, match=r"rows of .*lake were removed.*new dir"):
        sink()
    commit_rows(opened, 1)
    sink()


@pytest.mark.parametrize("sink", ["delta", "iceberg"], indirect=True)
def test_a_table_whose_rows_were_too_old_is_not_refused(sink, commit_rows):
    opened = sink()
    commit_rows(opened, 0)
    lake, later_s = opened.rows, time.time() + 100_000
    done = maintain_table(
        lake.table, Maintain(keep_rows="1s"), "_timestamp", lake.name, now_s=later_s
    )
    assert done.rows == 1
    assert not lake.data_files()
    sink()


@pytest.mark.parametrize("sink", ["parquet"], indirect=True)
def test_a_directory_that_may_be_empty_is_not_refused(sink, commit_rows, tmp_path):
    commit_rows(sink(), 0)
    remove_files(sink())
    with pytest.raises(PipelineError, match=r"by an empty file (\S+)$") as refused:
        sink()
    open(str(refused.value).rpartition(" ")[2], "wb").close()
    sink()


@pytest.mark.parametrize("sink", ["parquet"], indirect=True)
def test_a_directory_whose_rows_were_too_old_is_not_refused(sink, commit_rows):
    opened = sink()
    commit_rows(opened, 0)
    assert opened.rows.delete_files(lambda _: True) == 1
    sink()


@pytest.mark.parametrize("sink", ["parquet"], indirect=True)
def test_files_that_a_killed_driver_left_staged_are_not_taken_for_removed(
    sink, commit, commit_rows, monkeypatch
):
    commit(sink())
    with monkeypatch.context() as patch:
        patch.setattr(ParquetTable, "_apply", lambda *_, **__: None)
        commit_rows(sink(), 1)
    opened = sink()
    opened._claim()
    assert len(opened.rows.data_files()) == 1


def test_a_table_of_dead_letters_may_come_later(sink, commit):
    commit(sink())
    sink(dead_letter="bad")


def test_a_pipeline_may_be_renamed(sink, commit):
    commit(sink())
    sink(name="renamed")
