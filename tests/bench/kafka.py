"""Apache Kafka itself to compare with: a single KRaft node from the jars of the tests.

The jars come from `python -m tests.support.fetch_clients` (Maven).
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.bench.brokers import (
    Broker,
    BrokerSource,
    BrokerStartError,
    free_port,
    process_in,
    scratch_directory,
    wait_for_answer,
    why_gone,
)

JARS: Final = Path(__file__).parents[2] / ".downloads" / "java"
# Kafka's own defaults but for what a single node needs, and a heap that fits a laptop.
HEAP: Final = ("-Xms1g", "-Xmx1g")
CLUSTER_ID: Final = "bXBicm9rZXItYmVuY2gtMQ"


class KafkaBroker(BrokerSource):
    """Apache Kafka, started afresh in a directory of its own."""

    label = "kafka"
    warms_up = True

    @contextlib.contextmanager
    def broker(self) -> Iterator[Broker]:
        if not any(JARS.glob("kafka_*.jar")):
            raise BrokerStartError(
                f"no Apache Kafka in {JARS}: run python -m tests.support.fetch_clients"
            )
        with scratch_directory() as directory:
            port, controller = free_port(), free_port()
            properties = directory / "server.properties"
            properties.write_text(_properties(directory, port, controller))
            subprocess.run(
                [
                    *_java("kafka.tools.StorageTool"),
                    *("format", "-t", CLUSTER_ID, "-c", str(properties)),
                ],
                check=True,
                capture_output=True,
            )
            command = [*_java("kafka.Kafka"), str(properties)]
            with process_in(directory, command) as process:
                address = ("127.0.0.1", port)
                wait_for_answer(address, lambda: why_gone(process, directory))
                yield Broker(self.label, address, process.pid)


def _java(main_class: str) -> list[str]:
    return ["java", *HEAP, "-cp", f"{JARS}/*", main_class]


def _properties(directory: Path, port: int, controller: int) -> str:
    settings = {
        "process.roles": "broker,controller",
        "node.id": 1,
        "controller.quorum.voters": f"1@127.0.0.1:{controller}",
        "listeners": f"PLAINTEXT://127.0.0.1:{port},"
        f"CONTROLLER://127.0.0.1:{controller}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
        "controller.listener.names": "CONTROLLER",
        "log.dirs": directory / "kafka-logs",
        "offsets.topic.replication.factor": 1,
        "transaction.state.log.replication.factor": 1,
        "transaction.state.log.min.isr": 1,
        "share.coordinator.state.topic.replication.factor": 1,
        "share.coordinator.state.topic.min.isr": 1,
    }
    return "".join(f"{key}={value}\n" for key, value in settings.items())
