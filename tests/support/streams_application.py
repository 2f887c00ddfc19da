"""A word count with Kafka Streams, as a process: one instance of an application."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import confluent_kafka

from tests.support.apache_kafka import java_command
from tests.support.children import wait_until

PARTITIONS: Final = 4
WORDS: Final = 7
TIMEOUT_S: Final = 120


class StreamsApplication:
    """One instance: it counts the words of a topic into another one.

    Args:
        directory: where its state and what it prints go.
        arguments: the application's id, the topic that it reads, the one that it
            writes.
        settings: of Kafka Streams.
    """

    def __init__(
        self, directory: Path, arguments: tuple[str, str, str], settings: dict[str, str]
    ) -> None:
        directory.mkdir()
        self._printed = directory / "printed"
        self._complaints = directory / "complaints"
        settings = {
            "group.protocol": "streams",
            "processing.guarantee": "exactly_once_v2",
            "commit.interval.ms": "100",
            "state.dir": str(directory / "state"),
            **settings,
        }
        with self._printed.open("w") as out, self._complaints.open("w") as err:
            self._process = subprocess.Popen(
                java_command(
                    "StreamsApplication",
                    *arguments,
                    *(f"{key}={value}" for key, value in settings.items()),
                ),
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
            )

    def states(self) -> list[str]:
        """Return the states that it was in, the last one at the end."""
        return self._printed.read_text().split("\n")[:-1]

    def wait_until_running(self) -> None:
        """Wait until it has its tasks."""
        wait_until(lambda: self.states()[-1:] == ["RUNNING"], TIMEOUT_S)

    def stop(self) -> None:
        """End it as its users do; expect that it says no error."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        code = self._process.wait(TIMEOUT_S)
        complaints = self._complaints.read_text()[-3000:]
        assert code == 0, complaints
        assert self.states()[-1] == "NOT_RUNNING", complaints

    def kill(self) -> None:
        """End it at once; it does not leave its group."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.kill()
        self._process.wait()


@contextmanager
def word_count(
    bootstrap: str, names: tuple[str, str, str], **settings: str
) -> Iterator[WordCount]:
    """Begin with one instance; end all that are left.

    Args:
        bootstrap: the broker.
        names: the application's id and its two topics, which exist.
        settings: of Kafka Streams, with "_" for ".".
    """
    with tempfile.TemporaryDirectory() as directory:
        count = WordCount(bootstrap, names, Path(directory), settings)
        try:
            count.start()
            yield count
        finally:
            count.close()


class WordCount:
    """The application: its instances, and how often each word was written to it."""

    def __init__(
        self,
        bootstrap: str,
        names: tuple[str, str, str],
        directory: Path,
        settings: dict[str, str],
    ) -> None:
        self._bootstrap = bootstrap
        self._names = names
        self._directory = directory
        self._settings = {key.replace("_", "."): text for key, text in settings.items()}
        self._started = 0
        self.instances: list[StreamsApplication] = []
        self.written: dict[bytes, int] = {}
        self._producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": bootstrap,
                "enable.idempotence": True,
                "log_level": 0,  # tests kill brokers
            }
        )

    def start(self) -> StreamsApplication:
        """Start another instance."""
        self._started += 1
        settings = {"bootstrap.servers": self._bootstrap, **self._settings}
        instance = StreamsApplication(
            self._directory / str(self._started), self._names, settings
        )
        self.instances.append(instance)
        return instance

    def close(self) -> None:
        """End all instances that are left, and the producer's threads."""
        for instance in self.instances:
            instance.kill()
        del self._producer  # which has no other way to end

    def write(self, number: int) -> None:
        """Write so many words, to all partitions in turn."""
        total = sum(self.written.values())
        for index in range(total, total + number):
            word = b"w%d" % (index % WORDS)
            self._producer.produce(self._names[1], word, partition=index % PARTITIONS)
            self.written[word] = self.written.get(word, 0) + 1
        assert self._producer.flush(TIMEOUT_S) == 0

    def read_all(self) -> list[tuple[bytes, int]]:
        """Wait until all words are counted; return every count, in order for a word."""
        counted: dict[bytes, int] = {}
        every: list[tuple[bytes, int]] = []
        consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": self._bootstrap,
                "group.id": f"reads-{self._names[2]}",
                "isolation.level": "read_committed",
                "log_level": 0,
            }
        )
        consumer.assign(
            [
                confluent_kafka.TopicPartition(self._names[2], number, 0)
                for number in range(PARTITIONS)
            ]
        )

        def are_counted() -> bool:
            message = consumer.poll(1.0)
            while message is not None and message.error() is None:
                counted[message.key()] = int(message.value())
                every.append((message.key(), int(message.value())))
                message = consumer.poll(0.1)
            return counted == self.written

        try:
            wait_until(are_counted, TIMEOUT_S)
        finally:
            consumer.close()
        return every
