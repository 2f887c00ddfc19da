"""Read and write topics with Spark, read archived segments, and run pipelines.

    from mpbroker.spark import session

    spark = session("my job")  # local[*], or master="spark://..."
    spark.read.format("mpbroker").option("kafka.bootstrap.servers", ...)

Needs ``pip install mpbroker-server[spark]`` and a Java runtime. Imports no code
of the broker beyond the wire protocol.
"""

from __future__ import annotations

from mpbroker.spark.session import SparkSetupError, register, session
from mpbroker.spark.sql_query import sql

__all__ = ["SparkSetupError", "register", "session", "sql"]
