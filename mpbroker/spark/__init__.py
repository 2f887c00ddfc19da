"""The Spark wing: topics and archived segments as data sources, and pipelines.

    from mpbroker.spark import session

    spark = session("my job")  # local[*], or master="spark://..."
    spark.read.format("mpbroker").option("kafka.bootstrap.servers", ...)

Needs ``pip install mpbroker[spark]`` and a Java runtime; nothing of the broker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpbroker.spark.session import SparkSetupError, session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["SparkSetupError", "register", "session"]


def register(spark: SparkSession) -> None:
    """Make format("mpbroker") and format("mpbroker-segments") known to a session.

    The package must be installed where executors run, too.
    """
    from mpbroker.spark.segments import SegmentsDataSource
    from mpbroker.spark.source import MpbrokerDataSource

    spark.dataSource.register(MpbrokerDataSource)
    spark.dataSource.register(SegmentsDataSource)
