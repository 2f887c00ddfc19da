"""Start a Spark session with mpbroker's formats, or say in a line what is missing."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mpbroker.base.errors import MpbrokerError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_JAVA: Final = (
    "Spark needs Java 17 or newer: install it (Debian: apt-get install"
    " openjdk-17-jre-headless) or set JAVA_HOME"
)
_MASTERS: Final = re.compile(
    r"local(\[(\*|[1-9]\d*)(,\s*\d+)?\])?|local-cluster\[\d+,\d+,\d+\]"
    r"|spark://[^\s:/]+:\d+(,[^\s:/]+:\d+)*|yarn|k8s://\S+"
)
# Seconds to wait for a connection to a master. Spark itself tries for a minute, and its
# error does not give the reason.
_REACH_S: Final = 10.0
# Settings of a session unless the caller gives others.
_DEFAULTS: Final[Mapping[str, str]] = {
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # A pipeline's final report adds up the figures of its recent batches.
    "spark.sql.streaming.numRecentProgressUpdates": "2000",
}
# With a local master: use the loopback interface, so that Spark does not look up the
# host's name and opens no port to other machines.
_LOCAL: Final[Mapping[str, str]] = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}


class SparkSetupError(MpbrokerError):
    """Spark cannot be started; the text says what to install or to set."""


def check_java() -> None:
    """Raise SparkSetupError if Spark would find no Java in JAVA_HOME or PATH."""
    home = os.environ.get("JAVA_HOME")
    if home:
        if not os.access(Path(home) / "bin" / "java", os.X_OK):
            raise SparkSetupError(f"JAVA_HOME={home} has no bin/java. {_JAVA}")
    elif shutil.which("java") is None:
        raise SparkSetupError(f"there is no java on PATH. {_JAVA}")


def check_master(master: str) -> None:
    """Raise SparkSetupError if a master is not local[N], spark://, yarn or k8s://."""
    if not _MASTERS.fullmatch(master):
        raise SparkSetupError(
            f"Spark knows no master {master!r}: give local[N], local[*],"
            " spark://HOST:PORT, yarn or k8s://URL"
        )


def reach_master(master: str) -> None:
    """Raise SparkSetupError if a standalone cluster's master cannot be reached.

    One of several addresses is enough. Other kinds of masters are not tried.
    """
    if not master.startswith("spark://"):
        return
    reasons = []
    for address in master.removeprefix("spark://").split(","):
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), _REACH_S).close()
        except (OSError, OverflowError) as error:
            reasons.append(f"{address}: {error}")
        else:
            return
    raise SparkSetupError(
        f"no Spark master answers at {master} ({'; '.join(reasons)}): start one"
        " (Spark's sbin/start-master.sh), or name another master, as local[*]"
    )


def session(
    name: str = "mpbroker",
    *,
    master: str | None = None,
    config: Mapping[str, str] | None = None,
) -> SparkSession:
    """Return the running Spark session or a new one, with mpbroker's formats.

    Args:
        name: the application's name on Spark's pages.
        master: None: the master of spark-submit or of ``config``, else local[*].
        config: Spark settings, which replace this module's defaults.

    Raises:
        SparkSetupError: PySpark or Java is missing, or the master cannot be used.
    """
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise SparkSetupError(
            f"PySpark is not installed ({error}): pip install 'mpbroker-server[spark]'"
        ) from None
    if master is not None:
        check_master(master)
        reach_master(master)
    check_java()
    _prepare_environment()
    builder = SparkSession.builder.appName(name)
    settings = dict(_DEFAULTS)
    # spark-submit sets this variable, and chooses the master itself.
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    local = False
    if master is not None or not submitted:
        chosen = master or "local[*]"
        builder = builder.master(chosen)
        if chosen.startswith("local"):
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
            settings |= _LOCAL
            local = "spark.master" not in (config or {})
    for key, value in {**settings, **(config or {})}.items():
        builder = builder.config(key, value)
    from mpbroker.spark.worker_python import quick_worker_python

    try:
        # The launcher is a file in this process's memory: executors on other machines
        # cannot run it.
        with quick_worker_python() if local else nullcontext():
            spark = builder.getOrCreate()
    except Exception as error:
        raise SparkSetupError(
            f"Spark cannot be started on {master or 'local[*]'}: {_first_line(error)}"
        ) from error
    spark.sparkContext.setLogLevel("ERROR")
    register(spark)
    return spark


def register(spark: SparkSession) -> None:
    """Register format("mpbroker") and format("mpbroker-segments") with a session.

    The package must also be installed on the machines of the executors.
    """
    from mpbroker.spark.source import MpbrokerDataSource, SegmentsDataSource

    spark.dataSource.register(MpbrokerDataSource)
    spark.dataSource.register(SegmentsDataSource)


def activate(spark: SparkSession) -> None:
    """Make a session the active one of this thread.

    Spark looks for the format of a stream's sink in the active session, and a new
    thread has none.
    """
    # createDataFrame() does so, and PySpark has no public function for this alone.
    spark.createDataFrame([], "nothing INT")


def _prepare_environment() -> None:
    """Make executors on this machine run this Python and find this package."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    root = str(Path(__file__).resolve().parents[2])
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if root not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([root, *filter(None, paths)])


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for line in lines:
        if "Exception: " in line:
            return line
    return lines[0] if lines else type(error).__name__
