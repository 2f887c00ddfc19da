"""Sum up a broker's request log with Spark, for the page of job ``report``.

The log has a line of JSON for each request. Every five seconds it has further lines: of
errors by API and kind, and of records and bytes appended by partition.
"""

from __future__ import annotations

import glob
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from mpbroker.spark.pipeline.errors import PipelineError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

Row = dict[str, Any]

# The columns of a line that are read; other keys are ignored.
_DDL: Final = (
    "time DOUBLE, api STRING, connection STRING, client_software_name STRING,"
    " client_software_version STRING, request_bytes BIGINT, response_bytes BIGINT,"
    " received_ns BIGINT, dequeued_ns BIGINT, parked_ns BIGINT, completed_ns BIGINT,"
    " taken_ns BIGINT, sent_ns BIGINT, total_ms DOUBLE, lost BIGINT, seconds DOUBLE,"
    " errors ARRAY<STRUCT<api: STRING, error: STRING, count: BIGINT>>,"
    " appended ARRAY<STRUCT<topic: STRING, partition: INT, records: BIGINT,"
    " bytes: BIGINT>>, unreadable STRING"
)
# The stages of a request, named as in the metrics, by their first and last stamp.
STAGES: Final = {
    "queue": ("received_ns", "dequeued_ns"),
    "local": ("dequeued_ns", "parked_ns"),
    "remote": ("parked_ns", "completed_ns"),
    "response_queue": ("completed_ns", "taken_ns"),
    "send": ("taken_ns", "sent_ns"),
}
PERCENTILES: Final = (0.5, 0.95, 0.99, 0.999)
# Spark's accuracy of percentiles: the rank is wrong by at most 1 in this number.
_ACCURACY: Final = 10_000
# The number of points in a plot to aim at: more are not seen on a screen.
_POINTS: Final = 120
_STEPS_S: Final = (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400)
_TOP: Final = 20
# Seconds between two lines of errors in the log.
LOOK_S: Final = 5
# The longest pause inside a burst of errors.
_BURST_GAP_S: Final = 2 * LOOK_S


@dataclass(frozen=True)
class Findings:
    """The figures on the page; a row is a dict by the column names of its query.

    Attributes:
        span: one row with the totals of the log and its first and last second.
        step_s: the seconds from one point of the timelines to the next.
        apis: a row for each API, those with the most requests first.
        clients: a row for each pair of API and client software.
        timeline: a row for each point of time and API; the API None stands for all.
        partitions: those with the most records, most first.
        bursts: of errors, those with the most errors first.
        error_timeline: errors by point of time, API and kind.
        peers: those with the most requests, most first.
        slowest: requests, the slowest first.
    """

    span: Row
    step_s: int
    apis: list[Row]
    clients: list[Row]
    timeline: list[Row]
    partitions: list[Row]
    bursts: list[Row]
    error_timeline: list[Row]
    peers: list[Row]
    slowest: list[Row]


def examine(spark: SparkSession, files: list[str]) -> Findings:
    """Return the figures for the page.

    Raises:
        PipelineError: there is no request in these files.
    """
    from pyspark.sql import functions as sql

    # Say file: because a cluster may have another default. Escape characters that Spark
    # takes for a pattern: the patterns are resolved already.
    paths = [f"file://{glob.escape(os.path.abspath(each))}" for each in files]
    lines = (
        spark.read.schema(_DDL)
        .option("columnNameOfCorruptRecord", "unreadable")
        .json(paths)
        .withColumns({name: _stage_ms(*ends) for name, ends in STAGES.items()})
        .persist()
    )
    try:
        span = _rows(
            lines.agg(
                sql.count("api").alias("requests"),
                sql.count("unreadable").alias("unreadable"),
                sql.coalesce(sql.sum("lost"), sql.lit(0)).alias("lost"),
                sql.min("time").alias("first_s"),
                sql.max("time").alias("last_s"),
                sql.coalesce(sql.sum("request_bytes"), sql.lit(0)).alias("bytes_in"),
                sql.coalesce(sql.sum("response_bytes"), sql.lit(0)).alias("bytes_out"),
            )
        )[0]
        if not span["requests"]:
            raise PipelineError(
                f"there is no request in {', '.join(files[:3])}: is it a broker's"
                f" request.log.path? ({span['unreadable']} lines are not JSON)"
            )
        step_s = _step_s(span["last_s"] - span["first_s"])
        requests = lines.where("api IS NOT NULL").withColumns(
            {
                "client": _client(),
                "peer": sql.regexp_extract("connection", r"-(.*):\d+-\d+$", 1),
                "served_ms": sql.col("total_ms") - sql.col("remote"),
                "at_s": _point("time", step_s),
            }
        )
        summed = _summed(requests)
        whole = [row for row in summed if row["at_s"] is None]
        return Findings(
            span=span,
            step_s=step_s,
            apis=[row for row in whole if row["client"] is None],
            clients=[row for row in whole if row["client"] is not None],
            timeline=[row for row in summed if row["at_s"] is not None],
            partitions=_hot_partitions(lines),
            bursts=_bursts(lines),
            # The log's lines of errors are not closer than LOOK_S.
            error_timeline=_error_timeline(lines, max(step_s, LOOK_S)),
            peers=_peers(requests),
            slowest=_slowest(requests),
        )
    finally:
        lines.unpersist()


def _stage_ms(begin: str, end: str) -> Column:
    from pyspark.sql import functions as sql

    return (sql.col(end) - sql.col(begin)) / 1e6


def _client() -> Column:
    """Return the client software's name and version in one column."""
    from pyspark.sql import functions as sql

    name = sql.concat_ws(" ", "client_software_name", "client_software_version")
    return sql.when(sql.trim(name) == "", "unknown").otherwise(sql.trim(name))


def _point(column: str, step_s: int) -> Column:
    """Return the point of time, in seconds, that a column's time belongs to."""
    from pyspark.sql import functions as sql

    return (sql.floor(sql.col(column) / step_s) * step_s).cast("bigint")


def _summed(requests: DataFrame) -> list[Row]:
    """Sum up by API, by API and client, by point of time, and by point and API.

    One query does all four in one pass. A column that a row is not grouped by is null.
    """
    from pyspark.sql import functions as sql

    def percentiles(column: str) -> Column:
        found = sql.percentile_approx(column, list(PERCENTILES), _ACCURACY)
        return found.alias(column.removesuffix("_ms"))

    wanted = [
        sql.count("*").alias("requests"),
        percentiles("total_ms"),
        percentiles("served_ms"),
        sql.max("total_ms").alias("max_ms"),
        *(sql.avg(name).alias(name) for name in STAGES),
        sql.sum("request_bytes").alias("bytes_in"),
        sql.sum("response_bytes").alias("bytes_out"),
    ]
    at, api, client = sql.col("at_s"), sql.col("api"), sql.col("client")
    sets = [[api], [api, client], [at], [at, api]]
    found = requests.groupingSets(sets, at, api, client).agg(*wanted)
    order = (sql.col("at_s"), sql.desc("requests"), "api", "client")
    return _rows(found.orderBy(*order))


def _hot_partitions(lines: DataFrame) -> list[Row]:
    """Return the partitions with the most records appended, and their share."""
    from pyspark.sql import Window
    from pyspark.sql import functions as sql

    each = lines.select("seconds", sql.explode("appended").alias("a")).select(
        "seconds", "a.*"
    )
    summed = each.groupBy("topic", "partition").agg(
        sql.sum("records").alias("records"),
        sql.sum("bytes").alias("bytes"),
        sql.max(sql.col("records") / sql.col("seconds")).alias("peak_per_s"),
    )
    shares = sql.col("records") / sql.sum("records").over(Window.partitionBy())
    found = summed.withColumn("share", shares)
    return _rows(found.orderBy(sql.desc("records"), "topic", "partition").limit(_TOP))


def _errors(lines: DataFrame) -> DataFrame:
    from pyspark.sql import functions as sql

    each = lines.select("time", "seconds", sql.explode("errors").alias("e"))
    return each.select("time", "seconds", "e.*")


def _bursts(lines: DataFrame) -> list[Row]:
    """Return errors of one API and kind without a longer pause, most errors first."""
    from pyspark.sql import Window
    from pyspark.sql import functions as sql

    kind = Window.partitionBy("api", "error").orderBy("time")
    begun = sql.col("time") - sql.col("seconds")
    apart = begun - sql.lag("time").over(kind) > _BURST_GAP_S
    numbered = _errors(lines).withColumn("begun", begun).withColumn("apart", apart)
    starts = sql.coalesce(sql.col("apart"), sql.lit(True)).cast("int")
    numbered = numbered.withColumn("starts", starts)
    numbered = numbered.withColumn("burst", sql.sum("starts").over(kind))
    found = numbered.groupBy("api", "error", "burst").agg(
        sql.min("begun").alias("first_s"),
        sql.max("time").alias("last_s"),
        sql.sum("count").alias("count"),
        sql.max(sql.col("count") / sql.col("seconds")).alias("peak_per_s"),
    )
    return _rows(found.orderBy(sql.desc("count"), "first_s").limit(_TOP))


def _error_timeline(lines: DataFrame, step_s: int) -> list[Row]:
    """Count errors by point of time, API and kind."""
    from pyspark.sql import functions as sql

    found = _errors(lines).withColumn("at_s", _point("time", step_s))
    found = found.groupBy("at_s", "api", "error").agg(sql.sum("count").alias("count"))
    return _rows(found.orderBy("at_s"))


def _peers(requests: DataFrame) -> list[Row]:
    """Return the addresses and client software with the most requests."""
    from pyspark.sql import functions as sql

    found = requests.groupBy("peer", "client").agg(
        sql.count("*").alias("requests"),
        sql.count_distinct("connection").alias("connections"),
        sql.sum("request_bytes").alias("bytes_in"),
        sql.sum("response_bytes").alias("bytes_out"),
    )
    return _rows(found.orderBy(sql.desc("requests"), "peer", "client").limit(_TOP))


def _slowest(requests: DataFrame) -> list[Row]:
    from pyspark.sql import functions as sql

    wanted = ("time", "api", "client", "peer", "total_ms", "served_ms", *STAGES)
    return _rows(requests.select(*wanted).orderBy(sql.desc("served_ms")).limit(10))


def _rows(frame: DataFrame) -> list[Row]:
    return [row.asDict(recursive=True) for row in frame.collect()]


def _step_s(span_s: float) -> int:
    """Return the seconds between points that give a plot about _POINTS points."""
    about = span_s / _POINTS
    return next((step for step in _STEPS_S if step >= about), _STEPS_S[-1])
