"""DescribeAcls, CreateAcls and DeleteAcls: validation, changes and answers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mpbroker.metadata.acl_records import MetadataAcls
from mpbroker.protocol.acl import (
    AclBinding,
    AclFilter,
    AclOperation,
    AclPermissionType,
    PatternType,
    ResourceType,
)
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.protocol.messages.create_acls import AclCreation, CreateAclsRequest
from mpbroker.protocol.messages.delete_acls import (
    DeleteAclsFilter,
    DeleteAclsRequest,
)
from mpbroker.protocol.messages.describe_acls import DescribeAclsRequest
from mpbroker.server.authorization import acl_requests
from mpbroker.server.authorization.authorizer import Authorizer, StandardAuthorizer
from mpbroker.server.handlers.create_acls import handle_create_acls
from mpbroker.server.handlers.delete_acls import handle_delete_acls
from mpbroker.server.handlers.describe_acls import handle_describe_acls
from tests.server.authorization.test_authorizer import sender
from tests.server.contexts import context
from tests.support.metadata import start

INVALID = ErrorCode.INVALID_REQUEST


def access_by(authorizer):
    return SimpleNamespace(authorizer=authorizer, client=sender())


@pytest.fixture
def access(tmp_path):
    return access_by(StandardAuthorizer(MetadataAcls(start(tmp_path))))


def creation(**fields):
    return AclCreation(
        **{
            "resource_type": 2,
            "resource_name": "t",
            "resource_pattern_type": 3,
            "principal": "User:alice",
            "host": "*",
            "operation": 3,
            "permission_type": 3,
            **fields,
        }
    )


def wanted(**fields):
    return {
        "resource_type_filter": 1,
        "resource_name_filter": None,
        "pattern_type_filter": 1,
        "principal_filter": None,
        "host_filter": None,
        "operation": 1,
        "permission_type": 1,
        **fields,
    }


def create(access, *creations):
    answer = handle_create_acls(
        CreateAclsRequest(creations=list(creations)), context(access=access)
    )
    answer.encode(1)
    return [(result.error_code, result.error_message) for result in answer.results]


def kept(access):
    return list(access.authorizer.acls(AclFilter()))


def test_valid_entries_are_kept_and_shown_by_resource(access):
    assert (
        create(
            access,
            creation(),
            creation(operation=4, host="10.0.0.1"),
            creation(resource_type=3, resource_pattern_type=4, permission_type=2),
            creation(),
        )
        == [(0, None)] * 4
    )
    assert len(kept(access)) == 3
    answer = handle_describe_acls(
        DescribeAclsRequest(**wanted()), context(access=access)
    )
    assert (answer.error_code, answer.error_message) == (0, None)
    topic, group = answer.resources
    assert (topic.resource_type, topic.resource_name, topic.pattern_type) == (2, "t", 3)
    assert [(acl.operation, acl.host) for acl in topic.acls] == [
        (3, "*"),
        (4, "10.0.0.1"),
    ]
    assert (group.resource_type, group.pattern_type) == (3, 4)
    assert [acl.permission_type for acl in group.acls] == [2]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"resource_type": 0}, "resourceType 0"),
        ({"resource_type": 1}, "resourceType 1"),
        ({"resource_type": 99}, "resourceType 99"),
        ({"resource_pattern_type": 1}, "patternType 1"),
        ({"resource_pattern_type": 2}, "patternType 2"),
        ({"operation": 1}, "operation 1"),
        ({"operation": 77}, "operation 77"),
        ({"permission_type": 1}, "permissionType 1"),
        ({"resource_name": ""}, "empty resource name"),
        ({"resource_type": 4}, "kafka-cluster"),
        ({"principal": "alice"}, "Could not parse principal from `alice`"),
        ({"principal": ""}, "Could not parse principal"),
        ({"principal": ":alice"}, "Could not parse principal"),
        ({"principal": "User:"}, "Could not parse principal"),
        ({"resource_name": "x" * 5000}, "5000 characters"),
        ({"host": ""}, "empty host"),
        ({"host": "10.0.0.0/33"}, "`10.0.0.0/33` is not a network"),
        ({"host": "10.0.0.0/255.0.0.0"}, "not a network"),
        ({"host": "10.0.0/8"}, "Invalid host"),
        ({"host": "::1/129"}, "Invalid host"),
        ({"host": "/"}, "not a network"),
        ({"host": "localhost/8"}, "Invalid host"),
    ],
)
def test_an_invalid_entry_is_refused_and_the_others_are_added(access, fields, words):
    first, (code, message), last = create(
        access, creation(), creation(**fields), creation(operation=8)
    )
    assert first == last == (0, None)
    assert code == INVALID and words in message
    assert len(kept(access)) == 2


@pytest.mark.parametrize("host", ["localhost", "[::1]", "10.0.0"])
def test_a_host_that_matches_nobody_is_kept_and_warned_of(access, host, caplog):
    assert create(access, creation(host=host)) == [(0, None)]
    assert f"'{host}' matches no client" in caplog.text


@pytest.mark.parametrize("host", ["*", "10.0.0.7", "10.0.0.5/8", "::1", "fd00::/8"])
def test_an_address_or_a_network_is_not_warned_of(access, host, caplog):
    assert create(access, creation(host=host)) == [(0, None)]
    assert not caplog.records


def test_the_cluster_has_one_name(access):
    assert create(access, creation(resource_type=4, resource_name="kafka-cluster")) == [
        (0, None)
    ]


def test_too_many_at_once_are_refused(access, monkeypatch):
    monkeypatch.setattr(acl_requests, "MAX_ENTRIES", 2)
    answers = create(access, *[creation(operation=each) for each in (3, 4, 5)])
    assert {code for code, _ in answers} == {ErrorCode.POLICY_VIOLATION}
    assert kept(access) == []


def test_filters_remove_the_entries_that_they_match_and_invalid_ones_nothing(access):
    create(access, creation(), creation(resource_name="u"), creation(operation=4))
    request = DeleteAclsRequest(
        filters=[
            DeleteAclsFilter(**wanted(resource_name_filter="t", operation=3)),
            DeleteAclsFilter(**wanted(operation=99)),
            DeleteAclsFilter(**wanted(resource_name_filter="missing")),
        ]
    )
    answer = handle_delete_acls(request, context(access=access))
    answer.encode(1)
    one, wrong, none = answer.filter_results
    assert [(acl.resource_name, acl.operation) for acl in one.matching_acls] == [
        ("t", 3)
    ]
    assert wrong.error_code == INVALID and "operation 99" in wrong.error_message
    assert (none.error_code, none.matching_acls) == (0, [])
    assert [acl.resource_name for acl in kept(access)] == ["u", "t"]


class Notes:
    """The notes in a request's slot, which outlive its handler."""

    def __init__(self) -> None:
        self.words = ()

    def earlier(self):
        return self.words

    def note(self, words) -> None:
        self.words = tuple(words)


def deleted(access, *filters, intent):
    request = DeleteAclsRequest(filters=[DeleteAclsFilter(**each) for each in filters])
    answer = handle_delete_acls(request, context(access=access, intent=intent))
    return [
        [(acl.resource_name, acl.operation) for acl in result.matching_acls]
        for result in answer.filter_results
    ]


def test_a_second_execution_gives_the_same_answer_and_removes_nothing_more(access):
    filters = [
        wanted(operation=3),
        wanted(resource_name_filter="u"),
        wanted(resource_name_filter="missing"),
    ]
    create(access, creation(operation=4), creation(resource_name="u"), creation())
    notes = Notes()
    answer = deleted(access, *filters, intent=notes)
    assert answer == [[("u", 3), ("t", 3)], [("u", 3)], []]
    create(access, creation(resource_name="u", operation=5))  # by somebody else, since
    assert deleted(access, *filters, intent=notes) == answer
    assert [(acl.resource_name, acl.operation) for acl in kept(access)] == [
        ("t", 4),
        ("u", 5),
    ]
    # Another request finds what there is.
    assert deleted(access, *filters, intent=Notes()) == [[], [("u", 5)], []]


def test_a_deletion_that_was_noted_and_not_made_is_made(access):
    create(access, creation())
    notes = Notes()
    broken = access_by(StandardAuthorizer(Full()))
    assert deleted(broken, wanted(), intent=notes) == [[]]
    assert notes.words
    assert deleted(access, wanted(), intent=notes) == [[("t", 3)]]
    assert kept(access) == []


def test_a_custom_authorizer_need_not_support_second_executions():
    class Own(StandardAuthorizer):
        delete_acls_once = Authorizer.delete_acls_once

        def delete_acls(self, context, filters):
            return [[] for _ in filters]

    own = access_by(Own(Full()))
    assert deleted(own, wanted(), wanted(), intent=Notes()) == [[], []]


def test_a_filter_of_a_later_kafka_is_refused(access):
    answer = handle_describe_acls(
        DescribeAclsRequest(**wanted(resource_type_filter=9)), context(access=access)
    )
    assert answer.error_code == INVALID and "resource type 9" in answer.error_message


def test_without_an_authorizer_there_are_no_acls_to_be_asked_about():
    disabled = ErrorCode.SECURITY_DISABLED
    described = handle_describe_acls(DescribeAclsRequest(**wanted()), context())
    assert described.error_code == disabled and described.error_message
    assert create(None, creation()) == [(disabled, described.error_message)]
    deleted = handle_delete_acls(
        DeleteAclsRequest(filters=[DeleteAclsFilter(**wanted())]), context()
    )
    assert [result.error_code for result in deleted.filter_results] == [disabled]


class Full:
    """A disk that takes nothing."""

    version = 1

    def __iter__(self):
        return iter(())

    def create(self, acls, request_id=None):
        raise ApiError(ErrorCode.KAFKA_STORAGE_ERROR, "no room")

    delete = create


def test_a_failed_write_is_told_for_each_valid_entry():
    access = access_by(StandardAuthorizer(Full()))
    wrong, valid = create(access, creation(operation=1), creation())
    assert wrong[0] == INVALID
    assert valid == (ErrorCode.KAFKA_STORAGE_ERROR, "no room")
    answer = handle_delete_acls(
        DeleteAclsRequest(filters=[DeleteAclsFilter(**wanted())]),
        context(access=access),
    )
    assert [result.error_message for result in answer.filter_results] == ["no room"]


def test_an_entry_is_kept_as_it_was_written(access):
    create(access, creation(resource_name="größe", principal="User:CN=a, O=b:c"))
    assert kept(access) == [
        AclBinding(
            ResourceType.TOPIC,
            "größe",
            PatternType.LITERAL,
            "User:CN=a, O=b:c",
            "*",
            AclOperation.READ,
            AclPermissionType.ALLOW,
        )
    ]
