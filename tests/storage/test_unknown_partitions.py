"""Directories of partitions that the metadata log does not have are told of."""

from pathlib import Path

import pytest

from mpbroker.storage.log_directory import open_log_directories, recover_metadata
from tests.support.metadata import PlainCell, start


def recover(data: Path, *, is_alone: bool = True) -> None:
    (directory,) = open_log_directories([str(data)])
    recover_metadata([directory], PlainCell(), 1, is_alone=is_alone)
    directory.close()


def test_partitions_of_unknown_topics_are_counted_and_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As with a Kafka whose metadata.log.dir was another directory."""
    start(tmp_path).create_topic("known", 1)
    for name in (
        "known-0",
        "flights-0",
        "flights-1",
        "gone.0123-delete",
        "no-partition",
    ):
        (tmp_path / name).mkdir()
    before = sorted(each.name for each in tmp_path.iterdir())
    recover(tmp_path)
    (line,) = [r.getMessage() for r in caplog.records if "partition(s)" in r.message]
    assert f"{tmp_path}: 2 partition(s), such as flights-0," in line
    assert "metadata.log.dir" in line
    assert {*before, ".lock"} >= {each.name for each in tmp_path.iterdir()} >= {*before}


@pytest.mark.parametrize(("names", "is_alone"), [(["known-0"], True), (["t-0"], False)])
def test_nothing_is_said_without_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, names: list[str], is_alone: bool
) -> None:
    start(tmp_path).create_topic("known", 1)
    for name in names:
        (tmp_path / name).mkdir()
    recover(tmp_path, is_alone=is_alone)
    assert not [r for r in caplog.records if "partition(s)" in r.getMessage()]
