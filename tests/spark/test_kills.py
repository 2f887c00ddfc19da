"""Driver, executors and broker are killed at any moment: each row is in the lake once.

On a real standalone cluster, a master and two workers on loopback. MPBROKER_SPARK_KILLS
says how many kills: of the driver, an executor and the broker in turn. By default the
first two, since Spark is started anew after each kill of a driver; 20 take the better
part of an hour on a loaded machine, and are for the night. 0 leaves it out.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pyarrow.dataset
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from tests.support.ports import reusable_port

KILLS = int(os.environ.get("MPBROKER_SPARK_KILLS", "2"))
ROOT = Path(__file__).resolve().parents[2]
PARTITIONS = 4
BATCH = 1_000
ROUND = 5 * BATCH
PATIENCE_S = 600  # a loaded machine takes minutes to start Spark

pytestmark = [
    pytest.mark.timeout(2400 + 300 * KILLS),
    pytest.mark.skipif(not KILLS, reason="MPBROKER_SPARK_KILLS=0"),
]

_DIE_WITH_US = (
    ["setpriv", "--pdeathsig", "KILL", "--"] if shutil.which("setpriv") else []
)


def wait_for(condition, what):
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, what() if callable(what) else what
        time.sleep(0.1)
    return found


@pytest.fixture
def environ(tmp_path):
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(tmp_path / "local"),
        "SPARK_DAEMON_MEMORY": "256m",
    }


@pytest.fixture
def cluster(environ, tmp_path):
    """A master and two workers; yields its address and the workers' processes."""
    if shutil.which("java") is None and not os.environ.get("JAVA_HOME"):
        pytest.skip("Spark needs Java 17 or newer, and there is none")
    import pyspark

    spark_class = Path(pyspark.__file__).parent / "bin" / "spark-class"
    running = []

    def launch(name, *arguments):
        log = tmp_path / f"{name}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [
                    *_DIE_WITH_US,
                    *(str(spark_class), f"org.apache.spark.deploy.{arguments[0]}"),
                    *("--host", "127.0.0.1", "--webui-port", "0", *arguments[1:]),
                ],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environ,
            )
        running.append(process)
        return process, log

    _, log = launch("master", "master.Master", "--port", "0")
    address = wait_for(
        lambda: re.search(r"spark://127\.0\.0\.1:[1-9]\d*", log.read_text()),
        "no master",
    )[0]
    workers = []
    for number in (0, 1):
        process, _ = launch(
            f"worker{number}",
            *("worker.Worker", "--cores", "1", "--memory", "1g", "--port", "0"),
            *("--work-dir", str(tmp_path / f"work{number}"), address),
        )
        workers.append(process)
    wait_for(lambda: log.read_text().count("Registering worker") == 2, "no workers")
    yield address, workers
    for process in reversed(running):
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
        process.kill()
        process.wait()


class Driver:
    """`mpbroker pipeline run`, started again whenever it is not running."""

    def __init__(self, command, environ, log):
        self._command, self._environ, self.log = command, environ, log
        self.process = None

    def ensure(self):
        if self.process is None or self.process.poll() is not None:
            with self.log.open("ab") as out:
                self.process = subprocess.Popen(
                    [*_DIE_WITH_US, *self._command],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    env=self._environ,
                    start_new_session=True,
                )

    def kill(self):
        """Kill Python and its JVM, which are a session of their own."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def finish(self):
        self.ensure()
        # All that is left: many batches, and on a loaded machine a minute for each try
        # to start Python in the ten seconds that Spark gives it.
        return self.process.wait(3 * PATIENCE_S)


def executors(workers):
    found = []
    for worker in workers:
        for child in psutil.Process(worker.pid).children(recursive=True):
            with suppress(psutil.Error):  # gone meanwhile, or not reaped yet
                if "CoarseGrainedExecutorBackend" in " ".join(child.cmdline()):
                    found.append(child)
    return found


def test_no_row_is_lost_or_doubled_whoever_is_killed(
    cluster, environ, make_broker, tmp_path
):
    address, workers = cluster
    broker = make_broker({"listeners": f"PLAINTEXT://127.0.0.1:{reusable_port()}"})
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.create_topics([NewTopic("rows", PARTITIONS, 1)])["rows"].result(90)
    lake = tmp_path / "lake"
    description = tmp_path / "rows.toml"
    description.write_text(
        f"""
        [pipeline]
        job = "ingest"
        checkpoint = "{tmp_path}/checkpoint"
        [source]
        bootstrap = "{broker.bootstrap}"
        subscribe = "rows"
        maxOffsetsPerTrigger = {BATCH}
        [value]
        format = "json"
        [value.fields]
        number = "bigint"
        [table]
        path = "{lake}"
        compact_every = 3
        [spark]
        "spark.driver.host" = "127.0.0.1"
        "spark.driver.bindAddress" = "127.0.0.1"
        "spark.driver.memory" = "768m"
        "spark.executor.memory" = "512m"
        "spark.executor.cores" = "1"
        "spark.cores.max" = "2"
        """
    )
    driver = Driver(
        [
            *(sys.executable, "-m", "mpbroker", "pipeline", "run"),
            *(str(description), "--master", address),
        ],
        environ,
        tmp_path / "driver.log",
    )
    sent = 0

    def send():
        nonlocal sent
        producer = Producer(
            {"bootstrap.servers": broker.bootstrap, "enable.idempotence": True}
        )
        for number in range(sent, sent + ROUND):
            value = b'{"number":%d}' % number
            producer.produce("rows", value, partition=number % PARTITIONS)
        assert producer.flush(90) == 0
        sent += ROUND

    def committed():
        return max(
            (int(path.stem[6:]) for path in lake.glob("_mpbroker/rows/batch-*.json")),
            default=-1,
        )

    seed = int(os.environ.get("MPBROKER_SPARK_SEED", time.time_ns() % 100_000))
    moment = random.Random(seed)
    print(f"MPBROKER_SPARK_SEED={seed}")

    def progressed(before):
        driver.ensure()
        return committed() > before

    for kill in range(KILLS):
        send()
        before = committed()
        wait_for(lambda b=before: progressed(b), lambda: driver.log.read_text()[-3000:])
        time.sleep(moment.random())  # anywhere in a batch: not a wait for anything
        victim = ("driver", "executor", "broker")[kill % 3]
        print(f"kill {kill}: {victim} after batch {committed()}", flush=True)
        if victim == "driver":
            if driver.process.poll() is None:
                driver.kill()
        elif victim == "executor":
            for process in executors(workers)[: moment.randint(1, 2)]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        else:
            broker.kill()
            broker.start()
    send()
    for _ in range(3):
        # A run that a kill has ended may end with an error; the next one goes on.
        if driver.finish() == 0:
            break
    assert driver.finish() == 0, driver.log.read_text()[-3000:]
    rows = pyarrow.dataset.dataset(lake).to_table(columns=["number"])
    numbers = rows.column("number").to_pylist()
    assert len(numbers) == len(set(numbers)) == sent
    assert all(list(tmp_path.glob(f"work{number}/app-*")) for number in (0, 1))
