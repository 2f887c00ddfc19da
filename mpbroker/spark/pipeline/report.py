"""Job ``report``: make an HTML page from a broker's request log.

The page shows latency by API and client, hot partitions and error bursts.

    mpbroker pipeline run report.toml

The log is the file that ``request.log.path`` names. `report_findings` sums it up, and
`report_page` makes the page. This job needs no Spark.
"""

from __future__ import annotations

import glob
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from mpbroker.spark.pipeline.description import Description, Report
from mpbroker.spark.pipeline.errors import PipelineError
from mpbroker.spark.pipeline.progress import Progress
from mpbroker.spark.pipeline.report_findings import PERCENTILES, Findings, Row, examine
from mpbroker.spark.pipeline.report_page import page

if TYPE_CHECKING:
    from collections.abc import Iterator


def run(description: Description, progress: Progress) -> None:
    """Sum up a broker's request log; write an HTML page, and a Parquet table if wanted.

    Raises:
        PipelineError: there is no log or no request in it, or the page or table cannot
            be written.
    """
    wanted = description.report
    assert wanted is not None
    publish(description, examine(log_files(wanted)), progress)


def publish(description: Description, found: Findings, progress: Progress) -> None:
    """Write the report as an HTML page, and as a Parquet table if that has a path.

    Raises:
        PipelineError: a file cannot be written.
    """
    wanted = description.report
    assert wanted is not None
    _write(Path(wanted.out), page(description.name, found).encode())
    progress.rows = found.span["requests"]
    progress.bad = found.span["unreadable"]
    progress.say(f"{progress.rows:,} requests; the page is {wanted.out}")
    if wanted.table:
        table = pa.Table.from_pylist([_flat(row) for row in found.clients])
        content = pa.BufferOutputStream()
        pq.write_table(table, content)
        _write(Path(wanted.table), content.getvalue().to_pybytes())
        progress.say(f"percentiles by API and client are in {wanted.table}")


def preview(description: Description) -> Iterator[str]:
    """Yield lines of text that say which log `run` would read and what it would write.

    Raises:
        PipelineError: there is no log, or a directory cannot be written to.
    """
    wanted = description.report
    assert wanted is not None
    files = log_files(wanted)
    size = sum(os.path.getsize(each) for each in files)
    yield f"reads {len(files)} files, {size / 1e6:,.1f} MB"
    for name, path in (("out", wanted.out), ("table", wanted.table)):
        parent = Path(path).absolute().parent
        if path and not os.access(parent, os.W_OK):
            raise PipelineError(f"report.{name}={path!r}: cannot write into {parent}")
    yield f"writes {wanted.out}" + (f" and {wanted.table}" if wanted.table else "")


def log_files(wanted: Report) -> list[str]:
    """Return the files that match the request log's file patterns, sorted.

    Raises:
        PipelineError: no file matches.
    """
    found = sorted({path for each in wanted.patterns for path in glob.glob(each)})
    if not found:
        raise PipelineError(
            f"report.log: there is no file {', '.join(wanted.patterns)}; give the file"
            " that the broker's request.log.path names"
        )
    return found


def _flat(row: Row) -> Row:
    """Return a row with a column for each percentile, in place of lists of them."""
    flat = {name: value for name, value in row.items() if not isinstance(value, list)}
    for kind in ("total", "served"):
        for rank, value in zip(PERCENTILES, row[kind], strict=True):
            flat[f"{kind}_p{str(100 * rank).rstrip('0').rstrip('.')}_ms"] = value
    return flat


def _write(path: Path, content: bytes) -> None:
    """Replace a file by renaming a new one: after an error the old file is still there.

    Raises:
        PipelineError: the file cannot be written.
    """
    try:
        with tempfile.NamedTemporaryFile(
            dir=path.absolute().parent, delete=False
        ) as file:
            file.write(content)
        Path(file.name).chmod(0o644)
        Path(file.name).replace(path)
    except OSError as error:
        raise PipelineError(
            f"report: {path} cannot be written: {error.strerror}"
        ) from error
