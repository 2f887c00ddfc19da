"""Every API is refused without permissions, and unchanged with all permissions."""

from __future__ import annotations

import pytest

from mpbroker.protocol.acl import AclOperation as Op
from mpbroker.server.api_messages import request_class
from mpbroker.server.apis import APIS, OPEN
from mpbroker.server.message_apis import rule_of
from mpbroker.server.request import CLOSE, PARKED
from tests.server.authorization.authorization_stage import (
    Granting,
    authorization,
    request_of,
)
from tests.server.authorization.guarded_asks import (
    CLUSTER,
    GROUP,
    ID,
    TOPIC,
    Handler,
    K,
    ask,
    codes_of,
    guarded,
    sample,
    texts_of,
)

# What anybody may ask; what a Produce and a Fetch need is in other tests: see below.
ANYBODY = {
    K.API_VERSIONS,
    K.SASL_HANDSHAKE,
    K.SASL_AUTHENTICATE,
    K.DESCRIBE_CLUSTER,
    K.GET_TELEMETRY_SUBSCRIPTIONS,
    K.PUSH_TELEMETRY,
    # Of the sender's own tokens; others are in handlers/test_token_handlers.py.
    K.CREATE_DELEGATION_TOKEN,
    K.RENEW_DELEGATION_TOKEN,
    K.EXPIRE_DELEGATION_TOKEN,
    K.DESCRIBE_DELEGATION_TOKEN,
}
BY_THEMSELVES = {K.PRODUCE, K.FETCH}
# Answered with less, and without an error.
SILENT = {K.LIST_GROUPS, K.LIST_TRANSACTIONS}

TEXTS = {"t", "g", "x"}  # topic, group, transactional id


EXPECTED = {
    K.LIST_OFFSETS: TOPIC,
    K.METADATA: TOPIC,
    K.OFFSET_COMMIT: GROUP,
    K.OFFSET_FETCH: GROUP,
    K.FIND_COORDINATOR: GROUP,
    K.JOIN_GROUP: GROUP,
    K.HEARTBEAT: GROUP,
    K.LEAVE_GROUP: GROUP,
    K.SYNC_GROUP: GROUP,
    K.DESCRIBE_GROUPS: GROUP,
    K.CREATE_TOPICS: TOPIC,
    K.DELETE_TOPICS: TOPIC,
    K.DELETE_RECORDS: TOPIC,
    K.INIT_PRODUCER_ID: ID,
    K.OFFSET_FOR_LEADER_EPOCH: TOPIC,
    K.ADD_PARTITIONS_TO_TXN: None,  # ID up to version 3, then CLUSTER
    K.ADD_OFFSETS_TO_TXN: ID,
    K.END_TXN: ID,
    K.WRITE_TXN_MARKERS: CLUSTER,
    K.TXN_OFFSET_COMMIT: ID,
    K.DESCRIBE_ACLS: CLUSTER,
    K.CREATE_ACLS: CLUSTER,
    K.DELETE_ACLS: CLUSTER,
    K.DESCRIBE_CONFIGS: TOPIC,
    K.ALTER_CONFIGS: TOPIC,
    K.ALTER_REPLICA_LOG_DIRS: CLUSTER,
    K.DESCRIBE_LOG_DIRS: CLUSTER,
    K.CREATE_PARTITIONS: TOPIC,
    K.DELETE_GROUPS: GROUP,
    K.ELECT_LEADERS: CLUSTER,
    K.DESCRIBE_QUORUM: CLUSTER,
    K.UPDATE_FEATURES: CLUSTER,
    K.ADD_RAFT_VOTER: CLUSTER,
    K.REMOVE_RAFT_VOTER: CLUSTER,
    K.UNREGISTER_BROKER: CLUSTER,
    K.INCREMENTAL_ALTER_CONFIGS: TOPIC,
    K.ALTER_PARTITION_REASSIGNMENTS: CLUSTER,
    K.LIST_PARTITION_REASSIGNMENTS: CLUSTER,
    K.OFFSET_DELETE: GROUP,
    K.DESCRIBE_CLIENT_QUOTAS: CLUSTER,
    K.ALTER_CLIENT_QUOTAS: CLUSTER,
    K.DESCRIBE_USER_SCRAM_CREDENTIALS: CLUSTER,
    K.ALTER_USER_SCRAM_CREDENTIALS: CLUSTER,
    K.DESCRIBE_PRODUCERS: TOPIC,
    K.DESCRIBE_TRANSACTIONS: ID,
    K.CONSUMER_GROUP_HEARTBEAT: GROUP,
    K.CONSUMER_GROUP_DESCRIBE: GROUP,
    K.STREAMS_GROUP_HEARTBEAT: GROUP,
    K.STREAMS_GROUP_DESCRIBE: GROUP,
    K.SHARE_GROUP_HEARTBEAT: GROUP,
    K.SHARE_GROUP_DESCRIBE: GROUP,
    K.SHARE_FETCH: GROUP,
    K.SHARE_ACKNOWLEDGE: GROUP,
    K.DESCRIBE_SHARE_GROUP_OFFSETS: GROUP,
    K.ALTER_SHARE_GROUP_OFFSETS: GROUP,
    K.DELETE_SHARE_GROUP_OFFSETS: GROUP,
    K.INITIALIZE_SHARE_GROUP_STATE: CLUSTER,
    K.READ_SHARE_GROUP_STATE: CLUSTER,
    K.WRITE_SHARE_GROUP_STATE: CLUSTER,
    K.DELETE_SHARE_GROUP_STATE: CLUSTER,
    K.READ_SHARE_GROUP_STATE_SUMMARY: CLUSTER,
    K.DESCRIBE_TOPIC_PARTITIONS: TOPIC,
    K.LIST_CONFIG_RESOURCES: CLUSTER,
}

CASES = [
    (key, version)
    for key, api in APIS.items()
    if key not in ANYBODY | BY_THEMSELVES
    for version in range(api.versions[0], api.versions[1] + 1)
]
# In these versions there is no place for the error: an empty answer is all there is.
NO_PLACE = {(K.DESCRIBE_LOG_DIRS, 1), (K.DESCRIBE_LOG_DIRS, 2)}


def test_every_api_that_is_served_has_a_line_here_and_a_rule_that_is_there():
    assert set(APIS) <= set(EXPECTED) | ANYBODY | BY_THEMSELVES | SILENT
    for api in APIS.values():
        if api.rule is not OPEN:
            assert callable(rule_of(api))


@pytest.mark.parametrize(
    ("key", "version"), CASES, ids=[f"{key.name}-{version}" for key, version in CASES]
)
def test_without_rights_an_api_is_refused_and_its_handler_sees_nothing(key, version):
    message = sample(request_class(key), version, key)
    answer, seen = ask(message, version)
    expected = EXPECTED.get(key)
    if key is K.ADD_PARTITIONS_TO_TXN:
        expected = ID if version < 4 else CLUSTER
    if key in SILENT or (key, version) in NO_PLACE:
        assert codes_of(answer) == set()
    else:
        assert codes_of(answer) == {expected}
    assert seen is None or not texts_of(seen) & TEXTS


@pytest.mark.parametrize(
    ("key", "version"), CASES, ids=[f"{key.name}-{version}" for key, version in CASES]
)
def test_with_all_rights_a_request_reaches_its_handler_as_it_was(key, version):
    message = sample(request_class(key), version, key)
    everything = [
        (operation, name)
        for operation in Op
        for name in ("t", "g", "x", "kafka-cluster")
    ]
    answer, seen = ask(message, version, *everything)
    assert seen.encode(version) == message.encode(version)
    assert codes_of(answer) == set()


@pytest.mark.parametrize("key", sorted(ANYBODY))
def test_apis_without_a_rule_are_open_to_all(key):
    oldest, newest = APIS[key].versions
    for version in range(oldest, newest + 1):
        message = request_class(key)()
        answer, seen = ask(message, version)
        assert seen is not None
        assert codes_of(answer) == set()


def test_without_an_authorizer_nothing_stands_before_a_handler():
    message = request_class(K.METADATA)(topics=[])
    handler = Handler(K.METADATA)
    guarded(K.METADATA, handler, None)(request_of(message, 9))
    assert handler.seen.topics == []


def test_a_parked_answer_is_not_amended():
    message = sample(request_class(K.INIT_PRODUCER_ID), 5, K.INIT_PRODUCER_ID)
    handle = guarded(
        K.INIT_PRODUCER_ID,
        lambda request, message, access, amend: PARKED,
        authorization(Granting((Op.WRITE, "x"))),
    )
    assert handle(request_of(message, 5)) is PARKED


def test_a_request_of_a_connection_that_has_gone_is_not_executed():
    made = authorization(Granting())
    made._contexts.known = None
    handle = guarded(K.METADATA, Handler(K.METADATA), made)
    message = request_class(K.METADATA)(topics=[])
    assert handle(request_of(message, 9)) is CLOSE
