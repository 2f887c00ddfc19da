"""Start Spark's streaming queries for a pipeline, and wait for their end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from mpbroker.spark.pipeline.description import Description
from mpbroker.spark.pipeline.errors import PipelineError
from mpbroker.spark.pipeline.progress import Progress

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

_STARTS: Final = 30
_LOOK_S: Final = 1
_NO_PYTHON: Final = "failed to connect back"
_DEFAULTS: Final = {
    # All there is: a pipeline that is started late shall not begin in the middle.
    "startingOffsets": "earliest",
    # A broker that is restarted shall not end it: half a minute of patience.
    "fetchOffset.numRetries": "60",
    "fetchOffset.retryIntervalMs": "500",
}


def read_stream(description: Description, spark: SparkSession) -> DataFrame:
    """Return the source's rows; options that are not given are a pipeline's."""
    reader = spark.readStream.format("mpbroker")
    given = {name.lower() for name in description.source}
    defaults = {
        each: _DEFAULTS[each] for each in _DEFAULTS if each.lower() not in given
    }
    options: dict[str, Any] = {**defaults, **description.source}
    return reader.options(**options).load()


def start(description: Description, writer: DataStreamWriter) -> StreamingQuery:
    """Start a writer under the description's name, checkpoint and trigger."""
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
    """Begin a query and wait for its end; a Ctrl-C stops it between batches.

    Args:
        look: called now and then while the query runs.

    Raises:
        PipelineError: it failed; the text is the reason, without Java's stack.
    """
    from pyspark.errors import PySparkException, StreamingQueryException

    for attempt in range(1, _STARTS + 1):
        try:
            query = begin()
        except PySparkException as error:
            raise PipelineError(reason(error)) from error
        try:
            if look is None:
                query.awaitTermination()
            else:
                while not query.awaitTermination(_LOOK_S):
                    look(query)
        except StreamingQueryException as error:
            # Spark gives a Python process ten seconds to start, which no setting
            # changes and a loaded machine needs more than. Nothing is lost by
            # beginning again: the checkpoint knows where.
            if _NO_PYTHON not in str(error) or attempt == _STARTS:
                raise PipelineError(reason(error)) from error
            progress.say("Python was too slow to start for Spark; trying again")
        except KeyboardInterrupt:
            progress.say("stopping")
            query.stop()
            return query
        else:
            return query
    raise AssertionError("the loop above returns or raises")


def reason(error: BaseException) -> str:
    """Return the line of an error from Spark that says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith(("mpbroker.", "pyspark.errors."))]
    found = ours[-1] if ours else (lines[0] if lines else type(error).__name__)
    name, _, text = found.partition(": ")
    return text if text and name.startswith("mpbroker.") else found
