"""A real Apache Kafka, so that a compatibility test can be proved before it judges us.

    python -m tests.support.apache_kafka [DATA_DIR]

runs one node (KRaft) on loopback until Ctrl-C and prints its address; point the tests
at it with MPBROKER_TEST_BOOTSTRAP.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from base64 import urlsafe_b64encode
from pathlib import Path
from typing import Final

from tests.support.fetch_clients import JAVA_DIR, fetch_java_tools

START_TIMEOUT_S: Final = 60

_PROPERTIES: Final = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller_port}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
log.dirs={data_dir}
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
"""


def java_command(main_class: str, *arguments: str, heap: str = "256m") -> list[str]:
    """Return the command that runs a main class of Apache Kafka's jars."""
    return [
        "java",
        f"-Xmx{heap}",
        # A tool lives for a second: compile it quickly rather than well.
        "-XX:TieredStopAtLevel=1",
        "-XX:+UseSerialGC",
        "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
        "-cp",
        f"{JAVA_DIR}/*",
        main_class,
        *arguments,
    ]


class ApacheKafka:
    """One Kafka node in its own process; usable as a context manager."""

    def __init__(self, data_dir: Path, *, heap: str = "1g") -> None:
        self.data_dir = data_dir
        self.log_path = data_dir.with_name(data_dir.name + ".kafka.log")
        self.bootstrap = ""
        self._heap = heap
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> str:
        """Format the directory, run the broker, wait until it takes connections."""
        self.data_dir.mkdir(parents=True, exist_ok=True)
        port, controller_port = _free_port(), _free_port()
        properties = self.data_dir.with_name(self.data_dir.name + ".properties")
        properties.write_text(
            _PROPERTIES.format(
                port=port, controller_port=controller_port, data_dir=self.data_dir
            )
        )
        cluster_id = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        subprocess.run(
            java_command(
                "kafka.tools.StorageTool",
                *("format", "-t", cluster_id, "-c", str(properties)),
                "--ignore-formatted",
            ),
            check=True,
            stdout=subprocess.DEVNULL,
        )
        command = java_command("kafka.Kafka", str(properties), heap=self._heap)
        command.remove("-XX:TieredStopAtLevel=1")
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.bootstrap = f"127.0.0.1:{port}"
        self._wait_until_it_answers()
        return self.bootstrap

    def _wait_until_it_answers(self) -> None:
        from confluent_kafka.admin import AdminClient

        assert self._process is not None
        admin = AdminClient(
            {"bootstrap.servers": self.bootstrap, "log_level": 0, "logger": None}
        )
        if not admin.list_topics(timeout=START_TIMEOUT_S).brokers:
            raise TimeoutError(f"Apache Kafka did not start; see {self.log_path}")

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None

    def wait(self) -> None:
        assert self._process is not None
        self._process.wait()

    def __enter__(self) -> ApacheKafka:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    if reason := fetch_java_tools():
        sys.exit(reason)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as scratch:
        data_dir = Path(sys.argv[1] if len(sys.argv) > 1 else f"{scratch}/data")
        with ApacheKafka(data_dir) as kafka:
            print(f"Apache Kafka is ready: MPBROKER_TEST_BOOTSTRAP={kafka.bootstrap}")
            sys.stdout.flush()
            try:
                kafka.wait()
            except KeyboardInterrupt:
                print("stopping")


if __name__ == "__main__":
    main()
