"""A table has all that its checkpoint has read, or the pipeline does not start."""

from __future__ import annotations

import shutil

import pytest

from mpbroker.spark.pipeline.description import parse
from mpbroker.spark.pipeline.errors import PipelineError
from mpbroker.spark.pipeline.ingest import open_sink
from mpbroker.spark.pipeline.progress import Progress

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


def test_a_table_of_dead_letters_may_come_later(sink, commit):
    commit(sink())
    sink(dead_letter="bad")


def test_a_pipeline_may_be_renamed(sink, commit):
    commit(sink())
    sink(name="renamed")
