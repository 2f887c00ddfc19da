"""Start Spark so that it works at once, or say in one line what is missing."""

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
# Spark itself asks for a minute, and then says little of why.
_REACH_S: Final = 10.0
# What a session has that nobody asked otherwise for. Loopback where all is local: no
# look-up of the host's own name, no port open to others.
_DEFAULTS: Final[Mapping[str, str]] = {
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # A pipeline's final report adds up what its batches said of themselves.
    "spark.sql.streaming.numRecentProgressUpdates": "2000",
}
_LOCAL: Final[Mapping[str, str]] = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}


class SparkSetupError(MpbrokerError):
    """Spark cannot be started here; the text says what to install or to set."""


def check_java() -> None:
    """Raise SparkSetupError if there is no Java where Spark looks for it."""
    home = os.environ.get("JAVA_HOME")
    if home:
        if not os.access(Path(home) / "bin" / "java", os.X_OK):
            raise SparkSetupError(f"JAVA_HOME={home} has no bin/java. {_JAVA}")
    elif shutil.which("java") is None:
        raise SparkSetupError(f"there is no java on PATH. {_JAVA}")


def check_master(master: str) -> None:
    """Raise SparkSetupError if this is no address of a Spark master."""
    if not _MASTERS.fullmatch(master):
        raise SparkSetupError(
            f"master {master!r} is none that Spark knows: give local[N], local[*],"
            " spark://HOST:PORT, yarn or k8s://URL"
        )


def reach_master(master: str) -> None:
    """Raise SparkSetupError if nobody listens where a standalone cluster's master is.

    One of several is enough. Other masters are Spark's to find.
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
    """Return a session that knows our formats; the one that runs already, if one does.

    Args:
        name: what Spark's own pages show.
        master: local[*] if neither this, spark-submit nor a setting names another.
        config: Spark settings, which win over our defaults.

    Raises:
        SparkSetupError: no PySpark, no Java, no such master, or it cannot be reached.
    """
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise SparkSetupError(
            f"PySpark is not here ({error}): pip install 'mpbroker[spark]'"
        ) from None
    check_java()
    if master is not None:
        check_master(master)
        reach_master(master)
    _prepare_environment()
    builder = SparkSession.builder.appName(name)
    settings = dict(_DEFAULTS)
    # spark-submit names the master itself, and it does so by this variable.
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
        # Executors elsewhere have nothing of this driver's memory.
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
    """Make format("mpbroker") and format("mpbroker-segments") known to a session.

    The package must be installed where executors run, too.
    """
    from mpbroker.spark.segments import SegmentsDataSource
    from mpbroker.spark.source import MpbrokerDataSource

    spark.dataSource.register(MpbrokerDataSource)
    spark.dataSource.register(SegmentsDataSource)


def _prepare_environment() -> None:
    """Let executors on this machine run this Python, and find this package."""
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
