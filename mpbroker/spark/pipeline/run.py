"""Run a pipeline: check it against broker and tables, show what it will do, start it.

mpbroker pipeline run flights.toml
spark-submit [OPTIONS] .../mpbroker/spark/pipeline/run.py flights.toml [--dry-run]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import orjson
from pyarrow import fs

from mpbroker.base.errors import MpbrokerError
from mpbroker.client.cluster import TopicPartition
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.spark.offsets import OffsetReader, Offsets, from_json
from mpbroker.spark.options import (
    EARLIEST,
    LATEST,
    SourceOptions,
    asks_for,
    parse_source_options,
)
from mpbroker.spark.pipeline import aggregate, ingest, replay, report
from mpbroker.spark.pipeline.description import Description, load
from mpbroker.spark.pipeline.errors import PipelineError
from mpbroker.spark.pipeline.progress import Progress
from mpbroker.spark.pipeline.query import reason
from mpbroker.spark.pipeline.staging import open_directory
from mpbroker.spark.session import check_java, check_master, session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_RUN: Final[Mapping[str, Callable[[Description, SparkSession, Progress], None]]] = {
    "ingest": ingest.run,
    "aggregate": aggregate.run,
    "replay": replay.run,
    "report": report.run,
}


def run_file(
    path: str | Path, *, master: str | None = None, dry_run: bool = False
) -> Mapping[str, object]:
    """Run the pipeline that a file describes, and return the figures of its summary.

    Args:
        master: Spark's master; None: see `session`.
        dry_run: check and show everything, but start nothing.

    Raises:
        PipelineError, OptionError, ApiError, BrokerUnavailableError, SparkSetupError:
            something is missing or wrong; except in a PipelineError of a query that
            failed, nothing was changed.
    """
    description = load(path)
    progress = Progress(description.name)
    for line in preview(description):
        progress.say(line)
    if master is not None:
        check_master(master)
    if dry_run:
        progress.say("dry run: nothing was read or written")
        return {"pipeline": description.name, "dry_run": True}
    check_java()
    spark = session(description.name, master=master, config=description.spark)
    run_description(description, spark, progress)
    return progress.report()


def run_description(
    description: Description, spark: SparkSession, progress: Progress
) -> None:
    """Run the job of a description in a session.

    Raises:
        PipelineError: see the job's module; or Spark failed.
    """
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    try:
        _RUN[description.job](description, spark, progress)
    except (PySparkException, Py4JError) as error:
        raise PipelineError(f"{description.job}: {reason(error)}") from error


def preview(description: Description) -> Iterator[str]:
    """Yield lines that say what a run would do; ask broker and tables, change nothing.

    Raises:
        PipelineError, OptionError, ApiError, BrokerUnavailableError: a run would fail.
    """
    yield f"job {description.job}"
    if description.job == "replay":
        yield from replay.preview(description)
        return
    if description.job == "report":
        yield from report.preview(description)
        return
    options = parse_source_options(
        {"startingOffsets": "earliest", **description.source}, streaming=True
    )
    reached = checkpoint_offsets(description.checkpoint)
    waiting = _waiting(options, description, reached)
    topics = sorted({each.topic for each in waiting})
    yield (
        f"reads {', '.join(topics) or 'nothing yet'}: {len(waiting)} partitions,"
        f" {sum(waiting.values()):,} offsets"
        + (" since the checkpoint" if reached else f", from {_start_of(options)}")
    )
    check_tables(description)
    for what, table in (("rows", description.table), ("bad", description.dead_letter)):
        if table is not None:
            yield f"{what} go to {table.path} ({table.format})"
    if description.topic:
        sink = replay.sink_options(description)
        count = replay.target_partitions(sink)
        yield f"results go to topic {sink.topic} ({count} partitions)"
    rest = "all there is now" if not description.trigger_s else "until it is stopped"
    yield f"checkpoint {description.checkpoint}; {rest}"


def _start_of(options: SourceOptions) -> str:
    if asks_for(options.starting, EARLIEST) and options.starting.offsets is None:
        return "the start"
    return "where the source's options say"


def _waiting(
    options: SourceOptions, description: Description, reached: Offsets
) -> dict[TopicPartition, int]:
    """Return how many offsets of each partition are still to be read.

    Raises:
        PipelineError: the checkpoint belongs to another topic.
    """
    reader = OffsetReader(options)
    try:
        leaders = _existing(reader, options)
        topics = {each.topic for each in leaders}
        strange = sorted({each.topic for each in reached} - topics)
        known = any(each.topic in topics for each in reached)
        if strange and (options.fail_on_data_loss or not known):
            raise PipelineError(
                f"checkpoint {description.checkpoint} is of another topic:"
                f" {', '.join(strange)}. Give each pipeline its own checkpoint, or use"
                " a new one"
            )
        if reached:
            begin = reader.offsets(leaders, EARLIEST) | reached
        else:
            begin = reader.resolve(
                options.starting, leaders, unmatched=lambda *_: LATEST
            )
        latest = reader.offsets(leaders, LATEST)
    finally:
        reader.close()
    return {each: max(0, latest[each] - begin[each]) for each in leaders}


def _existing(
    reader: OffsetReader, options: SourceOptions
) -> dict[TopicPartition, int]:
    """Return the source's partitions with their leaders.

    Raises:
        ApiError: a topic does not exist; the text names those of the source.
    """
    try:
        return reader.partitions()
    except ApiError as error:
        if error.error_code != ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
            raise
        wanted = options.subscription
        names = wanted.topics or sorted({each.topic for each in wanted.partitions})
        raise ApiError(
            error.error_code,
            f"source: one of {', '.join(names)} does not exist;"
            " create it first (mpbroker topic create), or correct its name",
        ) from None


def check_tables(description: Description) -> None:
    """Raise PipelineError if `ingest` could not write to its tables; change nothing."""
    if description.job == "ingest":
        ingest.open_sink(description, Progress(description.name))


def checkpoint_offsets(checkpoint: str) -> Offsets:
    """Return the end offsets of the newest batch that a checkpoint has planned.

    They are empty for a new checkpoint.

    Raises:
        PipelineError: the directory cannot be used.
    """
    files, inside = open_directory(checkpoint)
    selector = fs.FileSelector(f"{inside}/offsets", allow_not_found=True)
    batches = [
        info.path
        for info in files.get_file_info(selector)
        if info.path.rpartition("/")[2].isdigit()
    ]
    for path in sorted(batches, key=lambda each: -int(each.rpartition("/")[2])):
        with files.open_input_stream(path) as stream:
            last = stream.read().decode().strip().splitlines()[-1:]
        try:
            return from_json(orjson.loads(last[0]))
        except (ValueError, IndexError, AttributeError, TypeError):
            continue  # incomplete: Spark was killed while it planned the batch
    return {}


def main(arguments: list[str]) -> None:
    """Run the file that the arguments name; exit with a line of error, as a script."""
    files = [each for each in arguments if each != "--dry-run"]
    if len(files) != 1 or files[0].startswith("-"):
        print("usage: spark-submit [OPTIONS] run.py FILE [--dry-run]", file=sys.stderr)
        sys.exit(2)
    try:
        run_file(files[0], dry_run="--dry-run" in arguments)
    except MpbrokerError as error:
        sys.exit(f"mpbroker: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
