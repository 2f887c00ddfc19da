"""All logs of a broker, without its processes: a registry of topics, directories."""

import os
from collections.abc import Callable
from typing import NamedTuple

from mpbroker.ipc.tables.partition_table import PartitionTable
from mpbroker.metadata.log_config import LogConfig
from mpbroker.storage.cleaning.log_upkeep import LogUpkeep
from mpbroker.storage.log_directory import LogDirectory
from mpbroker.storage.log_manager import LogManager


class Topic(NamedTuple):
    name: str
    topic_id: bytes
    partitions: list[int]
    config: LogConfig


class Topics:
    """A registry whose rows are never used twice."""

    def __init__(self, table: PartitionTable, rows: "Rows") -> None:
        self._table = table
        self._rows = rows
        self._topics: dict[str, Topic] = {}
        self.default_config = LogConfig({})
        self.broker_epoch = -1

    def topic(self, name: str) -> Topic | None:
        return self._topics.get(name)

    def topics(self) -> list[Topic]:
        return list(self._topics.values())

    def create(self, name: str, partitions: int = 1, **config: object) -> Topic:
        rows = [self._rows() for _ in range(partitions)]
        for row in rows:
            self._table.initialise_row(row)
        values = {key.replace("_", "."): value for key, value in config.items()}
        topic = Topic(name, os.urandom(16), rows, LogConfig(values))
        self._topics[name] = topic
        return topic

    def again(self) -> "Topics":
        """The same topics as a broker started anew knows them."""
        other = Topics(self._table, self._rows)
        other.default_config = self.default_config
        for topic in self.topics():
            rows = [self._rows() for _ in topic.partitions]
            for row in rows:
                self._table.initialise_row(row)
            other._topics[topic.name] = topic._replace(partitions=rows)
        return other

    def delete(self, name: str) -> Topic:
        return self._topics.pop(name)


Rows = Callable[[], int]


class Broker(NamedTuple):
    manager: LogManager
    upkeep: LogUpkeep
    directories: list[LogDirectory]

    def stop(self) -> None:
        self.upkeep.shut_down()
        self.die()

    def die(self) -> None:
        self.manager.close()
        for directory in self.directories:
            directory.close()


Start = Callable[..., Broker]
