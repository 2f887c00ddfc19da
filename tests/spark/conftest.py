"""One Spark session per worker, on local[2]; skipped where there is no Java."""

from __future__ import annotations

import io
import logging
import os
import shutil
import sys
import uuid
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.spark.cluster import QUICK_JAVA
from tests.support.fetch_clients import SPARK_DIR, have_spark_connector

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.readwriter import DataFrameReader
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamReader


@pytest.fixture(scope="session", autouse=True)
def _own_log_format() -> None:
    """Let PySpark's loggers leave the format of pytest's handlers as it is.

    PySpark makes these loggers at its first error. They pass nothing on to the root
    logger, so pytest adds its handlers to them, and they set a format of their own
    there: it would be the format of all later tests of this process.
    """
    from pyspark.logger import PySparkLogger

    for name in ("DataFrameQueryContextLogger", "SQLQueryContextLogger"):
        logger = PySparkLogger.getLogger(name)
        logger.addHandler = partial(logging.Logger.addHandler, logger)  # type: ignore[method-assign]


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    if shutil.which("java") is None and not os.environ.get("JAVA_HOME"):
        pytest.skip("Spark needs Java 17 or newer, and there is none")
    from pyspark.sql import SparkSession

    from mpbroker.spark import register
    from mpbroker.spark.worker_python import quick_worker_python

    root = Path(__file__).resolve().parents[2]
    warehouse = tmp_path_factory.mktemp("spark")
    environ = {
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": str(root),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(warehouse),
    }
    before = {name: os.environ.get(name) for name in environ}
    os.environ.update(environ)
    jars = sorted(SPARK_DIR.glob("*.jar")) if have_spark_connector() else []
    builder = (
        SparkSession.builder.master("local[2]")
        .appName("mpbroker-tests")
        .config("spark.jars", ",".join(map(str, jars)))
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "1g")
        .config("spark.driver.extraJavaOptions", QUICK_JAVA)
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.warehouse.dir", str(warehouse / "warehouse"))
        .config("spark.ui.showConsoleProgress", "false")
    )
    with quick_worker_python():
        session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    register(session)
    yield session
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the JVM's pipes are closed by nobody
        session.stop()
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture
def read(spark: SparkSession, bootstrap: str) -> Callable[..., DataFrameReader]:
    """A batch reader with options; names in Python's spelling for dots: a dict."""

    def reader(**options: object) -> DataFrameReader:
        found = spark.read.format("mpbroker").option(
            "kafka.bootstrap.servers", bootstrap
        )
        return found.options(**options)

    return reader


@pytest.fixture
def read_stream(spark: SparkSession, bootstrap: str) -> Callable[..., DataStreamReader]:
    def reader(**options: object) -> DataStreamReader:
        found = spark.readStream.format("mpbroker").option(
            "kafka.bootstrap.servers", bootstrap
        )
        return found.options(**options)

    return reader


@pytest.fixture
def finish() -> Callable[[Callable[[], StreamingQuery]], StreamingQuery]:
    """Run a stream to its end, however slow the machine: finish(writer.start)."""
    from mpbroker.spark.pipeline.progress import Progress
    from mpbroker.spark.pipeline.query import run_query

    return lambda begin: run_query(begin, Progress("stream", io.StringIO()))


@pytest.fixture
def make_topic(bootstrap: str) -> Iterator[Callable[..., str]]:
    """Create topics that are gone after the test: make_topic(partitions, **config)."""
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": bootstrap})
    names: list[str] = []

    def make(partitions: int = 1, **config: str) -> str:
        name = f"spark-{uuid.uuid4().hex[:12]}"
        topic = NewTopic(name, partitions, 1, config=config)
        admin.create_topics([topic])[name].result(90)
        names.append(name)
        return name

    yield make
    if names:
        for future in admin.delete_topics(names).values():
            future.result(90)


@pytest.fixture
def delete_records(bootstrap: str) -> Callable[[str, int, int], None]:
    """Delete a partition's records below an offset."""
    from confluent_kafka import TopicPartition
    from confluent_kafka.admin import AdminClient

    def delete(topic: str, partition: int, offset: int) -> None:
        admin = AdminClient({"bootstrap.servers": bootstrap})
        for future in admin.delete_records(
            [TopicPartition(topic, partition, offset)]
        ).values():
            future.result(90)

    return delete
