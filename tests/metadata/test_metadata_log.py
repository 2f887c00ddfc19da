"""The metadata log: what is committed, what survives, and what is repaired."""

import errno
import os
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.base.storage_errors import CorruptLogError, LogDirectoryError
from mpbroker.metadata import metadata_log
from mpbroker.metadata.meta_properties import uuid_to_text
from mpbroker.metadata.metadata_batches import MetadataBatches
from mpbroker.metadata.metadata_files import MetadataFiles
from mpbroker.metadata.metadata_image import partition_record, topic_record
from mpbroker.metadata.metadata_log import (
    MetadataLog,
    metadata_log_end,
    metadata_log_path,
    recover_metadata_log,
)
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.records.record_batch import iter_batches
from tests.support.children import Child, kill_at_line, lines_of
from tests.support.metadata import (
    NOW_MS,
    DyingLog,
    PlainCell,
    TornLog,
    in_child,
    registry,
    shared_cell,
    start,
)

RECORD = {
    "type": "ConfigRecord",
    "resourceType": 4,
    "resourceName": "",
    "name": "a",
    "value": "é",
}


@pytest.fixture
def cell(tmp_path):
    cell = PlainCell()
    recover_metadata_log(str(tmp_path), cell, NOW_MS)
    return cell


@pytest.fixture
def path(tmp_path):
    return metadata_log_path(str(tmp_path))


def open_log(tmp_path, cell, log_class=MetadataLog):
    log = log_class(str(tmp_path), cell)
    log.read_new()
    return log


def append(tmp_path, cell, *records, log_class=MetadataLog):
    log = open_log(tmp_path, cell, log_class)
    with log.locked():
        log.append(records, NOW_MS)
    log.close()


def recover(tmp_path):
    cell = PlainCell()
    image = recover_metadata_log(str(tmp_path), cell, NOW_MS)
    return image, cell.end


def test_a_new_log_is_a_kafka_segment_that_says_its_level(tmp_path, cell, path):
    log = MetadataLog(str(tmp_path), cell)
    kind = "FeatureLevelRecord"
    assert log.read_new() == [
        {"type": kind, "name": "metadata.version", "featureLevel": 25},
        {"type": kind, "name": "group.version", "featureLevel": 1},
        {"type": kind, "name": "transaction.version", "featureLevel": 2},
    ]
    assert os.path.getsize(path) == cell.end
    assert path.endswith("__cluster_metadata-0/00000000000000000000.log")


def test_readers_get_what_was_appended_since_they_last_read_and_only_that(
    tmp_path, cell
):
    reader = open_log(tmp_path, cell)
    assert not reader.has_news
    append(tmp_path, cell, RECORD, {**RECORD, "name": "b"})
    append(tmp_path, cell, {**RECORD, "name": "c"})
    assert reader.has_news
    assert [record["name"] for record in reader.read_new()] == ["a", "b", "c"]
    assert not reader.has_news
    assert reader.read_new() == []


def test_offsets_go_on_across_writers_and_batches(tmp_path, cell, path):
    append(tmp_path, cell, RECORD, RECORD)
    append(tmp_path, cell, RECORD)
    with open(path, "rb") as file:
        headers = [header for header, _ in iter_batches(file.read())]
    assert [(header.base_offset, header.record_count) for header in headers] == [
        (0, 3),
        (3, 2),
        (5, 1),
    ]
    assert {header.max_timestamp for header in headers} == {NOW_MS}


@pytest.mark.parametrize("log_class", [DyingLog, TornLog])
def test_a_writer_killed_before_the_publish_leaves_no_trace(tmp_path, log_class, path):
    cell = shared_cell()
    recover_metadata_log(str(tmp_path), cell, NOW_MS)
    long = {**RECORD, "value": "x" * 500}
    killed = in_child(lambda: append(tmp_path, cell, long, log_class=log_class))
    assert killed == -signal.SIGKILL
    reader = open_log(tmp_path, cell)
    assert os.path.getsize(path) > cell.end
    append(tmp_path, cell, RECORD)
    assert reader.read_new() == [RECORD]
    assert os.path.getsize(path) == cell.end


def test_writers_in_many_processes_lose_and_repeat_nothing(tmp_path):
    cell = shared_cell()
    recover_metadata_log(str(tmp_path), cell, NOW_MS)

    def work(writer):
        one = registry(tmp_path, cell)
        for number in range(10):
            one.alter_broker_config(
                "", lambda old, n=number: {**old, f"{writer}.{n}": "x"}
            )

    children = []
    for writer in range(4):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                work(writer)
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    assert {os.waitpid(pid, 0)[1] for pid in children} == {0}
    assert set(registry(tmp_path, cell).broker_overrides("")) == {
        f"{writer}.{number}" for writer in range(4) for number in range(10)
    }


def test_a_full_disk_is_told_and_commits_nothing(tmp_path, cell, monkeypatch):
    log = open_log(tmp_path, cell)
    before = cell.end

    def no_space(fd, data, position):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", no_space)
        with pytest.raises(ApiError, match="No space left on device") as caught:
            log.append([RECORD], NOW_MS)
    assert caught.value.error_code is ErrorCode.KAFKA_STORAGE_ERROR
    assert cell.end == before
    log.append([RECORD], NOW_MS)
    assert log.read_new() == [RECORD]


def test_a_failed_sync_can_be_tried_again_from_the_first_byte(
    tmp_path, cell, monkeypatch
):
    log = open_log(tmp_path, cell)

    def broken(fd):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", broken)
        with pytest.raises(ApiError, match="Input/output error"):
            log.append([RECORD], NOW_MS)
    assert log.read_new() == []
    log.append([{**RECORD, "name": "b"}], NOW_MS)
    assert [record["name"] for record in log.read_new()] == ["b"]


# -- recovery -------------------------------------------------------------------------


def test_everything_appended_is_there_after_a_restart(tmp_path, cell):
    append(tmp_path, cell, RECORD)
    image, end = recover(tmp_path)
    assert image.config(4, "") == {"a": "é"}
    assert end == cell.end


def test_what_was_never_synced_is_on_disk_before_anything_is_answered_by_it(
    tmp_path, cell, monkeypatch
):
    """Its writer was killed between write and sync; then a power cut comes."""
    append(tmp_path, cell, RECORD)
    synced = set()

    def note(fd):
        synced.add(os.readlink(f"/proc/self/fd/{fd}"))

    class Judge(PlainCell):
        """Looks what is on disk when the end is published."""

        def __setattr__(self, name, value):
            if name == "end" and value:
                path = metadata_log_path(str(tmp_path))
                directory = os.path.dirname(path)
                assert {path, directory, str(tmp_path)} <= synced
            super().__setattr__(name, value)

    monkeypatch.setattr(os, "fdatasync", note)
    monkeypatch.setattr(os, "fsync", note)
    judge = Judge()
    recover_metadata_log(str(tmp_path), judge, NOW_MS)
    assert judge.end == cell.end


@given(data=st.data())
def test_a_log_cut_anywhere_keeps_its_whole_batches(tmp_path_factory, data):
    tmp_path = tmp_path_factory.mktemp("log")
    cell = PlainCell()
    recover_metadata_log(str(tmp_path), cell, NOW_MS)
    ends = [cell.end]
    for name in "abc":
        append(tmp_path, cell, {**RECORD, "name": name})
        ends.append(cell.end)
    length = data.draw(st.integers(ends[0], ends[-1]))
    zeros = data.draw(st.integers(0, 100))
    path = metadata_log_path(str(tmp_path))
    written = Path(path).read_bytes()
    os.truncate(path, length)
    if length < ends[-1]:
        # A crash may also leave the file's new size with zeros for bytes.
        missing = min(end for end in ends if end > length) - length
        os.truncate(path, length + min(zeros, missing))
    left = Path(path).read_bytes()  # a batch may end with the zeros that it lost
    image, end = recover(tmp_path)
    whole = [
        name
        for name, end in zip("abc", ends[1:], strict=True)
        if left[:end] == written[:end]
    ]
    assert list(image.config(4, "")) == whole
    assert end == os.path.getsize(path) == ends[len(whole)]


def test_damage_in_the_middle_is_refused_and_left_alone(tmp_path, cell, path):
    first = cell.end
    append(tmp_path, cell, RECORD)
    append(tmp_path, cell, RECORD)
    with open(path, "r+b") as file:
        file.seek(first + 70)
        file.write(b"\xff")
    size = os.path.getsize(path)
    with pytest.raises(CorruptLogError, match=rf"byte {first} is damaged"):
        recover(tmp_path)
    assert os.path.getsize(path) == size


@given(st.binary(max_size=300))
def test_any_bytes_are_recovered_or_refused(tmp_path_factory, noise):
    tmp_path = tmp_path_factory.mktemp("log")
    recover(tmp_path)
    path = metadata_log_path(str(tmp_path))
    with open(path, "ab") as file:
        file.write(noise)
    try:
        recover(tmp_path)
    except CorruptLogError:
        return
    recover(tmp_path)


@pytest.mark.parametrize(
    "record",
    [
        {"type": "PartitionRecord", "topicId": "5L6g3nShT-eMCtK--X86sw"},
        {"type": "UserScramCredentialRecord", "name": "alice", "mechanism": 9},
        {"type": "FeatureLevelRecord", "name": "metadata.version", "featureLevel": 35},
    ],
)
def test_a_record_that_contradicts_the_others_stops_the_start(tmp_path, cell, record):
    append(tmp_path, cell, record)
    with pytest.raises(CorruptLogError, match="metadata record"):
        recover(tmp_path)


def size_of(tmp_path):
    directory = tmp_path / "__cluster_metadata-0"
    return sum(each.stat().st_size for each in directory.iterdir())


def test_a_snapshot_takes_the_place_of_mostly_dead_records(tmp_path, path):
    one = start(tmp_path)
    one.create_topic("keep", 3, {"segment.bytes": "1000"})
    for number in range(20):
        one.create_topic(f"t{number}", 60)
        one.delete_topic(f"t{number}")
    one.alter_broker_config("", lambda old: {"log.retention.ms": "5"})
    one.allocate_producer_id()
    (kept,) = one.topics()
    before = os.path.getsize(path)
    again = start(tmp_path)
    (topic,) = again.topics()
    assert size_of(tmp_path) < before / 10
    assert (topic.name, topic.topic_id, topic.partitions) == (
        "keep",
        kept.topic_id,
        [0, 1, 2],
    )
    assert topic.config == kept.config
    assert again.allocate_producer_id() == 1000
    again.create_topic("more", 1)
    assert start(tmp_path).topic("more").partitions == [3]


def test_a_log_that_others_may_come_back_to_is_not_rewritten(tmp_path, path):
    one = start(tmp_path)
    for number in range(20):
        one.create_topic(f"t{number}", 60)
        one.delete_topic(f"t{number}")
    before = Path(path).read_bytes()
    recover_metadata_log(str(tmp_path), PlainCell(), NOW_MS, may_rewrite=False)
    assert Path(path).read_bytes() == before
    recover_metadata_log(str(tmp_path), PlainCell(), NOW_MS)
    assert size_of(tmp_path) < len(before)


def news_behind(tmp_path, *records, offset=None):
    """The batches that a cluster's log has behind the copy of it in a directory."""
    batches = MetadataBatches(MetadataFiles(None, ()))
    batches.next_offset = metadata_log_end(str(tmp_path)) if offset is None else offset
    return batches.encode(records, NOW_MS)


def test_news_of_the_cluster_are_appended_once_and_only_at_the_end(tmp_path):
    one = start(tmp_path)
    gone = one.create_topic("gone", 2)
    removal = {"type": "RemoveTopicRecord", "topicId": uuid_to_text(gone.topic_id)}
    news = news_behind(tmp_path, RECORD, removal)
    told = []
    for _ in range(2):  # the second time they are there already
        cell = PlainCell()
        image = recover_metadata_log(
            str(tmp_path), cell, NOW_MS, news=news, see_off=told.extend
        )
        assert image.config(4, "") == {"a": "é"} and not image.topics
        known = registry(tmp_path, cell)
        assert known.topic("gone") is None and not known.is_behind
    assert [each.name for each in told] == ["gone", "gone"]
    before = size_of(tmp_path)
    recover_metadata_log(
        str(tmp_path), PlainCell(), NOW_MS, news=news_behind(tmp_path, RECORD, offset=1)
    )
    assert size_of(tmp_path) == before


def test_news_that_contradict_the_copy_change_no_file(tmp_path, cell, path):
    before = Path(path).read_bytes()
    news = news_behind(tmp_path, RECORD, partition_record(bytes(range(16)), 0, 1))
    with pytest.raises(CorruptLogError):
        recover_metadata_log(str(tmp_path), cell, NOW_MS, news=news)
    assert Path(path).read_bytes() == before


def test_a_start_that_is_killed_while_it_appends_news_can_be_repeated(tmp_path):
    files = (metadata_log.__file__,)
    whole = tmp_path / "whole"
    whole.mkdir()
    start(whole).create_topic("orders", 2)
    news = news_behind(whole, RECORD)

    def begin(log_dir, kill_at=None):
        if kill_at is not None:
            kill_at_line(kill_at, files)
        cell = PlainCell()
        return recover_metadata_log(str(log_dir), cell, NOW_MS, news=news), cell

    lines = lines_of(lambda: begin(shutil.copytree(whole, tmp_path / "counted")), files)
    for kill_at in range(1, lines, 5):
        log_dir = shutil.copytree(whole, tmp_path / str(kill_at))
        assert Child(partial(begin, log_dir, kill_at)).wait() == -signal.SIGKILL
        image, cell = begin(log_dir)
        assert image.config(4, "") == {"a": "é"}
        assert registry(log_dir, cell).topic("orders").partitions == [0, 1]


def test_rows_that_the_news_use_up_are_given_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(metadata_log, "MAX_PARTITIONS", 10)
    one = start(tmp_path)
    one.create_topic("keep", 3)
    one.create_topic("gone", 5)
    one.delete_topic("gone")
    added = topic_record("new", bytes(range(16)))
    places = [partition_record(bytes(range(16)), n, 1) for n in range(3)]
    cell = PlainCell()
    news = news_behind(tmp_path, added, *places)
    recover_metadata_log(str(tmp_path), cell, NOW_MS, news=news)
    known = registry(tmp_path, cell)
    assert known.row_count == 6
    assert known.topic("new").partitions == [3, 4, 5]


def test_a_rewrite_that_was_interrupted_is_forgotten(tmp_path, cell, path):
    append(tmp_path, cell, RECORD)
    with open(path + ".swap", "wb") as file:
        file.write(b"half")
    image, _ = recover(tmp_path)
    assert image.config(4, "") == {"a": "é"}
    assert not os.path.exists(path + ".swap")


def test_a_directory_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "__cluster_metadata-0").write_text("a file")
    with pytest.raises(LogDirectoryError, match=r"log\.dirs: cannot use"):
        recover(tmp_path)


def test_a_log_of_another_owner_keeps_its_mode(tmp_path, cell, path, monkeypatch):
    os.chmod(path, 0o660)

    def refuse(fd, mode):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "fchmod", refuse)
    recover(tmp_path)
    assert os.stat(path).st_mode & 0o777 == 0o660


def test_who_was_removed_is_told_before_a_snapshot_forgets_it(tmp_path):
    one = start(tmp_path)
    ids = []
    for number in range(20):
        ids.append(one.create_topic(f"t{number}", 60).topic_id)
        one.delete_topic(f"t{number}")
    one.create_topic("t3", 1)
    size = size_of(tmp_path)
    told = []

    def see_off(removed):
        assert size_of(tmp_path) == size
        told.extend(
            (topic.name, topic.topic_id, topic.partition_count) for topic in removed
        )

    recover_metadata_log(str(tmp_path), PlainCell(), NOW_MS, see_off=see_off)
    assert told == [(f"t{number}", ids[number], 60) for number in range(20)]
    assert size_of(tmp_path) < size
