"""What Kafka's error codes mean, in words, for responses that have none of their own.

Source: Kafka protocol guide, "Error Codes"; org.apache.kafka.common.protocol.Errors.
"""

from __future__ import annotations

from typing import Final

from mpbroker.protocol.error_code import ErrorCode as E

MEANINGS: Final = {
    E.UNKNOWN_SERVER_ERROR: "the broker met an unexpected error; its log has more",
    E.NONE: "no error",
    E.OFFSET_OUT_OF_RANGE: "the partition does not have this offset",
    E.CORRUPT_MESSAGE: "the bytes of the records do not fit their checksum",
    E.UNKNOWN_TOPIC_OR_PARTITION: "there is no such topic or partition",
    E.INVALID_FETCH_SIZE: "the requested size is not valid",
    E.LEADER_NOT_AVAILABLE: "the partition has no leader at the moment",
    E.NOT_LEADER_OR_FOLLOWER: "the partition is not served by this broker, or not yet",
    E.REQUEST_TIMED_OUT: "it was not done in time; it may still be done",
    E.BROKER_NOT_AVAILABLE: "the broker is not available",
    E.REPLICA_NOT_AVAILABLE: "the replica is not available",
    E.MESSAGE_TOO_LARGE: "a batch is larger than max.message.bytes allows",
    E.STALE_CONTROLLER_EPOCH: "another controller has taken over",
    E.OFFSET_METADATA_TOO_LARGE: "the metadata of a position is too long",
    E.NETWORK_EXCEPTION: "the connection ended before the answer",
    E.COORDINATOR_LOAD_IN_PROGRESS: "the coordinator is still loading; try again",
    E.COORDINATOR_NOT_AVAILABLE: "the coordinator is not available; try again",
    E.NOT_COORDINATOR: "another broker is the coordinator",
    E.INVALID_TOPIC_EXCEPTION: (
        "topics have 1 to 249 of the characters a-z A-Z 0-9 . _ - as their names, and"
        " collide with no other one"
    ),
    E.RECORD_LIST_TOO_LARGE: "a batch is larger than a segment may be",
    E.NOT_ENOUGH_REPLICAS: "fewer replicas are in sync than min.insync.replicas asks",
    E.NOT_ENOUGH_REPLICAS_AFTER_APPEND: (
        "written, but to fewer replicas than min.insync.replicas asks"
    ),
    E.INVALID_REQUIRED_ACKS: "acks is none of 0, 1 and all",
    E.ILLEGAL_GENERATION: "the group has rebalanced since",
    E.INCONSISTENT_GROUP_PROTOCOL: (
        "the other members of the group have no assignment strategy, or protocol type,"
        " in common with this one"
    ),
    E.INVALID_GROUP_ID: "the group's id is not valid; it may be empty",
    E.UNKNOWN_MEMBER_ID: "the group does not have this member",
    E.INVALID_SESSION_TIMEOUT: (
        "session.timeout.ms is not between the broker's group.min.session.timeout.ms"
        " and group.max.session.timeout.ms"
    ),
    E.REBALANCE_IN_PROGRESS: "the group is rebalancing",
    E.INVALID_COMMIT_OFFSET_SIZE: "the commit is too large",
    E.TOPIC_AUTHORIZATION_FAILED: "the user has no permission for this topic",
    E.GROUP_AUTHORIZATION_FAILED: "the user has no permission for this group",
    E.CLUSTER_AUTHORIZATION_FAILED: "the user lacks this permission for the cluster",
    E.INVALID_TIMESTAMP: "a record's timestamp is outside of what the topic accepts",
    E.UNSUPPORTED_SASL_MECHANISM: "the broker does not offer this SASL mechanism",
    E.ILLEGAL_SASL_STATE: "the request does not fit into the login",
    E.UNSUPPORTED_VERSION: "the broker does not know this version of the request",
    E.TOPIC_ALREADY_EXISTS: "there is a topic of this name",
    E.INVALID_PARTITIONS: "the number of partitions is not valid",
    E.INVALID_REPLICATION_FACTOR: "there are fewer brokers than replicas asked for",
    E.INVALID_REPLICA_ASSIGNMENT: "the assignment of replicas is not valid",
    E.INVALID_CONFIG: "a config is unknown, or its value is not valid",
    E.NOT_CONTROLLER: "another broker is the controller",
    E.INVALID_REQUEST: "the request contradicts itself, or lacks something",
    E.UNSUPPORTED_FOR_MESSAGE_FORMAT: "the format of the records does not support it",
    E.POLICY_VIOLATION: "a policy or a limit of the broker does not allow it",
    E.OUT_OF_ORDER_SEQUENCE_NUMBER: "a record before this one has not arrived",
    E.DUPLICATE_SEQUENCE_NUMBER: "the batch was written before",
    E.INVALID_PRODUCER_EPOCH: "a newer producer uses this id, or its transaction ended",
    E.INVALID_TXN_STATE: "the transaction is in no state for this",
    E.INVALID_PRODUCER_ID_MAPPING: "the transactional id has another producer id",
    E.INVALID_TRANSACTION_TIMEOUT: (
        "transaction.timeout.ms is larger than the broker's transaction.max.timeout.ms"
    ),
    E.CONCURRENT_TRANSACTIONS: "the producer's last transaction has not ended yet",
    E.TRANSACTION_COORDINATOR_FENCED: "another transaction coordinator has taken over",
    E.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: (
        "the user has no permission for this transactional id"
    ),
    E.SECURITY_DISABLED: "the broker has no authorizer, or no such security, set up",
    E.OPERATION_NOT_ATTEMPTED: "not tried, because another part of the request failed",
    E.KAFKA_STORAGE_ERROR: "the disk has failed or is full; the broker's log has more",
    E.LOG_DIR_NOT_FOUND: "the broker has no such log directory",
    E.SASL_AUTHENTICATION_FAILED: "the login was refused",
    E.UNKNOWN_PRODUCER_ID: "the partition has no records of this producer any more",
    E.REASSIGNMENT_IN_PROGRESS: "the partition is being moved",
    E.DELEGATION_TOKEN_AUTH_DISABLED: "delegation tokens are not set up",
    E.DELEGATION_TOKEN_NOT_FOUND: "there is no such delegation token",
    E.DELEGATION_TOKEN_OWNER_MISMATCH: "the delegation token is somebody else's",
    E.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED: (
        "delegation tokens are given over secured connections only, and not to those"
        " that have logged in with one"
    ),
    E.DELEGATION_TOKEN_AUTHORIZATION_FAILED: (
        "the user has no permission for this delegation token"
    ),
    E.DELEGATION_TOKEN_EXPIRED: "the delegation token has expired",
    E.INVALID_PRINCIPAL_TYPE: "principals are of the type User",
    E.NON_EMPTY_GROUP: "the group has members",
    E.GROUP_ID_NOT_FOUND: "there is no such group",
    E.FETCH_SESSION_ID_NOT_FOUND: "the fetch session has ended",
    E.INVALID_FETCH_SESSION_EPOCH: "the fetch session is at another request",
    E.LISTENER_NOT_FOUND: "the leader has no such listener",
    E.TOPIC_DELETION_DISABLED: "delete.topic.enable is false",
    E.FENCED_LEADER_EPOCH: "the partition has had another leader since",
    E.UNKNOWN_LEADER_EPOCH: "the broker does not know of this leader yet",
    E.UNSUPPORTED_COMPRESSION_TYPE: "this request cannot have such compressed records",
    E.STALE_BROKER_EPOCH: "the broker has registered again since",
    E.OFFSET_NOT_AVAILABLE: "the new leader does not know the end yet; try again",
    E.MEMBER_ID_REQUIRED: "a member joins again with the id that it was given",
    E.PREFERRED_LEADER_NOT_AVAILABLE: "the preferred leader is not available",
    E.GROUP_MAX_SIZE_REACHED: "the group has as many members as group.max.size allows",
    E.FENCED_INSTANCE_ID: "another member has taken this group.instance.id",
    E.ELIGIBLE_LEADERS_NOT_AVAILABLE: "no replica may become the leader",
    E.ELECTION_NOT_NEEDED: "the partition has the right leader",
    E.NO_REASSIGNMENT_IN_PROGRESS: "the partition is not being moved",
    E.GROUP_SUBSCRIBED_TO_TOPIC: "members of the group read this topic",
    E.INVALID_RECORD: "the broker refused a record as not valid",
    E.UNSTABLE_OFFSET_COMMIT: "an open transaction holds the position; try again",
    E.THROTTLING_QUOTA_EXCEEDED: "a quota is used up; try again later",
    E.PRODUCER_FENCED: "a newer producer uses this transactional.id",
    E.RESOURCE_NOT_FOUND: "it does not exist",
    E.DUPLICATE_RESOURCE: "it is named twice, or exists",
    E.UNACCEPTABLE_CREDENTIAL: "the password or its iterations are not acceptable",
    E.INCONSISTENT_VOTER_SET: "the voters differ",
    E.INVALID_UPDATE_VERSION: "the feature cannot have this version",
    E.FEATURE_UPDATE_FAILED: "the feature could not be changed",
    E.PRINCIPAL_DESERIALIZATION_FAILURE: "a forwarded principal cannot be read",
    E.SNAPSHOT_NOT_FOUND: "there is no such snapshot",
    E.POSITION_OUT_OF_RANGE: "the snapshot does not have this position",
    E.UNKNOWN_TOPIC_ID: "there is no topic with this id; it may have been deleted",
    E.DUPLICATE_BROKER_REGISTRATION: "another broker has this id",
    E.BROKER_ID_NOT_REGISTERED: "no broker has this id",
    E.INCONSISTENT_TOPIC_ID: "the topic has another id: it was deleted and made again",
    E.INCONSISTENT_CLUSTER_ID: "the broker belongs to another cluster",
    E.TRANSACTIONAL_ID_NOT_FOUND: "there is no such transactional id",
    E.FETCH_SESSION_TOPIC_ID_ERROR: "the fetch session began without ids of topics",
    E.INELIGIBLE_REPLICA: "the replica cannot be in sync now",
    E.NEW_LEADER_ELECTED: "the partition has a new leader",
    E.OFFSET_MOVED_TO_TIERED_STORAGE: "the offset is in the remote store only",
    E.FENCED_MEMBER_EPOCH: "the group has removed this member",
    E.UNRELEASED_INSTANCE_ID: "another member still has this group.instance.id",
    E.UNSUPPORTED_ASSIGNOR: "the broker has no such assignor",
    E.STALE_MEMBER_EPOCH: "the member's epoch is older than the group's",
    E.MISMATCHED_ENDPOINT_TYPE: "the listener is not of the type asked for",
    E.UNSUPPORTED_ENDPOINT_TYPE: "this type of listener is not known",
    E.UNKNOWN_CONTROLLER_ID: "there is no such controller",
    E.UNKNOWN_SUBSCRIPTION_ID: "the broker asks for other metrics of clients",
    E.TELEMETRY_TOO_LARGE: "the pushed metrics are too large",
    E.INVALID_REGISTRATION: "the registration of the broker is not valid",
    E.TRANSACTION_ABORTABLE: "the transaction has to be aborted",
    E.INVALID_RECORD_STATE: "the record is not acquired any more",
    E.SHARE_SESSION_NOT_FOUND: "the share session has ended",
    E.INVALID_SHARE_SESSION_EPOCH: "the share session is at another request",
    E.FENCED_STATE_EPOCH: "another share coordinator has taken over",
    E.INVALID_VOTER_KEY: "the voter has another key",
    E.DUPLICATE_VOTER: "the voter is one of the voters",
    E.VOTER_NOT_FOUND: "there is no such voter",
    E.INVALID_REGULAR_EXPRESSION: "the pattern is not valid in RE2's syntax",
    E.REBOOTSTRAP_REQUIRED: "the client has to begin with bootstrap.servers again",
    E.STREAMS_INVALID_TOPOLOGY: "the topology of the Streams application is not valid",
    E.STREAMS_INVALID_TOPOLOGY_EPOCH: "the topology's epoch is not valid",
    E.STREAMS_TOPOLOGY_FENCED: "the topology's epoch is outdated",
    E.SHARE_SESSION_LIMIT_REACHED: "the broker has no room for another share session",
    E.GROUP_DELETION_FAILED: "the group could not be deleted",
    E.STREAMS_TOPOLOGY_DESCRIPTION_UPDATE_FAILED: (
        "the broker could not take the description of the topology"
    ),
    E.CONTROLLER_ID_NOT_REGISTERED: "no such controller is registered",
}
