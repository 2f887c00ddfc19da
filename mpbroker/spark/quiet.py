"""Start and run Spark without the lines that Java and Spark write to stderr."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ERRORS_OF_QUERIES: Final = "SQLQueryContextLogger"
# Spark's loggers that write why a task and a query failed, with Java's and Python's
# stacks: some 180 lines for a value that cannot be read.
_ERRORS_OF_TASKS: Final = (
    "org.apache.spark.executor.Executor",
    "org.apache.spark.scheduler.TaskSetManager",
    "org.apache.spark.sql.execution.streaming",
)


@contextmanager
def errors_not_logged() -> Iterator[None]:
    """Keep PySpark from logging errors of queries, which become exceptions anyway."""
    # Get it from PySpark: the first call for this name decides the logger's class.
    from pyspark.logger import PySparkLogger

    logger = PySparkLogger.getLogger(_ERRORS_OF_QUERIES)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def failures_not_logged(spark: SparkSession) -> None:
    """Keep Spark's driver from logging why tasks and queries failed.

    The error that ends the query has the reason, and its caller tells it.
    """
    log4j = spark.sparkContext._jvm.org.apache.logging.log4j  # type: ignore[union-attr]
    for name in _ERRORS_OF_TASKS:
        log4j.core.config.Configurator.setLevel(name, log4j.Level.OFF)


@contextmanager
def quiet_start() -> Iterator[None]:
    """Send the stderr of a JVM that starts in this context to an unnamed file.

    The JVM keeps the file as its stderr, and so do Spark's Python processes. If the
    start fails, the file's content is written to the real stderr.
    """
    sys.stderr.flush()
    with tempfile.TemporaryFile() as said:
        kept = os.dup(2)
        os.dup2(said.fileno(), 2)
        try:
            yield
        except BaseException:
            said.seek(0)
            os.write(kept, said.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
