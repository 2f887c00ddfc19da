"""The fields of Kafka's metadata records and of KRaft's control records, as tables.

A record's fields stand in the order in which they are written. A row is a field's name,
its type, the first version that has it, and for a tagged field its tag and its default.
Tagged fields are written only if they differ from their default.

Source: Apache Kafka 4.4.0, metadata/src/main/resources/common/metadata/*.json, and
LeaderChangeMessage, SnapshotHeaderRecord, SnapshotFooterRecord, KRaftVersionRecord and
VotersRecord of clients/src/main/resources/common/message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mpbroker.base.named_tuple import NamedTuple

# mpbroker's own fields have tags from here on, which Kafka does not use. Kafka skips
# tags that it does not know.
OWN_TAG: Final = 10_000


class FieldRow(NamedTuple):
    """One field of a record, or of a struct in it.

    Attributes:
        name: the field's name, as Kafka's tools print it.
        kind: "int32", "string", "uuid", ...; "[]int32" for an array; "?string" if it
            may be null; "[]" for an array of structs, "{}" for one struct.
        since: the first version that has the field.
        tag: the tag of a tagged field; -1: the field is not tagged.
        default: the value of a tagged field that is not written.
        fields: the fields of a struct, or of each struct in an array.
    """

    name: str
    kind: str
    since: int = 0
    tag: int = -1
    default: Any = None
    fields: tuple[FieldRow, ...] = ()


class RecordRow(NamedTuple):
    """One type of record: its number, its name, its newest version, its fields."""

    api_key: int
    name: str
    newest: int
    fields: tuple[FieldRow, ...]


_F = FieldRow

_END_POINTS: Final = _F(
    "endPoints",
    "[]",
    fields=(
        _F("name", "string"),
        _F("host", "string"),
        _F("port", "uint16"),
        _F("securityProtocol", "int16"),
    ),
)
_FEATURES: Final = _F(
    "features",
    "[]",
    fields=(
        _F("name", "string"),
        _F("minSupportedVersion", "int16"),
        _F("maxSupportedVersion", "int16"),
    ),
)
_BROKER_AND_EPOCH: Final = (_F("id", "int32"), _F("epoch", "int64"))

_VOTERS: Final = (_F("voterId", "int32"), _F("voterDirectoryId", "uuid", 1))

_ROWS: Final = (
    RecordRow(
        0,
        "RegisterBrokerRecord",
        4,
        (
            _F("brokerId", "int32"),
            _F("isMigratingZkBroker", "bool", 2),
            _F("incarnationId", "uuid"),
            _F("brokerEpoch", "int64"),
            _END_POINTS,
            _FEATURES,
            _F("rack", "?string"),
            _F("fenced", "bool"),
            _F("inControlledShutdown", "bool", 1),
            _F("logDirs", "[]uuid", 3, 0, []),
            _F("cordonedLogDirs", "?[]uuid", 4, 1),
        ),
    ),
    RecordRow(
        1,
        "UnregisterBrokerRecord",
        0,
        (_F("brokerId", "int32"), _F("brokerEpoch", "int64")),
    ),
    RecordRow(2, "TopicRecord", 0, (_F("name", "string"), _F("topicId", "uuid"))),
    RecordRow(
        3,
        "PartitionRecord",
        2,
        (
            _F("partitionId", "int32"),
            _F("topicId", "uuid"),
            _F("replicas", "[]int32"),
            _F("isr", "[]int32"),
            _F("removingReplicas", "[]int32"),
            _F("addingReplicas", "[]int32"),
            _F("leader", "int32"),
            _F("leaderRecoveryState", "int8", 0, 0, 0),
            _F("leaderEpoch", "int32"),
            _F("partitionEpoch", "int32"),
            _F("directories", "[]uuid", 1),
            _F("eligibleLeaderReplicas", "?[]int32", 2, 1),
            _F("lastKnownElr", "?[]int32", 2, 2),
            # The row of the shared partition table, if another partition had it before.
            _F("row", "?int32", 0, OWN_TAG),
            # The row, in a snapshot that a running broker made; see topics.py.
            _F("ownRow", "?int32", 0, OWN_TAG + 1),
        ),
    ),
    RecordRow(
        4,
        "ConfigRecord",
        0,
        (
            _F("resourceType", "int8"),
            _F("resourceName", "string"),
            _F("name", "string"),
            _F("value", "?string"),
        ),
    ),
    RecordRow(
        5,
        "PartitionChangeRecord",
        2,
        (
            _F("partitionId", "int32"),
            _F("topicId", "uuid"),
            _F("isr", "?[]int32", 0, 0),
            _F("leader", "int32", 0, 1, -2),
            _F("replicas", "?[]int32", 0, 2),
            _F("removingReplicas", "?[]int32", 0, 3),
            _F("addingReplicas", "?[]int32", 0, 4),
            _F("leaderRecoveryState", "int8", 0, 5, -1),
            _F("directories", "?[]uuid", 1, 8),
            _F("eligibleLeaderReplicas", "?[]int32", 2, 6),
            _F("lastKnownElr", "?[]int32", 2, 7),
        ),
    ),
    RecordRow(7, "FenceBrokerRecord", 0, _BROKER_AND_EPOCH),
    RecordRow(8, "UnfenceBrokerRecord", 0, _BROKER_AND_EPOCH),
    RecordRow(9, "RemoveTopicRecord", 0, (_F("topicId", "uuid"),)),
    RecordRow(
        10,
        "DelegationTokenRecord",
        0,
        (
            _F("owner", "string"),
            _F("requester", "string"),
            _F("renewers", "[]string"),
            _F("issueTimestamp", "int64"),
            _F("maxTimestamp", "int64"),
            _F("expirationTimestamp", "int64"),
            _F("tokenId", "string"),
        ),
    ),
    RecordRow(
        11,
        "UserScramCredentialRecord",
        0,
        (
            _F("name", "string"),
            _F("mechanism", "int8"),
            _F("salt", "bytes"),
            _F("storedKey", "bytes"),
            _F("serverKey", "bytes"),
            _F("iterations", "int32"),
        ),
    ),
    RecordRow(
        12,
        "FeatureLevelRecord",
        0,
        (
            _F("name", "string"),
            _F("featureLevel", "int16"),
            # In the first record of a snapshot that a running broker made: the position
            # in the log behind the snapshot, and the rows of deleted partitions.
            _F("logPosition", "?int64", 0, OWN_TAG),
            _F("rows", "?string", 0, OWN_TAG + 1),
        ),
    ),
    RecordRow(
        14,
        "ClientQuotaRecord",
        0,
        (
            _F(
                "entity",
                "[]",
                fields=(_F("entityType", "string"), _F("entityName", "?string")),
            ),
            _F("key", "string"),
            _F("value", "float64"),
            _F("remove", "bool"),
        ),
    ),
    RecordRow(
        15,
        "ProducerIdsRecord",
        0,
        (
            _F("brokerId", "int32"),
            _F("brokerEpoch", "int64"),
            _F("nextProducerId", "int64"),
        ),
    ),
    RecordRow(
        17,
        "BrokerRegistrationChangeRecord",
        3,
        (
            _F("brokerId", "int32"),
            _F("brokerEpoch", "int64"),
            _F("fenced", "int8", 0, 0, 0),
            _F("inControlledShutdown", "int8", 1, 1, 0),
            _F("logDirs", "[]uuid", 2, 2, []),
            _F("cordonedLogDirs", "?[]uuid", 3, 3),
        ),
    ),
    RecordRow(
        18,
        "AccessControlEntryRecord",
        0,
        (
            _F("id", "uuid"),
            _F("resourceType", "int8"),
            _F("resourceName", "string"),
            _F("patternType", "int8"),
            _F("principal", "string"),
            _F("host", "string"),
            _F("operation", "int8"),
            _F("permissionType", "int8"),
        ),
    ),
    RecordRow(
        19,
        "RemoveAccessControlEntryRecord",
        0,
        (
            _F("id", "uuid"),
            # The request that removes the entry; see acl_records.delete_acls().
            _F("request", "?string", 0, OWN_TAG),
        ),
    ),
    RecordRow(20, "NoOpRecord", 0, ()),
    RecordRow(21, "ZkMigrationStateRecord", 0, (_F("zkMigrationState", "int8"),)),
    RecordRow(
        22,
        "RemoveUserScramCredentialRecord",
        0,
        (_F("name", "string"), _F("mechanism", "int8")),
    ),
    RecordRow(23, "BeginTransactionRecord", 0, (_F("name", "?string", 0, 0),)),
    RecordRow(24, "EndTransactionRecord", 0, ()),
    RecordRow(25, "AbortTransactionRecord", 0, (_F("reason", "?string", 0, 0),)),
    RecordRow(26, "RemoveDelegationTokenRecord", 0, (_F("tokenId", "string"),)),
    RecordRow(
        27,
        "RegisterControllerRecord",
        0,
        (
            _F("controllerId", "int32"),
            _F("incarnationId", "uuid"),
            _F("zkMigrationReady", "bool"),
            _END_POINTS,
            _FEATURES,
        ),
    ),
    RecordRow(28, "ClearElrRecord", 0, (_F("topicName", "string"),)),
    RecordRow(29, "UnregisterControllerRecord", 0, (_F("controllerId", "int32"),)),
)

RECORD_ROWS: Final[Mapping[str, RecordRow]] = {row.name: row for row in _ROWS}
RECORD_NAMES: Final[Mapping[int, str]] = {row.api_key: row.name for row in _ROWS}

LEADER_CHANGE: Final = 2
SNAPSHOT_HEADER: Final = 3
SNAPSHOT_FOOTER: Final = 4
KRAFT_VERSION: Final = 5
KRAFT_VOTERS: Final = 6

# By the type in the key of a control record. The value begins with its version.
CONTROL_ROWS: Final[Mapping[int, RecordRow]] = {
    row.api_key: row
    for row in (
        RecordRow(
            LEADER_CHANGE,
            "LeaderChange",
            1,
            (
                _F("leaderId", "int32"),
                _F("voters", "[]", fields=_VOTERS),
                _F("grantingVoters", "[]", fields=_VOTERS),
            ),
        ),
        RecordRow(
            SNAPSHOT_HEADER,
            "SnapshotHeader",
            0,
            (_F("lastContainedLogTimestamp", "int64"),),
        ),
        RecordRow(SNAPSHOT_FOOTER, "SnapshotFooter", 0, ()),
        RecordRow(KRAFT_VERSION, "KRaftVersion", 0, (_F("kRaftVersion", "int16"),)),
        RecordRow(
            KRAFT_VOTERS,
            "KRaftVoters",
            0,
            (
                _F(
                    "voters",
                    "[]",
                    fields=(
                        _F("voterId", "int32"),
                        _F("voterDirectoryId", "uuid"),
                        _F(
                            "endpoints",
                            "[]",
                            fields=(
                                _F("name", "string"),
                                _F("host", "string"),
                                _F("port", "uint16"),
                            ),
                        ),
                        _F(
                            "kRaftVersionFeature",
                            "{}",
                            fields=(
                                _F("minSupportedVersion", "int16"),
                                _F("maxSupportedVersion", "int16"),
                            ),
                        ),
                    ),
                ),
            ),
        ),
    )
}
