"""TopicRegistry: what may be created and changed, and that all processes agree."""

import errno
import gc
import os
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.base.storage_errors import CorruptLogError, LogDirectoryError
from mpbroker.metadata.log_config import LogConfig
from mpbroker.metadata.metadata_budget import MetadataBudget, weight
from mpbroker.metadata.metadata_image import (
    BROKER_RESOURCE,
    GROUP_RESOURCE,
    TOPIC_RESOURCE,
    MetadataImage,
    config_record,
)
from mpbroker.metadata.metadata_log import (
    MetadataLog,
    metadata_log_path,
    recover_metadata_log,
)
from mpbroker.metadata.topic_names import check_topic_name, is_legal_topic_name
from mpbroker.metadata.topics import (
    MAX_RECORDS_PER_CHANGE,
    Alteration,
    MorePartitions,
    NewTopic,
    RegistryHooks,
    Topic,
)
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.records.record_batch import RecordBatchBuilder
from tests.support.metadata import (
    NOW_MS,
    DyingLog,
    PlainCell,
    contents,
    in_child,
    registry,
    shared_cell,
    start,
)


def refused(call, *arguments, **named):
    with pytest.raises(ApiError) as caught:
        call(*arguments, **named)
    return caught.value.error_code


# -- topics ---------------------------------------------------------------------------


def test_a_topic_is_found_by_name_id_partition_and_row(tmp_path):
    one = start(tmp_path)
    one.create_topic("first", 2)
    topic = one.create_topic("second", 3, {"segment.bytes": "1000"})
    assert one.topic("second") is topic
    assert one.topic_by_id(topic.topic_id) is topic
    assert len(topic.topic_id) == 16
    assert topic.partitions == [2, 3, 4]
    assert one.partition("second", 1) == (topic, 1, 3)
    assert one.partition_by_row(3) == (topic, 1, 3)
    assert topic.config.segment_bytes == 1000
    for absent in [
        one.topic("third"),
        one.topic_by_id(bytes(16)),
        one.partition("second", 3),
        one.partition("second", -1),
        one.partition_by_row(5),
        one.partition_by_row(-1),
    ]:
        assert absent is None


def test_rows_of_deleted_topics_are_not_used_before_all_have_let_go(tmp_path):
    one = start(tmp_path)
    one.create_topic("a", 2)
    one.delete_topic("a")
    assert one.partition_by_row(0) is None
    again = one.create_topic("a", 2)
    assert again.partitions == [2, 3]


def topics_in_memory(name):
    return [
        each
        for each in gc.get_objects()
        if isinstance(each, Topic) and each.name == name
    ]


def test_a_deleted_topic_is_not_kept_until_its_rows_are_used_again(tmp_path):
    one = start(tmp_path)
    name = uuid.uuid4().hex
    one.create_topic("before", 1)
    one.create_topic(name, 3)
    one.create_topic("behind", 1)
    assert len(topics_in_memory(name)) == 1
    one.delete_topic(name)
    gc.collect()
    assert topics_in_memory(name) == []
    found = [one.partition_by_row(row) for row in range(one.row_count)]
    assert [each and each.topic.name for each in found] == [
        "before",
        None,
        None,
        None,
        "behind",
    ]


def test_topics_with_the_same_settings_are_checked_once(tmp_path, monkeypatch):
    """All other changes of the metadata wait while a request's topics are checked."""
    one = start(tmp_path)
    checked = []
    check = LogConfig.from_overrides

    def noting(defaults, overrides):
        checked.append(dict(overrides))
        return check(defaults, overrides)

    monkeypatch.setattr(LogConfig, "from_overrides", noting)
    wrong, right = {"segment.ms": "x"}, {"segment.ms": "9"}
    made = one.create_topics(
        [NewTopic(f"plain-{number}", 1) for number in range(50)]
        + [NewTopic(f"right-{number}", 1, right) for number in range(50)]
        + [NewTopic(f"wrong-{number}", 1, wrong) for number in range(2)]
    )
    assert checked == [{}, right, wrong, wrong]
    assert [each.config.segment_ms for each in made[50:100]] == [9] * 50
    assert all(isinstance(each, ApiError) for each in made[100:])


def test_a_topic_made_again_has_another_id_and_no_old_configs(tmp_path):
    one = start(tmp_path)
    before = one.create_topic("a", 1, {"segment.bytes": "1000"})
    one.delete_topic("a")
    after = one.create_topic("a", 1)
    assert after.topic_id != before.topic_id
    assert after.config.overrides == {}
    assert one.topic_by_id(before.topic_id) is None


def test_partitions_are_added_behind_those_that_are_there(tmp_path):
    one = start(tmp_path)
    topic = one.create_topic("a", 1)
    one.create_topic("b", 1)
    assert one.create_partitions([MorePartitions("a", 3)]) == [None]
    assert topic.partitions == [0, 2, 3]


@pytest.mark.parametrize("count", [1, 2, 0, -1])
def test_partitions_can_only_grow(tmp_path, count):
    one = start(tmp_path)
    one.create_topic("a", 2)
    (error,) = one.create_partitions([MorePartitions("a", count)])
    assert error.error_code is ErrorCode.INVALID_PARTITIONS


def test_what_is_not_there_cannot_be_changed(tmp_path):
    one = start(tmp_path)
    unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert refused(one.delete_topic, "a") is unknown
    (error,) = one.create_partitions([MorePartitions("a", 2)])
    assert error.error_code is unknown
    assert refused(one.alter_topic_config, "a", dict) is unknown


def test_deleting_twice_is_told_the_second_time(tmp_path):
    one = start(tmp_path)
    topic = one.create_topic("a", 1)
    first, second = one.delete_topics([topic, topic])
    assert first is None
    assert second.error_code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_each_topic_of_a_request_is_judged_for_itself(tmp_path):
    one = start(tmp_path)
    one.create_topic("there", 1)
    results = one.create_topics(
        [
            NewTopic("good.one", 1),
            NewTopic("there", 1),
            NewTopic("good_one", 1),
            NewTopic("none", 0),
            NewTopic("odd", 1, {"segment.bytes": "x"}),
            NewTopic("sp ace", 1),
            NewTopic("__cluster_metadata", 1),
            NewTopic("last", 2),
        ]
    )
    assert [
        result.error_code.name if isinstance(result, ApiError) else result.partitions
        for result in results
    ] == [
        [1],
        "TOPIC_ALREADY_EXISTS",
        [2],
        "INVALID_PARTITIONS",
        "INVALID_CONFIG",
        "INVALID_TOPIC_EXCEPTION",
        "INVALID_REQUEST",
        [3, 4],
    ]
    assert contents(start(tmp_path)) == contents(one)


def test_validation_alone_changes_nothing(tmp_path):
    one = start(tmp_path)
    version = one.version
    (topic,) = one.create_topics([NewTopic("a", 2)], validate_only=True)
    assert (topic.name, len(topic.partitions)) == ("a", 2)
    assert one.topic("a") is None
    one.create_topic("b", 1)
    version = one.version
    one.create_partitions([MorePartitions("b", 2)], validate_only=True)
    wanted = [
        Alteration(TOPIC_RESOURCE, "b", lambda old: {"segment.ms": "1"}),
        Alteration(BROKER_RESOURCE, "", lambda old: {"x": "1"}),
    ]
    assert one.alter_configs(wanted, validate_only=True) == [None, None]
    assert one.version == version


@pytest.fixture
def syncs(monkeypatch):
    """The descriptors that were forced to disk."""
    noted = []
    monkeypatch.setattr(os, "fdatasync", noted.append)
    return noted


def test_the_configs_of_many_resources_are_written_at_once(tmp_path, syncs):
    one = start(tmp_path)
    one.create_topic("a", 1)
    one.create_topic("b", 1)
    syncs.clear()
    wanted = [
        Alteration(TOPIC_RESOURCE, "a", lambda _: {"segment.ms": "1"}),
        Alteration(TOPIC_RESOURCE, "none", lambda _: {"segment.ms": "1"}),
        Alteration(TOPIC_RESOURCE, "b", lambda _: {"segment.ms": "no number"}),
        Alteration(GROUP_RESOURCE, "g", lambda _: {"x": "1"}),
    ]
    first, unknown, invalid, last = one.alter_configs(wanted)
    assert (first, last, len(syncs)) == (None, None, 1)
    assert unknown.error_code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert invalid.error_code is ErrorCode.INVALID_CONFIG
    assert one.topic("a").config.overrides == {"segment.ms": "1"}
    assert one.group_overrides("g") == {"x": "1"}
    assert contents(start(tmp_path)) == contents(one)


def test_more_partitions_of_many_topics_are_written_at_once(tmp_path, syncs):
    one = start(tmp_path)
    for name in "ab":
        one.create_topic(name, 1)
    syncs.clear()
    notes = []
    wanted = [MorePartitions(name, 3) for name in ("a", "none", "b")]
    first, unknown, last = one.create_partitions(wanted, about_to=notes.append)
    assert (first, last, len(syncs)) == (None, None, 1)
    assert unknown.error_code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert notes == [[None, unknown, None]]
    assert [one.topic(name).partitions for name in "ab"] == [[0, 2, 3], [1, 4, 5]]


def test_one_change_makes_10_000_records_and_no_more(tmp_path):
    one = start(tmp_path)
    wanted = [
        Alteration(GROUP_RESOURCE, str(number), lambda _: {"x": "1"})
        for number in range(MAX_RECORDS_PER_CHANGE + 1)
    ]
    version = one.version
    assert refused(one.alter_configs, wanted) is ErrorCode.POLICY_VIOLATION
    records = [config_record(GROUP_RESOURCE, "g", str(n), "1") for n in range(10_001)]
    assert refused(one.change, lambda _: records) is ErrorCode.POLICY_VIOLATION
    assert one.version == version
    assert one.alter_configs(wanted[1:]) == [None] * MAX_RECORDS_PER_CHANGE


def test_each_part_of_a_large_change_is_a_step(tmp_path):
    steps = []
    one = start(tmp_path, hooks=RegistryHooks(step=lambda: steps.append(1)))
    steps.clear()
    one.create_topics([NewTopic(str(n), 1) for n in range(5)], validate_only=True)
    assert len(steps) == 5
    change = [Alteration(GROUP_RESOURCE, str(n), lambda old: old) for n in range(5)]
    one.alter_configs(change)
    assert len(steps) == 10


def test_names_that_clients_make_up_take_a_bounded_memory(tmp_path):
    one = start(tmp_path)
    record = config_record(GROUP_RESOURCE, "group-0", "x", "1")
    one._budget = MetadataBudget(3 * weight(record))

    def set_on(*groups, value="1"):
        texts = {} if value is None else {"x": value}
        return one.alter_configs(
            [Alteration(GROUP_RESOURCE, group, lambda _: texts) for group in groups]
        )

    for number in range(3):
        assert set_on(f"group-{number}") == [None]
    assert refused(set_on, "group-3") is ErrorCode.POLICY_VIOLATION
    assert one.configured_groups() == ["group-0", "group-1", "group-2"]
    # What removes something, or is about a topic or the broker, is accepted.
    one.create_topic("a", 1, {"segment.ms": "1"})
    one.alter_broker_config("", lambda old: {"x": "1"})
    assert set_on("group-1", value=None) == [None]
    assert set_on("group-3") == [None]
    assert refused(set_on, "group-4") is ErrorCode.POLICY_VIOLATION
    assert one.metadata_bytes == 3 * weight(record)


def test_acls_and_quotas_count_and_what_removes_them_does_not():
    acl = {"type": "AccessControlEntryRecord", "resourceType": 2, "principal": "User:a"}
    quota = {"type": "ClientQuotaRecord", "entity": [], "key": "k", "value": 1.0}
    for record in (acl, {**quota, "remove": False}):
        assert weight(record) > 256
    removal = {"type": "RemoveAccessControlEntryRecord", "id": "x"}
    for record in (removal, {**quota, "remove": True}):
        assert weight(record) == 0


def test_the_memory_of_replaced_records_is_not_counted_twice():
    record = config_record(GROUP_RESOURCE, "g", "x", "1")
    image, budget = MetadataImage(), MetadataBudget(2 * weight(record))
    for _ in range(10):
        budget.check([record], image)
        image.replay(record)
        budget.add(record)


def test_the_partition_table_can_be_full(tmp_path):
    one = start(tmp_path, capacity=4)
    one.create_topic("a", 2)
    one.delete_topic("a")
    results = one.create_topics([NewTopic("b", 1), NewTopic("c", 2)])
    assert results[0].partitions == [2]
    assert results[1].error_code is ErrorCode.INVALID_PARTITIONS
    message = str(results[1])
    assert "the limit is 4 partitions (max.partitions), 1 exist, and 2" in message
    (error,) = one.create_partitions([MorePartitions("b", 3)])
    assert error.error_code is ErrorCode.INVALID_PARTITIONS


class Rows:
    """What the users of rows have let go of, and the rows that were made usable."""

    def __init__(self):
        self.passed = -1
        self.made = []
        self.hooks = RegistryHooks(rows=self, passed=lambda: self.passed)

    def initialise_row(self, index):
        self.made.append(index)

    def reuse_row(self, index):
        self.made.append(-index)


def test_rows_are_used_again_when_all_have_let_go_of_them(tmp_path):
    rows = Rows()
    one = start(tmp_path, capacity=6, hooks=rows.hooks)
    first = one.create_topic("first", 3)
    session = [one.row_id(row) for row in first.partitions]
    one.delete_topic("first")
    after_first = one.version
    one.create_topic("second", 3)
    one.delete_topic("second")
    assert refused(one.create_topic, "third", 1) is ErrorCode.INVALID_PARTITIONS
    rows.passed = after_first - 1
    assert refused(one.create_topic, "third", 1) is ErrorCode.INVALID_PARTITIONS
    rows.passed = after_first
    results = one.create_topics([NewTopic("third", 2), NewTopic("fourth", 2)])
    assert results[0].partitions == [0, 1]
    assert results[1].error_code is ErrorCode.INVALID_PARTITIONS
    assert rows.made == [0, 1, 2, 3, 4, 5, 0, -1]
    rows.passed = one.version
    one.create_partitions([MorePartitions("third", 5)])
    assert one.topic("third").partitions == [0, 1, 2, 3, 4]
    assert rows.made[8:] == [-2, -3, -4]
    assert one.partition_by_row(1) == (one.topic("third"), 1, 1)
    assert (one.partition_count, one.row_count) == (5, 6)
    assert [one.partition_by_row_id(each) for each in session] == [None] * 3
    assert one.partition_by_row_id(one.row_id(1)) == one.partition_by_row(1)
    # Every process that reads the log later gives the same rows.
    assert contents(start(tmp_path, capacity=6)) == contents(one)


def test_rows_of_deleted_topics_are_used_before_new_ones(tmp_path):
    rows = Rows()
    one = start(tmp_path, hooks=rows.hooks)
    one.create_topic("first", 2)
    one.delete_topic("first")
    rows.passed = one.version
    assert one.create_topic("second", 3).partitions == [0, 1, 2]
    assert rows.made == [0, 1, 0, -1, 2]
    assert contents(start(tmp_path)) == contents(one)


def test_a_start_with_fewer_partitions_than_there_were_uses_no_row_beyond(tmp_path):
    one = start(tmp_path, capacity=6)
    one.create_topic("kept", 1)
    one.create_topic("gone", 5)
    one.delete_topic("gone")
    rows = Rows()
    less = start(tmp_path, capacity=3, hooks=rows.hooks)
    rows.passed = less.version
    assert refused(less.create_topic, "new", 3) is ErrorCode.INVALID_PARTITIONS
    assert less.create_topic("new", 2).partitions == [1, 2]


def test_topics_that_are_asked_for_leave_room_for_others(tmp_path):
    one = start(tmp_path, capacity=4)
    (asked, internal, more) = one.create_topics(
        [NewTopic("a", 3), NewTopic("__consumer_offsets", 1), NewTopic("b", 1)],
        spare=1,
    )
    assert asked.partitions == [0, 1, 2]
    assert internal.partitions == [3]  # it may use what is left for others
    assert "1 of them are kept" in str(more)


def test_a_killed_creation_leaves_its_rows_to_the_next(tmp_path):
    rows = Rows()
    cell = shared_cell()
    recover_metadata_log(str(tmp_path), cell, NOW_MS)
    one = registry(tmp_path, cell, capacity=2, hooks=rows.hooks)
    one.create_topic("a", 2)
    one.delete_topic("a")
    rows.passed = one.version
    dying = registry(tmp_path, cell, capacity=2, hooks=rows.hooks, log_class=DyingLog)
    assert in_child(lambda: dying.create_topic("b", 2)) == -9
    assert one.create_topic("c", 1).partitions == [0]
    assert contents(start(tmp_path, capacity=2)) == contents(one)


def test_internal_topics_are_known_by_name(tmp_path):
    one = start(tmp_path)
    assert one.create_topic("__consumer_offsets", 1).is_internal
    assert not one.create_topic("offsets", 1).is_internal


# -- names ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a" * 250, "a/b", "é", "a b", "a\0", "a\n"]
)
def test_illegal_names_are_refused(name):
    with pytest.raises(ApiError, match="Topic name is invalid") as caught:
        check_topic_name(name)
    assert caught.value.error_code is ErrorCode.INVALID_TOPIC_EXCEPTION


@given(st.from_regex(r"[A-Za-z0-9._-]{1,249}", fullmatch=True))
def test_legal_names_are_accepted(name):
    assert is_legal_topic_name(name) == (name not in (".", ".."))


def test_a_name_is_free_again_after_its_near_twin_is_deleted(tmp_path):
    one = start(tmp_path)
    one.create_topic("a.b", 1)
    collision = refused(one.create_topic, "a_b", 1)
    assert collision is ErrorCode.INVALID_TOPIC_EXCEPTION
    one.delete_topic("a.b")
    one.create_topic("a_b", 1)


def test_names_that_were_created_together_are_both_in_the_way_of_a_third(tmp_path):
    """As with Kafka, which has made them both."""
    one = start(tmp_path)
    made = one.create_topics([NewTopic("a.b_c", 1), NewTopic("a_b.c", 1)])
    assert not any(isinstance(topic, ApiError) for topic in made)
    for deleted in ("a_b.c", "a.b_c"):
        collision = refused(one.create_topic, "a_b_c", 1)
        assert collision is ErrorCode.INVALID_TOPIC_EXCEPTION
        again = refused(one.create_topic, deleted, 1)
        assert again is ErrorCode.TOPIC_ALREADY_EXISTS
        one.delete_topic(deleted)
    one.create_topic("a_b_c", 1)


# -- configs --------------------------------------------------------------------------


def test_a_topics_config_follows_its_overrides_and_the_brokers_dynamic_ones(tmp_path):
    one = start(tmp_path, broker_values={"log.retention.hours": 1})
    topic = one.create_topic("a", 1, {"segment.bytes": "1000"})
    assert topic.config.retention_ms == 3_600_000
    one.alter_broker_config("", lambda old: {"log.retention.ms": "7"})
    assert (topic.config.retention_ms, topic.config.segment_bytes) == (7, 1000)
    assert one.default_config.retention_ms == 7
    one.alter_broker_config("1", lambda old: {"log.retention.ms": "8"})
    assert topic.config.retention_ms == 8
    one.alter_broker_config("2", lambda old: {"log.retention.ms": "9"})
    assert topic.config.retention_ms == 8
    one.alter_topic_config("a", lambda old: {"retention.ms": "6"})
    assert (topic.config.retention_ms, topic.config.segment_bytes) == (6, 1 << 30)
    one.alter_broker_config("", lambda old: {})
    one.alter_broker_config("1", lambda old: {})
    one.alter_topic_config("a", lambda old: {})
    assert topic.config.retention_ms == 3_600_000
    assert one.broker_overrides("") == {}


def test_a_change_sees_the_latest_overrides(tmp_path):
    cell = PlainCell()
    recover_metadata_log(str(tmp_path), cell, NOW_MS)
    one, other = registry(tmp_path, cell), registry(tmp_path, cell)
    one.create_topic("a", 1, {"segment.bytes": "1000"})
    other.alter_topic_config("a", lambda old: {**old, "segment.ms": "5"})
    one.alter_topic_config("a", lambda old: {**old, "retention.ms": "6"})
    assert one.topic("a").config.overrides == {
        "segment.bytes": "1000",
        "segment.ms": "5",
        "retention.ms": "6",
    }


def test_a_topic_config_that_cannot_be_is_refused(tmp_path):
    one = start(tmp_path)
    one.create_topic("a", 1)
    error = refused(one.alter_topic_config, "a", lambda old: {"segment.bytes": "0"})
    assert error is ErrorCode.INVALID_CONFIG
    assert one.topic("a").config == LogConfig()


def test_a_value_of_another_release_does_not_keep_the_broker_from_starting(tmp_path):
    one = start(tmp_path)
    one.create_topic("a", 1)
    one.alter_broker_config("", lambda old: {"log.retention.ms": "soon", "new": "1"})
    assert one.topic("a").config.retention_ms == 604_800_000
    assert start(tmp_path).topic("a").config == one.topic("a").config


# -- producer ids ---------------------------------------------------------------------


def test_producer_ids_are_never_given_twice(tmp_path):
    cell = PlainCell()
    recover_metadata_log(str(tmp_path), cell, NOW_MS)
    one, other = registry(tmp_path, cell), registry(tmp_path, cell)
    given_out = [one.allocate_producer_id() for _ in range(1500)]
    given_out += [other.allocate_producer_id() for _ in range(10)]
    given_out += [start(tmp_path).allocate_producer_id() for _ in range(2)]
    assert len(set(given_out)) == len(given_out)
    assert given_out[:3] == [0, 1, 2]
    assert given_out[-2:] == [3000, 4000]


# -- agreement ------------------------------------------------------------------------


def test_removed_topics_are_told_to_every_process_once(tmp_path):
    cell = PlainCell()
    recover_metadata_log(str(tmp_path), cell, NOW_MS)
    told = []
    one = registry(tmp_path, cell)
    watching = registry(
        tmp_path, cell, hooks=RegistryHooks(lambda topic: told.append(topic.partitions))
    )
    one.create_topic("a", 2)
    one.delete_topic("a")
    assert told == []
    assert watching.catch_up() is True
    assert watching.catch_up() is False
    assert told == [[0, 1]]
    registry(
        tmp_path, cell, hooks=RegistryHooks(lambda topic: told.append(topic.partitions))
    )
    assert told == [[0, 1]]


@pytest.mark.parametrize("error", [KeyError("x"), MemoryError(), OSError(5, "disk")])
def test_who_has_replayed_a_part_of_a_change_goes_on_with_nothing(tmp_path, error):
    cell = PlainCell()
    recover_metadata_log(str(tmp_path), cell, NOW_MS)
    one = registry(tmp_path, cell)

    def fail(topic):
        raise error

    failing = registry(tmp_path, cell, hooks=RegistryHooks(fail))
    one.create_topic("a", 2)
    one.delete_topic("a")
    one.create_topic("b", 1)
    # No error of a request: whoever answers one takes the next request, without "b".
    with pytest.raises(SystemExit, match="knows only a part"):
        failing.catch_up()


def test_a_process_may_go_on_with_what_it_knows_while_the_disk_fails(
    tmp_path, monkeypatch
):
    cell = PlainCell()
    recover_metadata_log(str(tmp_path), cell, NOW_MS)
    one = registry(tmp_path, cell)
    told = []
    patient = registry(tmp_path, cell, hooks=RegistryHooks(on_unreadable=told.append))
    strict = registry(tmp_path, cell)
    one.create_topic("a", 2)
    error = OSError(errno.EIO, "disk")

    def fail(*arguments):
        raise error

    monkeypatch.setattr(os, "pread", fail)
    assert not patient.catch_up() and not patient.catch_up()
    assert told == [error, error]
    assert patient.is_behind and patient.topic("a") is None
    with pytest.raises(OSError, match="disk"):
        strict.catch_up()
    monkeypatch.undo()
    for each in (patient, strict):
        assert each.catch_up() and not each.is_behind
        assert each.topic("a") is not None


def test_a_log_that_cannot_be_loaded_is_told_as_such(tmp_path):
    cell = PlainCell()
    recover_metadata_log(str(tmp_path), cell, NOW_MS)
    living = registry(tmp_path, cell)
    other = MetadataLog(str(tmp_path), cell)
    other.read_new()
    other.append([{"type": "RemoveTopicRecord", "topicId": "A" * 22}], NOW_MS)
    other.close()
    with pytest.raises(CorruptLogError, match=r"RemoveTopicRecord.*KeyError"):
        registry(tmp_path, cell)
    with pytest.raises(SystemExit, match=r"RemoveTopicRecord.*KeyError"):
        living.catch_up()


def test_a_record_of_a_newer_release_ends_a_process_that_has_served(tmp_path):
    cell = PlainCell()
    recover_metadata_log(str(tmp_path), cell, NOW_MS)
    living = registry(tmp_path, cell)
    builder = RecordBatchBuilder()
    builder.append(NOW_MS, None, b"\x01\x63\x00\x00")
    batch = builder.build(base_offset=3, partition_leader_epoch=0)
    with open(metadata_log_path(str(tmp_path)), "ab") as file:
        file.write(batch)
    cell.end += len(batch)
    with pytest.raises(LogDirectoryError, match="newer"):
        registry(tmp_path, cell)
    with pytest.raises(SystemExit, match="record type 99"):
        living.catch_up()


def test_a_process_killed_before_its_commit_has_created_nothing(tmp_path):
    cell = shared_cell()
    recover_metadata_log(str(tmp_path), cell, NOW_MS)
    one = registry(tmp_path, cell)
    one.create_topic("before", 1)
    dying = registry(tmp_path, cell, log_class=DyingLog)
    assert in_child(lambda: dying.create_topic("lost", 1)) == -9
    assert one.catch_up() is False
    one.create_topic("after", 1)
    dying.catch_up()
    assert [topic.name for topic in dying.topics()] == ["before", "after"]


def test_a_topic_created_by_another_process_is_seen(tmp_path):
    cell = shared_cell()
    recover_metadata_log(str(tmp_path), cell, NOW_MS)
    one = registry(tmp_path, cell)
    other = registry(tmp_path, cell)
    assert in_child(lambda: other.create_topic("a", 3)) == 0
    assert one.catch_up()
    assert one.topic("a").partitions == [0, 1, 2]


NAMES = st.sampled_from(["a", "b", "a.b", "a_b", "__consumer_offsets"])
CONFIGS = st.dictionaries(
    st.sampled_from(["segment.bytes", "retention.ms", "cleanup.policy"]),
    st.sampled_from(["1000", "-1", "compact"]),
)
OPERATIONS = st.one_of(
    st.tuples(st.just("create_topic"), NAMES, st.integers(0, 3), CONFIGS),
    st.tuples(st.just("delete_topic"), NAMES),
    st.tuples(
        st.just("create_partitions"),
        st.builds(MorePartitions, NAMES, st.integers(0, 5)).map(lambda each: [each]),
    ),
    st.tuples(
        st.just("alter_topic_config"), NAMES, CONFIGS.map(lambda new: lambda old: new)
    ),
    st.tuples(
        st.just("alter_broker_config"),
        st.sampled_from(["", "1"]),
        st.sampled_from(["1", "2", None]).map(
            lambda ms: lambda old: {} if ms is None else {"log.retention.ms": ms}
        ),
    ),
)


@given(st.lists(st.tuples(st.integers(0, 1), OPERATIONS), max_size=15))
def test_all_processes_agree_at_all_times_and_after_a_restart(
    tmp_path_factory, operations
):
    directory = tmp_path_factory.mktemp("log")
    cell = PlainCell()
    recover_metadata_log(str(directory), cell, NOW_MS)
    writers = [registry(directory, cell, capacity=20) for _ in range(2)]
    for writer, (operation, *arguments) in operations:
        try:
            getattr(writers[writer], operation)(*arguments)
        except ApiError:
            pass
    for writer in writers:
        writer.catch_up()
    expected = contents(writers[0])
    assert contents(writers[1]) == expected
    assert contents(registry(directory, cell)) == expected
    assert contents(start(directory)) == expected


@given(st.lists(OPERATIONS, max_size=10))
def test_a_compacted_log_says_the_same(tmp_path_factory, operations):
    directory = tmp_path_factory.mktemp("log")
    one = start(directory)
    for operation, *arguments in operations:
        try:
            getattr(one, operation)(*arguments)
        except ApiError:
            pass
    image = one._image
    again = type(image)()
    for group in image.records():
        for record in group:
            again.replay(record)
    assert again.live_record_count() == again.record_count
    assert again.record_count == image.live_record_count()
    assert again.configs == image.configs
    assert [
        (topic.name, topic.topic_id, topic.partition_count)
        for topic in again.topics.values()
    ] == [
        (topic.name, topic.topic_id, topic.partition_count)
        for topic in image.topics.values()
    ]
