"""Partitions without a broker: rows in a table of their own, files in tmp_path."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from mpbroker.ipc.tables.partition_table import PartitionTable
from mpbroker.metadata.log_config import LogConfig
from mpbroker.storage.cleaning.log_cleaner import LogCleaner
from mpbroker.storage.cleaning.log_upkeep import LogUpkeep
from mpbroker.storage.log.log_loader import LoadHints
from mpbroker.storage.log.partition_log import PartitionLog
from mpbroker.storage.log_directory import open_log_directories
from mpbroker.storage.log_manager import LogManager
from tests.storage.broker_rig import Broker, Rows, Start, Topics

OpenLog = Callable[..., PartitionLog]


@pytest.fixture(scope="session")
def table() -> PartitionTable:
    return PartitionTable.create()


@pytest.fixture(scope="session")
def new_row() -> Callable[[], int]:
    return _row_numbers.__next__


@pytest.fixture
def open_log(table: PartitionTable, tmp_path: Path) -> Iterator[OpenLog]:
    """Return a function that opens tmp_path as a partition.

    Each call stands for a broker that starts: it has a row of its own, unless ``row``
    is given. Examples of one property test take a ``name`` each.
    """

    def open_it(
        *,
        row: int | None = None,
        hints: LoadHints | None = None,
        name: str = "t-0",
        **config: object,
    ) -> PartitionLog:
        if row is None:
            row = next(_row_numbers)
            table.initialise_row(row)
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        values = {name.replace("_", "."): value for name, value in config.items()}
        log = PartitionLog(str(directory), table.row(row), LogConfig(values), hints)
        opened.append(log)
        return log

    opened: list[PartitionLog] = []
    yield open_it
    for log in opened:
        log.close()


@pytest.fixture
def topics(table: PartitionTable, new_row: Rows) -> Topics:
    return Topics(table, new_row)


@pytest.fixture
def start(table: PartitionTable, tmp_path: Path) -> Start:
    def start_it(
        topics: Topics, *names: str, logs: Sequence[tuple[str, int, int, int]] = ()
    ) -> Broker:
        paths = [str(tmp_path / name) for name in names or ("data",)]
        directories = open_log_directories(paths)
        for directory in directories:
            directory.know_logs(logs)
            directory.know_topics({t.name: t.topic_id for t in topics.topics()})
        manager = LogManager(directories, table, topics)
        is_short = len(directories) < len(paths)
        manager.lacks_directory = lambda: is_short
        return Broker(manager, LogUpkeep(manager, topics, LogCleaner()), directories)

    return start_it


_row_numbers = itertools.count()
