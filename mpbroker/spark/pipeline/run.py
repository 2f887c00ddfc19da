"""Run a pipeline: check it against broker and tables, show what it will do, start it.

mpbroker pipeline run flights.toml
spark-submit [OPTIONS] .../mpbroker/spark/pipeline/run.py flights.toml [--dry-run]
    [--once]
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import orjson
from msgspec.structs import replace
from pyarrow import fs

from mpbroker.base.errors import MpbrokerError
from mpbroker.client.cluster import TopicPartition
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.spark.lag import offset_bytes
from mpbroker.spark.offsets import OffsetReader, Offsets, from_json
from mpbroker.spark.options import (
    EARLIEST,
    LATEST,
    SourceOptions,
    asks_for,
    parse_source_options,
)
from mpbroker.spark.pipeline import aggregate, ingest
from mpbroker.spark.pipeline.description import Description, load
from mpbroker.spark.pipeline.errors import DescriptionError, PipelineError
from mpbroker.spark.pipeline.progress import Progress
from mpbroker.spark.pipeline.published_status import Publisher
from mpbroker.spark.pipeline.query import reason, signals_stop
from mpbroker.spark.pipeline.registered import resolved
from mpbroker.spark.pipeline.staging import open_directory
from mpbroker.spark.quiet import failures_not_logged
from mpbroker.spark.session import activate, check_java, check_master, session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOOK_S: Final = 0.5


def run_file(
    path: str | Path,
    *,
    master: str | None = None,
    dry_run: bool = False,
    once: bool = False,
) -> Mapping[str, object]:
    """Run the pipeline that a TOML file describes; return the figures of its summary.

    Args:
        master: Spark's master; None: see `session`.
        dry_run: check and show everything, but start nothing.
        once: read the records that are there and stop, whatever trigger the TOML file
            has.

    Raises:
        DescriptionError, OptionError: the file is wrong.
        PipelineError, ApiError, BrokerUnavailableError, SparkSetupError:
            something is missing or wrong. Nothing was changed but the published status,
            except if the PipelineError is that of a query that failed.
    """
    (outcome,) = run_files([path], master=master, dry_run=dry_run, once=once)
    if outcome.error is not None:
        raise outcome.error
    return outcome.figures


class Outcome(NamedTuple):
    """The result of a pipeline's run: the figures of its summary, or an error."""

    path: str
    figures: Mapping[str, object] = {}
    error: MpbrokerError | None = None


def run_files(
    paths: Sequence[str | Path],
    *,
    master: str | None = None,
    dry_run: bool = False,
    once: bool = False,
) -> list[Outcome]:
    """Run the pipelines that files describe side by side, in one Spark session.

    A pipeline that fails or is refused does not stop the others; Ctrl-C and SIGTERM
    stop all of them. Refused pipelines come last in the result.

    Args:
        master, dry_run, once: see `run_file`.

    Raises:
        SparkSetupError: Spark cannot be started.
    """
    if master is not None:
        check_master(master)
    refused: list[Outcome] = []
    runs: list[_Run] = []
    for path in map(str, paths):
        try:
            run = _prepare(path, runs, once=once, waits=not dry_run)
        except MpbrokerError as error:
            refused.append(Outcome(path, error=error))
            if len(paths) > 1:
                Progress(Path(path).stem).say(f"is not started: {error}")
            continue
        runs.append(run)
        if dry_run:
            run.progress.say("dry run: nothing was read or written")
            figures = {"pipeline": run.description.name, "dry_run": True}
            run.outcome = Outcome(path, figures)
    if not dry_run and runs:
        _start(runs, master)
    return [*(run.outcome for run in runs), *refused]


class _Run:
    """One pipeline of a Spark application, and the outcome of its run."""

    def __init__(self, path: str, description: Description) -> None:
        self.path, self.description = path, description
        # Of several, one that fails says so at once: the others may run for months.
        self.is_alone = True
        self.progress = Progress(description.name)
        self.outcome = Outcome(path)
        self._publisher: Publisher | None = None

    def publish(self) -> None:
        """Begin to publish the pipeline's status, if the pipeline has a checkpoint.

        An error becomes the run's outcome.
        """
        description = self.description
        if not description.checkpoint:
            return
        try:
            publisher = Publisher(description, self.progress)
            publisher.begin(
                sum(offsets_waiting(description).values()),
                offset_bytes(description.source),
            )
        except MpbrokerError as error:
            self.outcome = Outcome(self.path, error=error)
            return
        self.progress.watches.append(publisher.look)
        self._publisher = publisher

    def go(self, spark: SparkSession | None) -> None:
        """Run the pipeline to its end; an error becomes its outcome.

        Args:
            spark: None for job ``report``, which needs no Spark.
        """
        try:
            if spark is None:
                from mpbroker.spark.pipeline import report

                report.run(self.description, self.progress)
            else:
                activate(spark)
                run_description(self.description, spark, self.progress)
        except BaseException as error:
            self.end(error)
            if not isinstance(error, MpbrokerError):
                raise
            self.outcome = Outcome(self.path, error=error)
            if not self.is_alone:
                self.progress.say(f"failed: {error}")
        else:
            self.end()
            self.outcome = Outcome(self.path, self.progress.report())

    def end(self, error: BaseException | None = None) -> None:
        """Publish the pipeline's final status, if the pipeline publishes its status."""
        if self._publisher is None:
            return
        if error is None:
            stopped = self.progress.stopping.is_set()
            self._publisher.end("stopped" if stopped else "done")
        else:
            stopped = isinstance(error, KeyboardInterrupt)
            self._publisher.end("stopped" if stopped else "failed", str(error))


def _prepare(path: str, others: Sequence[_Run], *, once: bool, waits: bool) -> _Run:
    """Check a pipeline's TOML file against the broker, its tables and other files.

    Raises:
        MpbrokerError: the file's pipeline cannot be run; see `run_file`.
    """
    description = load(path)
    if once:
        description = replace(description, trigger_s=0)
    for other in others:
        _check_apart(description, other.description, path, other.path)
    run = _Run(path, description)
    run.description = resolved(description, run.progress.say, waits=waits)
    for line in preview(run.description):
        run.progress.say(line)
    return run


def _check_apart(one: Description, other: Description, path: str, there: str) -> None:
    """Raise DescriptionError if two pipelines cannot run in one Spark application.

    They must not have equal names or checkpoints, or different settings of Spark.
    """
    if one.name == other.name:
        raise DescriptionError(
            f"{path}: pipeline.name={one.name!r} is that of {there}, too: give each its"
            " own"
        )
    if one.checkpoint and one.checkpoint == other.checkpoint:
        raise DescriptionError(
            f"{path}: pipeline.checkpoint={one.checkpoint!r} is that of {there}, too:"
            " give each its own"
        )
    for key in one.spark.keys() & other.spark.keys():
        if one.spark[key] != other.spark[key]:
            raise DescriptionError(
                f"{path}: spark.{key}={one.spark[key]!r} is {other.spark[key]!r} in"
                f" {there}, and both share one Spark: make them equal"
                " or run them apart"
            )


def _start(runs: Sequence[_Run], master: str | None) -> None:
    """Start Spark if a job needs it; run all pipelines, and wait until they end.

    Raises:
        SparkSetupError: Spark cannot be started.
    """
    needs_spark = any(run.description.job != "report" for run in runs)
    if needs_spark:
        check_java()
    for run in runs:
        run.publish()  # before Spark, which takes two minutes on a loaded machine
    runs = [run for run in runs if run.outcome.error is None]
    if not runs:
        return
    spark = None
    if needs_spark:
        settings = {k: v for run in runs for k, v in run.description.spark.items()}
        name = "+".join(run.description.name for run in runs)
        try:
            spark = session(name, master=master, config=settings)
            failures_not_logged(spark)
        except BaseException as error:
            for run in runs:
                run.end(error)
            raise
    if len(runs) == 1:
        runs[0].go(None if runs[0].description.job == "report" else spark)
        return
    from pyspark import InheritableThread

    threads = []
    stopping = threading.Event()
    for run in runs:
        run.is_alone = False
        run.progress.stopping = stopping
        own = None if run.description.job == "report" else spark
        target = InheritableThread(target=run.go, args=(own,), daemon=True)
        threads.append(target)
        target.start()
    cancelled = False
    with signals_stop(stopping):
        while any(thread.is_alive() for thread in threads):
            for thread in threads:
                thread.join(_LOOK_S)
            if stopping.is_set() and spark is not None and not cancelled:
                spark.sparkContext.cancelAllJobs()  # a replay has no query to stop
                cancelled = True


def _job(
    description: Description,
) -> Callable[[Description, SparkSession, Progress], None]:
    """Return the function that runs a pipeline's job in a Spark session.

    The replay's module is imported here only: it imports PySpark, which takes as long
    as all other imports, and the user is told first how far a pipeline is behind.
    """
    if description.job == "replay":
        from mpbroker.spark.pipeline import replay

        return replay.run
    return aggregate.run if description.job == "aggregate" else ingest.run


def run_description(
    description: Description, spark: SparkSession, progress: Progress
) -> None:
    """Run a pipeline's job, other than ``report``, in a Spark session.

    Raises:
        PipelineError: the job's ``run`` raises it, or Spark failed.
    """
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    try:
        _job(description)(description, spark, progress)
    except (PySparkException, Py4JError) as error:
        raise PipelineError(f"{description.job}: {reason(error)}") from error


def preview(description: Description) -> Iterator[str]:
    """Yield lines of text that say what a run would do; change nothing.

    Their facts come from the description, the broker and the tables.

    Raises:
        PipelineError, OptionError, ApiError, BrokerUnavailableError: a run would fail.
    """
    yield f"job {description.job}"
    if description.job == "replay":
        from mpbroker.spark.pipeline import replay

        yield from replay.preview(description)
        return
    if description.job == "report":
        from mpbroker.spark.pipeline import report

        yield from report.preview(description)
        return
    options = _source_options(description)
    reached = checkpoint_offsets(description.checkpoint)
    waiting = _waiting(options, description, reached)
    topics = sorted({each.topic for each in waiting})
    yield (
        f"reads {', '.join(topics) or 'nothing yet'}: {len(waiting)} partitions,"
        f" {sum(waiting.values()):,} offsets"
        + (" since the checkpoint" if reached else f", from {_start_of(options)}")
    )
    check_tables(description)
    for what, table in (
        ("rows", description.table),
        ("bad", description.dead_letter),
        ("late rows", description.late),
    ):
        if table is not None:
            yield f"{what} go to {table.path} ({table.format})"
    if description.topic:
        from mpbroker.spark.pipeline import replay

        sink = replay.sink_options(description)
        count = replay.target_partitions(sink)
        yield f"results go to topic {sink.topic} ({count} partitions)"
    rest = "all there is now" if not description.trigger_s else "until it is stopped"
    yield f"checkpoint {description.checkpoint}; {rest}"


def offsets_waiting(description: Description) -> dict[TopicPartition, int]:
    """Return how many offsets of each partition a pipeline has still to read.

    Raises:
        PipelineError, OptionError, ApiError, BrokerUnavailableError: see `preview`.
    """
    options = _source_options(description)
    return _waiting(options, description, checkpoint_offsets(description.checkpoint))


def _source_options(description: Description) -> SourceOptions:
    return parse_source_options(
        {"startingOffsets": "earliest", **description.source}, streaming=True
    )


def _start_of(options: SourceOptions) -> str:
    if asks_for(options.starting, EARLIEST) and options.starting.offsets is None:
        return "the start"
    return "where the source's options say"


def _waiting(
    options: SourceOptions, description: Description, reached: Offsets
) -> dict[TopicPartition, int]:
    """Return how many offsets of each partition a pipeline has still to read.

    Args:
        reached: the offsets up to which it has read, from its checkpoint.

    Raises:
        PipelineError: the checkpoint belongs to another topic.
    """
    reader = OffsetReader(options)
    try:
        read = set() if options.fail_on_data_loss else {each.topic for each in reached}
        leaders = _existing(reader, options, read)
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
    reader: OffsetReader, options: SourceOptions, may_be_gone: set[str]
) -> dict[TopicPartition, int]:
    """Return the partitions that a pipeline reads, with their leaders' node ids.

    Args:
        may_be_gone: topics that are left out if they do not exist.

    Raises:
        ApiError: a topic does not exist; the text names those of the source.
    """
    try:
        return reader.subscribed(may_be_gone).leaders
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
    """Raise PipelineError if job ``ingest`` could not write to its tables.

    Nothing is changed.
    """
    if description.job == "ingest":
        ingest.open_sink(description, Progress(description.name))


def checkpoint_offsets(checkpoint: str) -> Offsets:
    """Return the end offsets of the newest planned batch in a checkpoint.

    The result is empty for a new checkpoint.

    Raises:
        PipelineError: the directory cannot be used.
        OffsetsError: a later mpbroker has written the offsets.
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
            # Its lines: a version, the batch's settings, the source's offsets.
            lines = stream.read().decode().strip().splitlines()
        try:
            document = orjson.loads(lines[2:][-1])
        except (ValueError, IndexError):
            continue  # incomplete: Spark was killed while it planned the batch
        return from_json(document)
    return {}


def main(arguments: list[str]) -> None:
    """Run the pipelines whose files a script's arguments name; exit after an error."""
    files = [each for each in arguments if each not in ("--dry-run", "--once")]
    if not files or any(each.startswith("-") for each in files):
        print(
            "usage: spark-submit [OPTIONS] run.py FILE... [--dry-run] [--once]",
            file=sys.stderr,
        )
        sys.exit(2)
    try:
        outcomes = run_files(
            files, dry_run="--dry-run" in arguments, once="--once" in arguments
        )
    except MpbrokerError as error:
        sys.exit(f"mpbroker: {error}")
    failed = [f"mpbroker: {each.error}" for each in outcomes if each.error is not None]
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main(sys.argv[1:])
