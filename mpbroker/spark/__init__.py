"""The Spark wing: topics and archived segments as data sources, and pipelines.

    from mpbroker.spark import session

    spark = session("my job")  # local[*], or master="spark://..."
    spark.read.format("mpbroker").option("kafka.bootstrap.servers", ...)

Needs ``pip install mpbroker[spark]`` and a Java runtime; nothing of the broker.
"""

from __future__ import annotations

from mpbroker.spark.session import SparkSetupError, register, session

__all__ = ["SparkSetupError", "register", "session"]
