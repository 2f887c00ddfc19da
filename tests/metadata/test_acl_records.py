"""Access control entries: which a filter means, and that the log keeps them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.base.storage_errors import CorruptLogError
from mpbroker.metadata.acl_records import (
    access_control_entry_record,
    create_acls,
    delete_acls,
    remove_access_control_entry_record,
)
from mpbroker.metadata.metadata_image import MetadataImage
from mpbroker.metadata.metadata_log import recover_metadata_log
from mpbroker.protocol.acl import (
    AclBinding,
    AclFilter,
    AclOperation,
    AclPermissionType,
    PatternType,
    ResourceType,
)
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

ID = bytes(range(16))


def acl(name="t", pattern=PatternType.LITERAL, principal="User:a", **changes):
    made = AclBinding(
        ResourceType.TOPIC,
        name,
        pattern,
        principal,
        "*",
        AclOperation.READ,
        AclPermissionType.ALLOW,
    )
    return made._replace(**changes)


# -- filters --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "name", "matched"),
    [
        (PatternType.MATCH, "foo", {"foo", "*", "foo-", "f-", "foo=prefix"}),
        (PatternType.MATCH, None, {"foo", "*", "foo-", "f-", "foo=prefix", "bar"}),
        (PatternType.ANY, "foo", {"foo", "foo=prefix"}),
        (PatternType.LITERAL, "foo", {"foo"}),
        (PatternType.LITERAL, "*", {"*"}),
        (PatternType.PREFIXED, "foo", {"foo=prefix"}),
        (PatternType.PREFIXED, None, {"foo-", "f-", "foo=prefix"}),
    ],
)
def test_a_filter_means_what_concerns_the_resource_only_if_it_says_match(
    pattern, name, matched
):
    there = {
        "foo": acl("foo"),
        "bar": acl("bar"),
        "*": acl("*"),
        "foo=prefix": acl("foo", PatternType.PREFIXED),
        "foo-": acl("fo", PatternType.PREFIXED),
        "f-": acl("f", PatternType.PREFIXED),
    }
    wanted = AclFilter(resource_name=name, pattern_type=pattern)
    assert {key for key, each in there.items() if wanted.matches(each)} == matched


@pytest.mark.parametrize(
    ("field", "value", "other"),
    [
        ("resource_type", ResourceType.TOPIC, ResourceType.GROUP),
        ("principal", "User:a", "User:*"),
        ("host", "*", "10.0.0.1"),
        ("operation", AclOperation.READ, AclOperation.ALL),
        ("permission_type", AclPermissionType.ALLOW, AclPermissionType.DENY),
    ],
)
def test_every_other_field_of_a_filter_means_that_value_alone(field, value, other):
    assert AclFilter().matches(acl())
    assert AclFilter()._replace(**{field: value}).matches(acl())
    assert not AclFilter()._replace(**{field: other}).matches(acl())


def test_a_code_of_a_later_kafka_is_unknown_and_a_filter_with_it_says_so():
    assert AclOperation.of(99) is AclOperation.UNKNOWN
    assert AclOperation.of(3) is AclOperation.READ
    assert AclFilter(operation=AclOperation.of(99)).is_unknown
    assert not AclFilter().is_unknown


# -- the log --------------------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=10)
entries = st.builds(
    AclBinding,
    st.sampled_from([kind for kind in ResourceType if kind > 1]),
    texts,
    st.sampled_from([PatternType.LITERAL, PatternType.PREFIXED]),
    texts,
    texts,
    st.sampled_from([operation for operation in AclOperation if operation > 1]),
    st.sampled_from([AclPermissionType.ALLOW, AclPermissionType.DENY]),
)


@given(st.lists(entries, max_size=8), st.lists(st.integers(0, 20), max_size=4))
def test_what_is_replayed_from_a_shortest_list_is_what_was_there(added, removed):
    image = MetadataImage()
    for number, each in enumerate(dict.fromkeys(added)):
        record = access_control_entry_record(number.to_bytes(16), each)
        image.replay(json.loads(json.dumps(record)))
    for number in set(removed):
        if number < len(set(added)):
            image.replay(remove_access_control_entry_record(number.to_bytes(16)))
    again = MetadataImage()
    for group in image.records():
        for record in group:
            again.replay(record)
    assert list(again.acls) == list(image.acls)
    assert [again.acls.id_of(each) for each in again.acls] == [
        image.acls.id_of(each) for each in image.acls
    ]
    assert again.record_count == image.live_record_count()


@pytest.mark.parametrize(
    "changes",
    [
        {"id": "?"},
        {"operation": 99},
        {"resourceType": "topic"},
        {"patternType": None},
        {"permissionType": 17},
    ],
)
def test_a_record_that_is_not_one_is_said_to_be_damaged(changes):
    record = access_control_entry_record(ID, acl())
    with pytest.raises(CorruptLogError):
        MetadataImage().replay({**record, **changes})


def test_an_entry_cannot_come_twice_nor_go_twice():
    image = MetadataImage()
    image.replay(access_control_entry_record(ID, acl()))
    with pytest.raises(CorruptLogError):
        image.replay(access_control_entry_record(bytes(16), acl()))
    image.replay(remove_access_control_entry_record(ID))
    with pytest.raises(CorruptLogError):
        image.replay(remove_access_control_entry_record(ID))


def test_entries_are_added_once_and_the_other_processes_see_them(tmp_path):
    cell = PlainCell()
    recover_metadata_log(str(tmp_path), cell, NOW_MS)
    one, other = registry(tmp_path, cell), registry(tmp_path, cell)
    create_acls(one, [acl("a"), acl("b"), acl("a")])
    version = one.version
    create_acls(one, [acl("b")])
    assert one.version == version, "nothing new was written"
    assert list(other.image.acls) == []
    other.catch_up()
    assert list(other.image.acls) == [acl("a"), acl("b")]


def test_what_passes_several_filters_goes_once_and_is_said_for_each(tmp_path):
    registry = start(tmp_path)
    create_acls(registry, [acl("a"), acl("b"), acl("b", principal="User:b")])
    named_b = AclFilter(resource_name="b")
    of_a = AclFilter(principal="User:a")
    before = registry.image.acls.version
    assert delete_acls(registry, [named_b, of_a, AclFilter(resource_name="c")]) == [
        [acl("b"), acl("b", principal="User:b")],
        [acl("a"), acl("b")],
        [],
    ]
    assert list(registry.image.acls) == []
    assert registry.image.acls.version == before + 3


def test_what_a_request_took_away_is_known_to_all_until_many_others_came(tmp_path):
    cell = shared_cell()
    recover_metadata_log(str(tmp_path), cell, NOW_MS)
    one, other = registry(tmp_path, cell), registry(tmp_path, cell)
    create_acls(one, [acl("a"), acl("b"), acl("c")])
    of_a, all_of_them = AclFilter(resource_name="a"), AclFilter()
    first = [[acl("a")], [acl("a"), acl("b"), acl("c")]]
    assert delete_acls(one, [of_a, all_of_them], ID) == first
    create_acls(one, [acl("a")])
    assert delete_acls(other, [of_a, all_of_them], ID) == first
    assert list(other.image.acls) == [acl("a")]
    for number in range(100):
        assert delete_acls(one, [of_a], number.to_bytes(16, "big")) == [[acl("a")]]
        create_acls(one, [acl("a")])
    assert one.image.acls.removed_by(ID) == []
    assert one.image.acls.removed_by((99).to_bytes(16, "big")) == [acl("a")]
    assert len(one.image.acls._removed) < 50


def test_a_deletion_of_a_writer_that_was_killed_is_made_or_was_made(tmp_path):
    """Killed between its batch and the store that publishes it."""
    cell = shared_cell()
    recover_metadata_log(str(tmp_path), cell, NOW_MS)
    survivor = registry(tmp_path, cell)
    create_acls(survivor, [acl("a"), acl("b")])

    def die():
        dying = registry(tmp_path, cell, log_class=DyingLog)
        delete_acls(dying, [AclFilter()], ID)

    assert in_child(die) == -9
    for _ in range(2):
        assert delete_acls(survivor, [AclFilter()], ID) == [[acl("a"), acl("b")]]
    assert list(survivor.image.acls) == []


def test_entries_survive_the_broker_and_topics_do_not_change_their_version(tmp_path):
    first = start(tmp_path)
    create_acls(first, [acl("größe*"), acl("日本語")])
    version = first.image.acls.version
    first.create_topic("t", 1)
    assert first.image.acls.version == version
    again = start(tmp_path)
    assert list(again.image.acls) == [acl("größe*"), acl("日本語")]
    assert again.topic("t") is not None


@pytest.mark.parametrize("log_class", [DyingLog, TornLog])
def test_entries_of_a_writer_that_was_killed_are_not_there(tmp_path, log_class):
    cell = shared_cell()
    recover_metadata_log(str(tmp_path), cell, NOW_MS)
    survivor = registry(tmp_path, cell)
    create_acls(survivor, [acl("before")])

    def die():
        create_acls(registry(tmp_path, cell, log_class=log_class), [acl("never")])

    assert in_child(die) == -9
    create_acls(survivor, [acl("after")])
    assert list(survivor.image.acls) == [acl("before"), acl("after")]
    assert list(start(tmp_path).image.acls) == [acl("before"), acl("after")]
