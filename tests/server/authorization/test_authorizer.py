"""Decisions by ACLs: the behaviour of Kafka's StandardAuthorizer, and an oracle."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpbroker.protocol.acl import (
    OPERATIONS,
    AclBinding,
    AclFilter,
    AclOperation,
    AclPermissionType,
    PatternType,
    ResourceType,
)
from mpbroker.protocol.error_code import ErrorCode
from mpbroker.protocol.errors import ApiError
from mpbroker.server.authorization.authorizer import (
    CLUSTER,
    Authorizer,
    Resource,
    StandardAuthorizer,
)
from mpbroker.server.request_context import RequestContext, Sender

Op = AclOperation
TOPIC, GROUP = ResourceType.TOPIC, ResourceType.GROUP
LITERAL, PREFIXED = PatternType.LITERAL, PatternType.PREFIXED
ALLOW, DENY = AclPermissionType.ALLOW, AclPermissionType.DENY


class Store:
    """Entries in memory."""

    def __init__(self, *acls: AclBinding) -> None:
        self.acls = list(acls)
        self.version = 0

    def __iter__(self):
        return iter(self.acls)

    def put(self, *acls: AclBinding) -> None:
        self.acls[:] = acls
        self.version += 1


def sender(principal: str = "User:alice", host: str = "10.0.0.1") -> RequestContext:
    request = SimpleNamespace(
        api_key=0, api_version=0, client_id="client", correlation_id=1, connection=7
    )
    made = Sender(principal, host, "PLAINTEXT", "PLAINTEXT")
    return RequestContext(made, request, str)


def entry(
    permission=ALLOW,
    operation=Op.READ,
    name="t",
    *,
    kind=TOPIC,
    pattern=LITERAL,
    principal="User:alice",
    host="*",
):
    return AclBinding(kind, name, pattern, principal, host, operation, permission)


def may(acls, operation, name="t", *, who=None, kind=TOPIC, **options):
    authorizer = StandardAuthorizer(Store(*acls), **options)
    return authorizer.authorize(who or sender(), operation, Resource(kind, name))


# -- hosts -----------------------------------------------------------------------------

HOSTS = [
    ("*", "10.0.0.1", True),
    ("10.0.0.1", "10.0.0.1", True),
    ("10.0.0.2", "10.0.0.1", False),
    ("10.0.0.0/8", "10.255.0.1", True),
    ("10.0.0.0/8", "11.0.0.1", False),
    ("10.1.2.3/8", "10.255.0.1", True),
    ("0.0.0.0/0", "10.0.0.1", True),
    ("0.0.0.0/0", "::1", False),
    ("::/0", "10.0.0.1", False),
    ("::1", "::1", True),
    ("0:0:0:0:0:0:0:1", "::1", True),
    ("::1/128", "::1", True),
    ("FD00::/8", "fd12::1", True),
    ("::ffff:10.0.0.1", "10.0.0.1", True),
    ("::ffff:10.0.0.0/104", "10.0.0.1", True),
    ("10.0.0.1", "::ffff:10.0.0.1", True),
    ("localhost", "127.0.0.1", False),
    ("10.0.0.0/99", "10.0.0.1", False),  # in a log from before it was checked
    ("10.0.0.1", "", False),
]


@pytest.mark.parametrize(("host", "client", "matches"), HOSTS)
def test_an_entry_is_about_the_addresses_that_its_host_stands_for(
    host, client, matches
):
    who = sender(host=client)
    assert may([entry(host=host)], Op.READ, who=who) is matches
    denied = [entry(), entry(DENY, host=host)]
    assert may(denied, Op.READ, who=who) is not matches
    for acls, expected in (([entry(host=host)], matches), (denied, not matches)):
        authorizer = StandardAuthorizer(Store(*acls))
        found = authorizer.authorize_by_resource_type(who, Op.READ, TOPIC)
        assert found is expected


# -- Kafka's behaviours ---------------------------------------------------------------


def test_without_an_entry_access_is_denied_unless_the_broker_allows_it():
    assert not may([], Op.READ)
    assert may([], Op.READ, allow_everyone_if_no_acl_found=True)
    assert not may(
        [entry(principal="User:bob")], Op.READ, allow_everyone_if_no_acl_found=True
    ), "an entry about somebody else closes the resource"
    assert may([entry(name="other")], Op.READ, allow_everyone_if_no_acl_found=True), (
        "an entry about another resource does not"
    )


def test_super_users_may_do_everything_in_spite_of_denials():
    deny = entry(DENY, Op.ALL, "*", principal="User:*")
    options = {"super_users": ["User:admin", "User:CN=x, O=y"]}
    assert may([deny], Op.WRITE, who=sender("User:admin"), **options)
    assert may([deny], Op.WRITE, who=sender("User:CN=x, O=y"), **options)
    assert not may([deny], Op.WRITE, who=sender("User:Admin"), **options)
    assert not may([deny], Op.WRITE, who=sender("Group:admin"), **options)


def test_a_denial_wins_over_all_that_is_allowed():
    allow = entry(operation=Op.ALL, name="*", principal="User:*")
    for deny in (
        entry(DENY),
        entry(DENY, Op.ALL),
        entry(DENY, name="*"),
        entry(DENY, pattern=PREFIXED),
        entry(DENY, principal="User:*"),
        entry(DENY, host="10.0.0.1"),
    ):
        assert not may([allow, deny], Op.READ)
        assert not may([deny, allow], Op.READ)
    for other in (
        entry(DENY, Op.WRITE),
        entry(DENY, name="u"),
        entry(DENY, principal="User:bob"),
        entry(DENY, host="10.0.0.2"),
        entry(DENY, kind=GROUP),
    ):
        assert may([allow, other], Op.READ)


@pytest.mark.parametrize("by", [Op.READ, Op.WRITE, Op.DELETE, Op.ALTER, Op.ALL])
def test_allowed_operations_imply_describe_and_denied_ones_do_not(by):
    assert may([entry(operation=by)], Op.DESCRIBE)
    everything = entry(operation=Op.ALL)
    denied = may([everything, entry(DENY, by)], Op.DESCRIBE)
    assert denied is (by is not Op.ALL)


def test_describe_configs_is_implied_by_alter_configs_alone():
    implies = {
        operation
        for operation in Op
        if operation > Op.ANY and may([entry(operation=operation)], Op.DESCRIBE_CONFIGS)
    }
    assert implies == {Op.ALL, Op.ALTER_CONFIGS, Op.DESCRIBE_CONFIGS}


@pytest.mark.parametrize("operation", [Op.CREATE, Op.CLUSTER_ACTION, Op.ALTER_CONFIGS])
def test_other_operations_imply_no_describe(operation):
    assert not may([entry(operation=operation)], Op.DESCRIBE)


def test_hosts_and_principals_are_compared_as_they_are_written():
    acls = [entry(host="10.0.0.1")]
    assert may(acls, Op.READ)
    assert not may(acls, Op.READ, who=sender(host="10.0.0.11"))
    assert not may(acls, Op.READ, who=sender("User:alicE"))
    assert not may(acls, Op.READ, who=sender("User:ali"))
    anybody = [entry(principal="User:*", host="fe80::1")]
    assert may(anybody, Op.READ, who=sender("User:ANONYMOUS", "fe80::1"))
    assert not may(anybody, Op.READ, who=sender("User:ANONYMOUS", "fe80::2"))


def test_a_star_is_every_name_only_as_a_literal():
    assert may([entry(name="*")], Op.READ, "whatever")
    assert not may([entry(name="*", pattern=PREFIXED)], Op.READ, "whatever")
    assert not may([entry(name="w*")], Op.READ, "whatever")
    assert not may([entry(name="what?ver")], Op.READ, "whatever")


def test_a_prefix_is_of_names_that_begin_with_it_and_of_itself():
    acls = [entry(name="foo", pattern=PREFIXED)]
    assert may(acls, Op.READ, "foo")
    assert may(acls, Op.READ, "foo-bar")
    assert not may(acls, Op.READ, "fo")
    assert not may(acls, Op.READ, "Foo-bar")
    several = [entry(name=name, pattern=PREFIXED) for name in ("a", "abc", "abcdef")]
    assert may(several, Op.READ, "abcd")
    denied = [*several, entry(DENY, name="abc", pattern=PREFIXED)]
    assert may(denied, Op.READ, "ab")
    assert not may(denied, Op.READ, "abcd")


@pytest.mark.parametrize("name", ["größe", "日本語", "a b", "📈", "e\u0301", "*x"])
def test_names_may_be_any_text(name):
    assert may([entry(name=name)], Op.READ, name)
    assert may([entry(name=name, pattern=PREFIXED)], Op.READ, name + "語")
    assert not may([entry(name=name)], Op.READ, name + "語")


def test_kinds_of_resources_have_names_of_their_own():
    acls = [entry(kind=GROUP)]
    assert may(acls, Op.READ, kind=GROUP)
    assert not may(acls, Op.READ, kind=TOPIC)
    assert not may(acls, Op.READ, kind=ResourceType.TRANSACTIONAL_ID)
    cluster = [entry(operation=Op.ALTER, name=CLUSTER.name, kind=CLUSTER.type)]
    assert may(cluster, Op.ALTER, CLUSTER.name, kind=CLUSTER.type)


def test_a_change_of_the_entries_counts_from_the_next_question_on():
    store = Store(entry())
    authorizer = StandardAuthorizer(store)
    topic = Resource(TOPIC, "t")
    assert authorizer.authorize(sender(), Op.READ, topic)
    before = authorizer.version
    store.put()
    assert authorizer.version != before
    assert not authorizer.authorize(sender(), Op.READ, topic)


# -- any topic at all: KIP-679 ---------------------------------------------------------


def some_topic(acls, **options):
    authorizer = StandardAuthorizer(Store(*acls), **options)
    return authorizer.authorize_by_resource_type(sender(), Op.WRITE, TOPIC)


def writes(permission=ALLOW, name="t", **fields):
    return entry(permission, fields.pop("operation", Op.WRITE), name, **fields)


def test_write_of_any_topic_allows_by_resource_type():
    assert some_topic([writes()])
    assert some_topic([writes(name="*")])
    assert some_topic([writes(name="p", pattern=PREFIXED)])
    assert some_topic([writes(principal="User:*")])
    assert some_topic([writes(operation=Op.ALL)])
    assert some_topic([], super_users=["User:alice"])
    assert some_topic([], allow_everyone_if_no_acl_found=True)


def test_without_write_of_any_topic_the_resource_type_is_denied():
    assert not some_topic([])
    assert not some_topic([entry()])
    assert not some_topic([writes(principal="User:bob")])
    assert not some_topic([writes(host="10.0.0.2")])
    assert not some_topic([writes(kind=GROUP)])
    assert not some_topic([writes(), writes(DENY)])
    assert not some_topic([writes(name="abc"), writes(DENY, "ab", pattern=PREFIXED)])
    assert not some_topic([writes(name="*"), writes(DENY, "*")])
    assert not some_topic(
        [writes(name="abc", pattern=PREFIXED), writes(DENY, "a", pattern=PREFIXED)]
    )
    assert some_topic([writes(name="abc"), writes(DENY, "abcd", pattern=PREFIXED)])
    assert some_topic([writes(name="*"), writes(DENY, "a", pattern=PREFIXED)])
    assert not some_topic(
        [writes(name="*", principal="User:bob")], allow_everyone_if_no_acl_found=True
    )


# -- an oracle that goes by the rules one by one ---------------------------------------

NAMES = ["a", "ab", "abc", "b", "*"]
acls = st.builds(
    entry,
    st.sampled_from([ALLOW, DENY]),
    st.sampled_from([Op.READ, Op.WRITE, Op.DESCRIBE, Op.ALTER_CONFIGS, Op.ALL]),
    st.sampled_from(NAMES),
    kind=st.sampled_from([TOPIC, GROUP]),
    pattern=st.sampled_from([LITERAL, PREFIXED]),
    principal=st.sampled_from(["User:alice", "User:bob", "User:*"]),
    host=st.sampled_from(["*", "10.0.0.1", "10.0.0.2"]),
)
senders = st.builds(
    sender,
    st.sampled_from(["User:alice", "User:bob", "User:root"]),
    st.sampled_from(["10.0.0.1", "10.0.0.2"]),
)
OPERATIONS_ASKED = [Op.READ, Op.WRITE, Op.DESCRIBE, Op.DESCRIBE_CONFIGS, Op.CREATE]


def oracle(entries, who, operation, kind, name, *, default):
    if who.principal == "User:root":
        return True
    about = []
    for acl in entries:
        if acl.resource_type != kind:
            continue
        is_named = (
            name.startswith(acl.resource_name)
            if acl.pattern_type == PREFIXED
            else acl.resource_name in ("*", name)
        )
        if is_named:
            about.append(acl)
    if not about:
        return default
    mine = [
        acl
        for acl in about
        if acl.principal in ("User:*", who.principal) and acl.host in ("*", who.host)
    ]
    if any(
        acl.permission_type == DENY and acl.operation in (Op.ALL, operation)
        for acl in mine
    ):
        return False
    enough = {Op.ALL, operation}
    if operation == Op.DESCRIBE:
        enough |= {Op.READ, Op.WRITE, Op.DELETE, Op.ALTER}
    if operation == Op.DESCRIBE_CONFIGS:
        enough |= {Op.ALTER_CONFIGS}
    return any(acl.permission_type == ALLOW and acl.operation in enough for acl in mine)


@given(st.lists(acls, max_size=8), senders, st.booleans())
def test_it_decides_as_the_oracle_does(entries, who, default):
    authorizer = StandardAuthorizer(
        Store(*entries), ["User:root"], allow_everyone_if_no_acl_found=default
    )
    for operation, kind, name in itertools.product(
        OPERATIONS_ASKED, (TOPIC, GROUP), ("a", "ab", "abcd", "b", "c")
    ):
        expected = oracle(entries, who, operation, kind, name, default=default)
        resource = Resource(kind, name)
        assert authorizer.authorize(who, operation, resource) is expected
        if authorizer.everybody_may(operation, resource):
            assert expected


@given(st.lists(acls, max_size=6), senders, st.booleans())
def test_some_topic_may_be_written_to_if_there_can_be_one(entries, who, default):
    authorizer = StandardAuthorizer(
        Store(*entries), ["User:root"], allow_everyone_if_no_acl_found=default
    )
    # Entries name "a", "ab", "abc", "b" and what begins with them: these are all cases.
    possible = ["a", "ab", "abc", "b", "ax", "abx", "abcx", "bx", "x", "*", "*x"]
    assert authorizer.authorize_by_resource_type(who, Op.WRITE, TOPIC) is any(
        oracle(entries, who, Op.WRITE, TOPIC, name, default=default)
        for name in possible
    )


@given(st.lists(acls, max_size=6))
def test_everybody_may_agrees_with_the_decision_for_a_stranger(entries):
    authorizer = StandardAuthorizer(Store(*entries))
    for operation, name in itertools.product((Op.WRITE, Op.READ), NAMES[:-1]):
        resource = Resource(TOPIC, name)
        if authorizer.everybody_may(operation, resource):
            stranger = sender("User:nobody", "192.0.2.1")
            assert authorizer.authorize(stranger, operation, resource)


# -- what others may write ------------------------------------------------------------


class Simple(Authorizer):
    def authorize(self, context, operation, resource):
        return context.principal == "User:alice"


def test_a_custom_authorizer_needs_one_method():
    simple = Simple()
    simple.configure({"super.users": "User:x"})
    assert simple.authorize(sender(), Op.READ, CLUSTER)
    assert simple.version is None
    assert not simple.authorize_by_resource_type(sender(), Op.WRITE, TOPIC)
    assert not simple.everybody_may(Op.WRITE, CLUSTER)
    for ask in (
        lambda: simple.acls(AclFilter()),
        lambda: simple.create_acls(sender(), [entry()]),
        lambda: simple.delete_acls(sender(), [AclFilter()]),
    ):
        with pytest.raises(ApiError) as caught:
            ask()
        assert caught.value.error_code is ErrorCode.SECURITY_DISABLED


def test_every_kind_of_resource_has_its_operations():
    assert set(OPERATIONS) == {kind for kind in ResourceType if kind > ResourceType.ANY}
    assert OPERATIONS[ResourceType.TRANSACTIONAL_ID] == (
        Op.WRITE,
        Op.DESCRIBE,
        Op.TWO_PHASE_COMMIT,
    )
