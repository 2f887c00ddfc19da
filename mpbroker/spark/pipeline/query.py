"""Start Spark's streaming queries for a pipeline, and wait for their end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from mpbroker.spark.pipeline.description import Description
from mpbroker.spark.pipeline.errors import PipelineError
from mpbroker.spark.pipeline.progress import LagWatch, Progress

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

# How often a query is started if Spark's Python processes start too slowly.
_STARTS: Final = 30
_LOOK_S: Final = 1
# Spark's error for a Python process that took more than ten seconds to start.
_NO_PYTHON: Final = "failed to connect back"
# Options of the source unless the description gives others.
_DEFAULTS: Final = {
    # A pipeline reads the whole topic, also if it is started late.
    "startingOffsets": "earliest",
    # Wait half a minute for a broker that restarts.
    "fetchOffset.numRetries": "60",
    "fetchOffset.retryIntervalMs": "500",
}


def read_stream(description: Description, spark: SparkSession) -> DataFrame:
    """Return a stream of the source's rows, with the defaults of pipelines.

    Headers are read, too, if there is a table of dead letters.
    """
    reader = spark.readStream.format("mpbroker")
    given = {name.lower() for name in description.source}
    defaults = {
        each: _DEFAULTS[each] for each in _DEFAULTS if each.lower() not in given
    }
    options: dict[str, Any] = {**defaults, **description.source}
    if description.dead_letter is not None:
        options = {k: v for k, v in options.items() if k.lower() != "includeheaders"}
        options["includeHeaders"] = "true"
    return reader.options(**options).load()


def start(description: Description, writer: DataStreamWriter) -> StreamingQuery:
    """Start a streaming query with the name, checkpoint and trigger of a pipeline."""
    writer = writer.queryName(description.name)
    writer = writer.option("checkpointLocation", description.checkpoint)
    if description.trigger_s:
        interval = f"{int(description.trigger_s * 1000)} milliseconds"
        return writer.trigger(processingTime=interval).start()
    return writer.trigger(availableNow=True).start()


def run_query(
    begin: Callable[[], StreamingQuery],
    progress: Progress,
    look: Callable[[StreamingQuery], None] | None = None,
) -> StreamingQuery:
    """Start a query, wait until it ends, and return it. Ctrl-C stops the query.

    Meanwhile, print how far the query is behind. When ``progress.stopping`` is set, the
    query is stopped, too.

    Args:
        begin: a function that starts the query.
        look: a function that is called about once a second while the query runs.

    Raises:
        PipelineError: the query failed; the text is the reason, without Java's stack.
    """
    from pyspark.errors import PySparkException, StreamingQueryException

    watches = [LagWatch(progress).look, *progress.watches]
    if look is not None:
        watches.append(look)
    for attempt in range(1, _STARTS + 1):
        try:
            query = begin()
        except PySparkException as error:
            raise PipelineError(reason(error)) from error
        try:
            with signals_stop(progress.stopping):
                while not query.awaitTermination(_LOOK_S):
                    for watch in watches:
                        watch(query)
                    if progress.stopping.is_set():
                        progress.say("stopping")
                        query.stop()
        except StreamingQueryException as error:
            # A loaded machine may need more than Spark's ten seconds to start Python,
            # and no setting changes the limit. A new start goes on at the checkpoint,
            # so nothing is lost.
            if progress.stopping.is_set():
                return query
            if _NO_PYTHON not in str(error) or attempt == _STARTS:
                raise PipelineError(reason(error)) from error
            progress.say("Python was too slow to start for Spark; trying again")
        except KeyboardInterrupt:
            progress.say("stopping")
            progress.stopping.set()
            query.stop()
            return query
        else:
            return query
    raise AssertionError("the loop above returns or raises")


@contextmanager
def signals_stop(stopping: threading.Event) -> Iterator[None]:
    """Let Ctrl-C set an event; SIGTERM, too, where it would act as Ctrl-C.

    An exception in the middle of a call to the JVM would break the connection to it:
    the query could not be stopped, and py4j would print where it was. And Python 3.11
    takes a thread for ended if an exception interrupts its ``join``. A second Ctrl-C
    raises KeyboardInterrupt all the same.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # another thread has the signals
        return

    def stop(number: int, frame: object) -> None:
        if stopping.is_set():
            raise KeyboardInterrupt
        stopping.set()

    chosen = [signal.SIGINT]
    if signal.getsignal(signal.SIGTERM) is signal.default_int_handler:
        chosen.append(signal.SIGTERM)
    before = {number: signal.signal(number, stop) for number in chosen}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def reason(error: BaseException) -> str:
    """Return the line of a Spark error that gives the cause, without Java's stack."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith(("mpbroker.", "pyspark.errors."))]
    found = ours[-1] if ours else (lines[0] if lines else type(error).__name__)
    name, _, text = found.partition(": ")
    return text if text and name.startswith("mpbroker.") else found
