"""Topics that are deleted, and those of the same name that are made after them."""

from pathlib import Path
from typing import Any

import pytest

from mpbroker.metadata.log_config import LogConfig
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.storage.cleaning.log_cleaner import LogCleaner
from mpbroker.storage.cleaning.log_upkeep import LogUpkeep
from mpbroker.storage.log.log_sync import LogSync
from mpbroker.storage.log_directory import LogDirectory
from mpbroker.storage.log_manager import LogManager
from mpbroker.storage.partition_directory import parse_directory_name
from tests.storage.batches import batch, read_all
from tests.storage.broker_rig import Broker, Start, Topics


def test_a_deleted_topic_is_gone_at_once_and_its_bytes_later(
    start: Start, topics: Topics, tmp_path: Path
) -> None:
    old = topics.create("t")
    broker = start(topics)
    other = LogManager(broker.directories, broker.manager._table, topics)
    log, elsewhere = broker.manager.log("t", 0), other.log("t", 0)
    log.append(batch(b"old"), now_ms=1)
    topics.delete("t")
    broker.upkeep.forget_topic(old)
    broker.manager.delete_topic(old)
    for handle in (log, elsewhere):
        with pytest.raises(ApiError) as refused:
            handle.append(batch(b"late"), now_ms=1)
        assert refused.value.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        with pytest.raises(ApiError):
            handle.reader.read(0, 100, min_one_batch=True)
    new = topics.create("t")
    log = broker.manager.log(new, 0)
    assert log.append(batch(b"new"), now_ms=1).base_offset == 0
    data = tmp_path / "data"
    gone = [path for path in data.iterdir() if path.name.endswith("-delete")]
    assert len(gone) == 1
    assert parse_directory_name(gone[0].name) is None
    renamed_ms = int(gone[0].stat().st_ctime * 1000)
    broker.upkeep.remove_deleted(renamed_ms + 30_000)
    assert gone[0].exists()
    broker.upkeep.remove_deleted(renamed_ms + 61_000)
    assert not gone[0].exists()
    assert read_all(log) == [(0, b"new")]
    broker.die()


def test_the_bytes_of_a_deleted_topic_stay_as_long_as_the_broker_keeps_files(
    start: Start, topics: Topics, tmp_path: Path
) -> None:
    old = topics.create("t")
    broker = start(topics)
    broker.manager.log("t", 0).append(batch(b"old"), now_ms=1)
    topics.delete("t")
    broker.upkeep.forget_topic(old)
    broker.manager.delete_topic(old)
    (gone,) = (tmp_path / "data").glob("*-delete")
    renamed_ms = int(gone.stat().st_ctime * 1000)
    topics.default_config = LogConfig({"file.delete.delay.ms": 120_000})
    broker.upkeep.remove_deleted(renamed_ms + 61_000)
    assert gone.exists()
    topics.default_config = LogConfig({"file.delete.delay.ms": 500})
    broker.upkeep.remove_deleted(renamed_ms + 501)
    assert not gone.exists()
    broker.die()


def test_many_deletions_are_noted_once(
    start: Start, topics: Topics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time all partitions are looked at, and files are forced to disk."""
    made = [topics.create(f"t{number}") for number in range(20)]
    broker = start(topics)
    written = []
    real = LogDirectory.write_checkpoints

    def write(directory: LogDirectory, *arguments: Any) -> None:
        written.append(arguments[-1].keys())
        real(directory, *arguments)

    monkeypatch.setattr(LogDirectory, "write_checkpoints", write)
    broker.upkeep.note_deletions()
    written.clear()
    for topic in made[:19]:
        topics.delete(topic.name)
        broker.upkeep.forget_topic(topic)
    broker.upkeep.note_deletions()
    broker.upkeep.note_deletions()
    assert written == [{"t19"}]
    broker.die()


def test_a_topic_that_somebody_deletes_meanwhile_is_no_trouble(
    start: Start, topics: Topics, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = topics.create("first"), topics.create("second")
    broker = start(topics)
    other = LogManager(broker.directories, broker.manager._table, topics)
    for topic in (first, second):
        broker.manager.log(topic.name, 0).append(batch(b"a"), now_ms=1)
        other.delete_topic(topic)
    # This process has heard of the one, and not yet of the other.
    topics.delete("first")
    broker.upkeep.forget_topic(first)
    broker.upkeep.run_retention(1)
    broker.manager.forget(second)
    broker.upkeep.write_checkpoints()
    broker.upkeep.run_retention(1)
    assert not caplog.records
    broker.die()


def test_a_checkpoint_of_a_log_that_is_deleted_meanwhile_is_no_trouble(
    start: Start,
    topics: Topics,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    gone, _ = topics.create("gone"), topics.create("stays")
    broker = start(topics)
    for name in ("gone", "stays"):
        broker.manager.log(name, 0).append(batch(b"a"), now_ms=1)
    other = LogManager(broker.directories, broker.manager._table, topics)
    flush_indexes = LogSync.flush_indexes

    def delete_behind_it(sync: LogSync) -> int:
        point = flush_indexes(sync)
        if "gone-0" in sync._view.directory:
            other.delete_topic(gone)
        return point

    monkeypatch.setattr(LogSync, "flush_indexes", delete_behind_it)
    broker.upkeep.write_checkpoints()
    assert not caplog.records
    points = (tmp_path / "data" / "recovery-point-offset-checkpoint").read_text()
    assert points.split("\n")[1:3] == ["1", "stays 0 0"]
    broker.die()


def test_a_directory_of_another_topic_of_that_name_is_moved_aside_not_removed(
    start: Start, topics: Topics, tmp_path: Path
) -> None:
    topics.create("t")
    broker = start(topics)
    broker.manager.log("t", 0).append(batch(b"old"), now_ms=1)
    broker.stop()
    topics.delete("t")
    topics.create("t")
    broker = start(topics)
    assert broker.manager.log("t", 0).lookup.latest() == 0
    stray = [p for p in (tmp_path / "data").iterdir() if p.name.endswith("-stray")]
    assert len(stray) == 1
    assert (stray[0] / f"{0:020d}.log").stat().st_size > 0
    broker.die()


def test_who_has_not_heard_of_a_topic_made_again_leaves_it_where_it_is(
    start: Start, topics: Topics
) -> None:
    old = topics.create("t")
    broker = start(topics)
    late = LogManager(
        broker.directories, broker.manager._table, topics, is_behind=lambda: True
    )
    # Deleted, but whoever did it has not said so in the row yet; and made again.
    topics.delete("t")
    topics.create("t")
    log = broker.manager.log("t", 0)
    log.append(batch(b"new"), now_ms=1)
    with pytest.raises(ApiError) as refused:
        late.log(old, 0)
    assert refused.value.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    broker.stop()
    broker = start(topics.again())
    assert read_all(broker.manager.log("t", 0)) == [(0, b"new")]
    broker.die()


@pytest.fixture
def cut(start: Start, topics: Topics) -> Broker:
    """A broker whose topic t begins at 15, as it is in the checkpoints."""
    topics.create("t", segment_bytes=200)
    broker = start(topics)
    log = broker.manager.log("t", 0)
    for _ in range(20):
        log.append(batch(b"x" * 50), now_ms=1)
    assert log.delete_records(15) == 15
    broker.upkeep.write_checkpoints()
    return broker


def test_a_topic_made_again_begins_at_0(
    cut: Broker, start: Start, topics: Topics
) -> None:
    cut.stop()
    topics = topics.again()
    broker = start(topics)
    assert broker.manager.log("t", 0).lookup.earliest() == 15
    broker.manager.delete_topic(topics.delete("t"))
    topics.create("t", segment_bytes=200)
    log = broker.manager.log("t", 0)
    assert log.append(batch(b"new"), now_ms=1).base_offset == 0
    broker.die()


def write_again(cut: Broker, topics: Topics, count: int) -> list[tuple[int, bytes]]:
    """Make t again, write so many records to it, and die; return what was written."""
    cut.manager.delete_topic(topics.delete("t"))
    topics.create("t", segment_bytes=200)
    log = cut.manager.log("t", 0)
    sent = [(number, b"%d" % number) for number in range(count)]
    for _, value in sent:
        log.append(batch(value), now_ms=1)
    cut.die()
    return sent


@pytest.mark.parametrize("count", [3, 30])
def test_a_topic_made_again_keeps_its_records_if_nobody_noted_that_the_old_one_went(
    cut: Broker, start: Start, topics: Topics, count: int
) -> None:
    sent = write_again(cut, topics, count)
    broker = start(topics.again())
    assert read_all(broker.manager.log("t", 0)) == sent
    broker.die()


@pytest.mark.parametrize("count", [3, 30])
def test_a_topic_made_again_keeps_its_records_if_its_processes_were_replaced_then(
    cut: Broker, start: Start, topics: Topics, count: int
) -> None:
    sent = write_again(cut, topics, count)
    broker = start(topics.again(), logs=[("t", 0, 0, count)])
    assert read_all(broker.manager.log("t", 0)) == sent
    broker.die()


@pytest.mark.parametrize("noted", [True, False])
def test_a_topic_made_again_is_compacted_from_its_beginning(
    start: Start, topics: Topics, noted: bool
) -> None:
    def fill(broker: Broker) -> None:
        topics.create("c", cleanup_policy=("compact",), segment_bytes=600)
        log = broker.manager.log("c", 0)
        for number in range(60):
            log.append(batch((b"%d" % (number % 3), b"v" * 40)), now_ms=1)

    broker = start(topics)
    fill(broker)
    broker.upkeep.note_deletions()
    assert broker.upkeep.run_cleaner(1) == 1
    old = topics.delete("c")
    if noted:
        broker.upkeep.forget_topic(old)
    else:  # the housekeeper died
        broker.manager.delete_topic(old)
        broker = broker._replace(upkeep=LogUpkeep(broker.manager, topics, LogCleaner()))
    fill(broker)
    broker.upkeep.note_deletions()
    assert broker.upkeep.run_cleaner(1) == 1
    assert len(read_all(broker.manager.log("c", 0))) < 12
    broker.die()


def test_a_topic_made_again_is_compacted_though_the_old_one_could_not_be(
    start: Start, topics: Topics, tmp_path: Path
) -> None:
    broker = start(topics)
    cleaned = []
    for damaged in (True, False):
        topics.create("c", cleanup_policy=("compact",), segment_bytes=600)
        log = broker.manager.log("c", 0)
        for number in range(60):
            log.append(batch((b"%d" % (number % 3), b"v" * 40)), now_ms=1)
        if damaged:
            with open(tmp_path / "data" / "c-0" / f"{0:020d}.log", "r+b") as file:
                file.seek(61)  # behind the header of the first batch
                file.write(b"\xff" * 20)
        cleaned.append(broker.upkeep.run_cleaner(1))
        if damaged:
            broker.upkeep.forget_topic(topics.delete("c"))
    assert cleaned == [0, 1]
    broker.die()


def test_a_damaged_file_of_topic_ids_is_no_reason_to_believe_the_others(
    cut: Broker, start: Start, topics: Topics, tmp_path: Path
) -> None:
    cut.stop()
    (tmp_path / "data" / "checkpoint-topic-ids").write_bytes(b"0\n7\nt \xff")
    broker = start(topics.again())
    assert broker.manager.log("t", 0).lookup.latest() == 20
    broker.die()
