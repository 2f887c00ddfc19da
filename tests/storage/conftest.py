"""Partitions without a broker: rows in a table of their own, files in tmp_path."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mpbroker.ipc.partition_table import PartitionTable
from mpbroker.storage.log_config import LogConfig
from mpbroker.storage.log_loader import LoadHints
from mpbroker.storage.partition_log import PartitionLog

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


_row_numbers = itertools.count()
