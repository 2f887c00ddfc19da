"""A snapshot that a running broker makes: readers, writers and rows go on behind it."""

import os
import signal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpbroker.base.storage_errors import LogReplacedError
from mpbroker.metadata.metadata_files import find_files
from mpbroker.metadata.metadata_image import TopicImage
from mpbroker.metadata.metadata_log import MetadataLog, recover_metadata_log
from mpbroker.metadata.scram_credentials import (
    ScramCredentialReader,
    ScramMechanism,
    credential_of_salted_password,
    scram_credential_record,
)
from mpbroker.metadata.topics import RegistryHooks, TopicRegistry
from tests.support.metadata import (
    NOW_MS,
    PlainCell,
    TornLog,
    contents,
    in_child,
    registry,
    shared_cell,
    start,
)


class Passed:
    """All processes have let go of what was deleted."""

    def __call__(self) -> int:
        return 1 << 60


def begin(tmp_path: Path, cell: object, capacity: int = 10_000) -> TopicRegistry:
    hooks = RegistryHooks(passed=Passed())
    return registry(tmp_path, cell, capacity=capacity, hooks=hooks)


@pytest.fixture
def cell(tmp_path):
    made = PlainCell()
    recover_metadata_log(str(tmp_path), made, NOW_MS)
    return made


def rows_of(one: TopicRegistry) -> object:
    one.catch_up()
    rows = range(one.row_count)
    return (
        contents(one),
        [one.row_id(row) for row in rows],
        [getattr(one.partition_by_row(row), "partition_id", None) for row in rows],
        one.partition_count,
        list(one._deleted_rows),
        one._ever_deleted,
        one._ever_reused,
        one.version,
    )


def names(tmp_path: Path) -> list[str]:
    return sorted(each.name for each in (tmp_path / "__cluster_metadata-0").iterdir())


def test_those_that_read_the_records_and_those_that_read_the_snapshot_agree(
    tmp_path, cell
):
    old = begin(tmp_path, cell)
    one = begin(tmp_path, cell)
    one.create_topic("gone", 3)
    one.create_topic("kept", 2, {"retention.ms": "5"})
    one.delete_topic("gone")
    end = cell.end
    one.replace_records()
    assert cell.end == end
    new = begin(tmp_path, cell)
    assert rows_of(new) == rows_of(old) == rows_of(one)
    for number, writer in enumerate((new, old, one)):
        writer.create_topic(f"t{number}", 2)
        later = begin(tmp_path, cell)
        assert rows_of(new) == rows_of(old) == rows_of(one) == rows_of(later)
    assert cell.end > end


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["create", "create", "delete", "snapshot", "config"]),
            st.integers(0, 3),
            st.integers(0, 2),
        ),
        max_size=25,
    )
)
def test_rows_are_the_same_for_all_whatever_was_replaced_when(tmp_path_factory, steps):
    """There are so few rows that those of deleted partitions are used again."""
    tmp_path = tmp_path_factory.mktemp("log")
    cell = PlainCell()
    recover_metadata_log(str(tmp_path), cell, NOW_MS)
    everyone = [begin(tmp_path, cell, 6) for _ in range(3)]
    for kind, number, actor in steps:
        one, name = everyone[actor], f"t{number}"
        one.catch_up()
        if kind == "snapshot":
            one.replace_records()
            everyone[(actor + 1) % 3] = begin(tmp_path, cell, 6)
        elif kind == "config":
            one.alter_broker_config("", lambda old, n=name: {**old, n: "x"})
        elif kind == "create" and one.topic(name) is None:
            if one.partition_count <= 4:
                one.create_topic(name, 1 + number % 2)
        elif kind == "delete" and one.topic(name) is not None:
            one.delete_topic(name)
        first, *others = [rows_of(each) for each in everyone]
        assert all(each == first for each in others)
    assert rows_of(begin(tmp_path, cell, 6)) == rows_of(everyone[0])
    topics = {t.name: (t.topic_id, t.config) for t in everyone[0].topics()}
    again = start(tmp_path)
    assert {t.name: (t.topic_id, t.config) for t in again.topics()} == topics


def test_a_process_that_begins_reads_few_records(tmp_path, cell):
    one = begin(tmp_path, cell)
    for number in range(20):
        one.create_topic(f"t{number}", 60)
        one.delete_topic(f"t{number}")
    one.create_topic("kept", 2)
    assert begin(tmp_path, cell).image.record_count > 1200
    assert one.replace_dead_records(dead=1000)
    assert begin(tmp_path, cell).image.record_count == 6
    assert not one.replace_dead_records(dead=1000)
    assert one.image.record_count == 6


def test_a_log_of_living_records_is_left_alone(tmp_path, cell):
    one = begin(tmp_path, cell)
    one.create_topic("many", 500)
    one.create_topic("few", 3)
    one.delete_topic("few")
    assert not one.replace_dead_records(dead=100)
    assert len(names(tmp_path)) == 1


def test_a_reader_finds_its_way_over_one_snapshot_and_is_told_after_more(
    tmp_path, cell
):
    asleep, one = begin(tmp_path, cell), begin(tmp_path, cell)
    log = MetadataLog(str(tmp_path), cell)
    log.read_new()
    for number in range(3):
        one.create_topic(f"t{number}", 2)
        one.delete_topic(f"t{number}")
        one.replace_records()
        if number == 0:
            one.create_topic("kept", 1)
            assert rows_of(begin(tmp_path, cell)) == rows_of(one)
            second = begin(tmp_path, cell)
    assert sum(name.endswith(".log") for name in names(tmp_path)) == 2
    with pytest.raises(SystemExit, match="replaced by a snapshot"):
        asleep.catch_up()
    with pytest.raises(LogReplacedError):
        log.read_new()
    log.close()
    # It has the segment open that the first of two more snapshots has replaced.
    assert rows_of(second) == rows_of(one)


def test_logins_begin_again_with_the_snapshot(tmp_path, cell):
    one = begin(tmp_path, cell)
    mechanism = ScramMechanism.SCRAM_SHA_256
    alice, bob = (
        credential_of_salted_password(mechanism, text * 32, b"salt", 4096)
        for text in (b"a", b"b")
    )
    one.change(lambda _: [scram_credential_record("alice", mechanism, alice)])
    reader = ScramCredentialReader(lambda: MetadataLog(str(tmp_path), cell))
    assert reader.credential("alice", mechanism) == alice
    for number in range(3):
        one.create_topic(f"t{number}", 2)
        one.delete_topic(f"t{number}")
        one.replace_records()
    one.change(lambda _: [scram_credential_record("bob", mechanism, bob)])
    assert reader.credential("alice", mechanism) == alice
    assert reader.credential("bob", mechanism) == bob


def test_bytes_that_a_killed_writer_left_are_no_part_of_the_log(tmp_path):
    cell = shared_cell()
    recover_metadata_log(str(tmp_path), cell, NOW_MS)
    asleep, one = begin(tmp_path, cell), begin(tmp_path, cell)
    torn = registry(tmp_path, cell, log_class=TornLog)
    assert in_child(lambda: torn.create_topic("lost", 500)) == -signal.SIGKILL
    one.create_topic("t", 2)
    one.delete_topic("t")
    assert in_child(lambda: torn.create_topic("lost", 500)) == -signal.SIGKILL
    one.replace_records()
    one.create_topic("more", 1)
    assert rows_of(asleep) == rows_of(one) == rows_of(begin(tmp_path, cell))
    assert start(tmp_path).topic("lost") is None


@pytest.mark.parametrize("step", ["fsync", "open", "rename", "unlink", "listdir"])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", [1, 2])
def test_killed_at_each_step_the_others_go_on_and_so_does_the_next_start(
    tmp_path, step, after, at
):
    cell = shared_cell()
    recover_metadata_log(str(tmp_path), cell, NOW_MS)
    old = begin(tmp_path, cell)
    one = begin(tmp_path, cell)
    for number in range(2):  # the second snapshot removes files
        one.create_topic(f"t{number}", 2)
        one.delete_topic(f"t{number}")
        one.replace_dead_records(dead=1 if number == 0 else 1000)
    one.create_topic("kept", 2)
    left = [at]
    done = getattr(os, step)

    def die(*arguments: object, **options: object) -> object:
        left[0] -= 1
        result = done(*arguments, **options) if after or left[0] else None
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    def work() -> None:
        setattr(os, step, die)
        one.replace_records()

    code = in_child(work)
    assert code in (0, -signal.SIGKILL)
    if at == 1:
        assert code == -signal.SIGKILL
    for number, make in enumerate((lambda: old, lambda: begin(tmp_path, cell))):
        writer = make()
        writer.create_topic(f"more{number}", 1)
        assert rows_of(old) == rows_of(one) == rows_of(begin(tmp_path, cell))
    one.replace_records()
    one.create_topic("last", 1)
    assert rows_of(old) == rows_of(one) == rows_of(begin(tmp_path, cell))
    known = {topic.name: topic.topic_id for topic in one.topics()}
    again = start(tmp_path)
    assert {topic.name: topic.topic_id for topic in again.topics()} == known
    assert set(known) == {"kept", "more0", "more1", "last"}


def test_a_file_that_vanishes_while_it_is_opened_is_looked_for_again(
    tmp_path, cell, monkeypatch
):
    one = begin(tmp_path, cell)
    one.create_topic("t", 2)
    one.delete_topic("t")
    one.replace_records()
    found = find_files(str(tmp_path / "__cluster_metadata-0"))
    one.create_topic("u", 2)
    one.delete_topic("u")
    one.replace_records()
    stale = iter([found])
    from mpbroker.metadata import metadata_log

    monkeypatch.setattr(
        metadata_log, "find_files", lambda d: next(stale, None) or find_files(d)
    )
    assert rows_of(begin(tmp_path, cell)) == rows_of(one)


def test_what_was_deleted_before_a_registry_is_told_once(tmp_path, cell):
    one = begin(tmp_path, cell)
    gone = one.create_topic("gone", 3)
    one.delete_topic("gone")
    told: list[TopicImage] = []
    later = registry(tmp_path, cell, hooks=RegistryHooks(removed_before=told))
    assert [(t.name, t.topic_id, t.partition_count) for t in told] == [
        ("gone", gone.topic_id, 3)
    ]
    one.create_topic("gone", 1)
    one.delete_topic("gone")
    later.catch_up()
    assert len(told) == 1
