"""Start Spark without the lines that Java and Spark write to stderr."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_ERRORS_OF_QUERIES: Final = "SQLQueryContextLogger"


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
