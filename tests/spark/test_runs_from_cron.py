"""A pipeline that runs again and again with --once: what its runs do to the table."""

from __future__ import annotations

import pytest

from mpbroker.spark.pipeline import ingest
from mpbroker.spark.pipeline.description import parse
from mpbroker.spark.pipeline.progress import Progress
from mpbroker.spark.pipeline.staging import ROWS, Stager
from tests.spark.lakes import read
from tests.spark.test_decode import batch_of

EVERY = 3


@pytest.fixture(params=["parquet", "delta"])
def run(request, tmp_path, monkeypatch):
    """Run a pipeline as it runs, with a batch of one row in Spark's place."""
    checkpoint = tmp_path / "checkpoint"
    (checkpoint / "commits").mkdir(parents=True)
    (checkpoint / "metadata").write_text('{"id":"q"}')
    description = parse(
        {
            "pipeline": {"job": "ingest", "checkpoint": str(checkpoint), "name": "p"},
            "source": {"bootstrap": "h:1", "subscribe": "t"},
            "value": {"format": "json", "fields": {"n": "bigint"}},
            "table": {
                "path": str(tmp_path / "lake"),
                "format": request.param,
                "compact_every": EVERY,
            },
        }
    )

    def stage(sink, value, batch_id):
        writer = sink.rows.file_writer()
        stager = Stager(
            sink._value,
            sink.rows.table,
            None,
            {ROWS: sink.rows.staging(batch_id)},
            False,
            0,
            writers={} if writer is None else {ROWS: writer},
        )
        [report] = stager([batch_of([value])])
        return report.to_pylist()

    monkeypatch.setattr(ingest.BatchSink, "_stage", stage)
    monkeypatch.setattr(ingest.BatchSink, "_offsets", lambda *_: "{}")
    monkeypatch.setattr(ingest, "read_stream", lambda *_: None)
    monkeypatch.setattr(ingest, "write_stream", lambda _, sink: sink)
    monkeypatch.setattr(ingest, "start", lambda _, sink: sink)

    def go(batch_id):
        """Return the number of the table's files after a run of one batch."""
        opened = []

        def run_query(begin, _):
            opened.append(begin())
            opened[0](b'{"n":%d}' % batch_id, batch_id)

        monkeypatch.setattr(ingest, "run_query", run_query)
        ingest.run(description, None, Progress("p"))
        (checkpoint / "commits" / str(batch_id)).write_text("v1")
        return len(opened[0].rows.data_files())

    go.table = description.table
    return go


def test_a_table_is_compacted_after_so_many_batches_and_not_after_each_run(run):
    assert [run(batch_id) for batch_id in range(7)] == [1, 2, 1, 2, 3, 1, 2]
    assert sorted(read(run.table)["n"].to_pylist()) == list(range(7))
